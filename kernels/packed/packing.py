"""Packing one layer: quantise and pack the channels and tokens that the bit allocation retains.

Called by prefill. Does not choose bits. Works a head at a time, because heads retain different numbers of
tokens and nothing is padded to the longest.
"""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.dispatch import path_for, shape_problem
from kvferry.kernels.packed.key_words import WIDTHS, pack_key_words
from kvferry.kernels.packed.layer import PackedHead, PackedLayer, view_packed_layer
from kvferry.kernels.packed.layout import HeadCounts, packed_layout, position_dtype
from kvferry.kernels.packed.value_rows import pack_value_rows
from kvferry.kernels.quantise import quantise_rows
from kvferry.kernels.quarantine import attempt


class UnusableBits(ValueError):
    """The bits were allocated by weights that are not finite."""


def pack_layer(
    keys: Tensor,
    values: Tensor,
    key_bits: Tensor,
    value_bits: Tensor,
    *,
    usable: Tensor | None = None,
) -> PackedLayer:
    """Quantise and pack: K per channel over the retained tokens, V per token over D. The host waits for the
    device twice: for the counts of each width, and for whether all values can be represented.

    Args:
        keys, values: floating `[H_kv, T, D]`; keys post-RoPE.
        key_bits: uint8 `[H_kv, D]`, each 0, 2, 4, 8 or 16.
        value_bits: uint8 `[H_kv, T]`, the same widths; a token of 0 bits is dropped, with its K.
        usable: bool `[]` on the device, whether the bits mean something; None if they do.

    Raises:
        UnusableBits: the bits mean nothing.
        ValueError: shapes do not fit together, another width, or a retained value that is not finite in
            float16.
    """
    packed = indexed_layer(keys, values, key_bits, value_bits, usable)
    in_torch = partial(fill_in_torch, packed, keys, values)
    if path_for("pack", keys.device, partial(_unsupported, keys, values)) == "torch":
        in_torch()
        return packed

    def launch() -> None:
        # a CPU install has no Triton
        from kvferry.kernels.packed import triton_kernel

        triton_kernel.fill(packed, keys, values)

    attempt("pack", launch, in_torch)
    return packed


def indexed_layer(
    keys: Tensor, values: Tensor, key_bits: Tensor, value_bits: Tensor, usable: Tensor | None = None
) -> PackedLayer:
    """The first part of `pack_layer`: channels and positions are written, all else is zero."""
    _check_pack(keys, values, key_bits, value_bits)
    num_kv_heads, (num_tokens, head_dim) = len(keys), keys.shape[1:]
    counts = _counts(key_bits, value_bits, usable)
    heads = []
    for widths, tokens in zip(counts[:num_kv_heads], counts[num_kv_heads:], strict=True):
        # without tokens there are no channels to store
        heads.append(HeadCounts(channels=widths if any(tokens) else (0, 0, 0, 0), tokens=tokens))
    layout = packed_layout(heads, head_dim, num_tokens=num_tokens)
    packed = view_packed_layer(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8, device=keys.device))
    channel_order = key_bits.sort(dim=1, stable=True).indices.to(torch.int16)
    token_order = value_bits.sort(dim=1, stable=True).indices.to(position_dtype(num_tokens))
    pieces, padding = [], torch.zeros(ALIGNMENT_BYTES, dtype=torch.uint8, device=keys.device)
    for h, head in enumerate(layout.heads):
        # channels and tokens of zero bits sort first and are dropped
        for index in (
            channel_order[h, head_dim - head.num_channels :],
            token_order[h, num_tokens - head.num_tokens :],
        ):
            octets = index.view(torch.uint8)
            pieces += [octets, padding[: -len(octets) % ALIGNMENT_BYTES]]
    start, size_bytes = layout.kinds["index"]
    torch.cat(pieces, out=packed.buffer[start : start + size_bytes])
    return packed


def fill_in_torch(packed: PackedLayer, keys: Tensor, values: Tensor) -> None:
    """The rest of `pack_layer` in torch: quantise and pack the channels and tokens in the layer's index."""
    for h, head in enumerate(packed.heads):
        if head.counts.num_tokens:
            channels, positions = head.channels.long(), head.positions.long()
            _pack_keys(head, keys[h].index_select(0, positions).index_select(1, channels).T)
            _pack_values(head, values[h].index_select(0, positions))


def _unsupported(keys: Tensor, values: Tensor) -> str | None:
    if keys.stride(2) != 1 or values.stride(2) != 1:
        return "rows of keys and values must be contiguous (stride 1 over D)"
    of_keys, of_values = (shape_problem(its.dtype, 1, its.shape[2], its.device) for its in (keys, values))
    return of_keys or of_values


def _counts(key_bits: Tensor, value_bits: Tensor, usable: Tensor | None) -> list[tuple[int, int, int, int]]:
    """How many units of each row have each width, read at once: of K's heads, then of V's.

    Raises: UnusableBits; ValueError: another width.
    """
    widths = _all_widths(key_bits.device)
    counted = torch.cat([(bits[:, :, None] == widths).sum(1) for bits in (key_bits, value_bits)])
    if usable is not None:
        counted = torch.cat([counted.flatten(), usable[None]])
    *read, is_usable = counted.flatten().tolist() if usable is not None else [*counted.flatten().tolist(), 1]
    if not is_usable:
        raise UnusableBits("bits were allocated by weights that are not finite and at least 0")
    counts = []
    for row, start in enumerate(range(0, len(read), len(widths))):
        none, two, four, eight, sixteen = read[start : start + len(widths)]
        bits = key_bits if row < len(key_bits) else value_bits
        if none + two + four + eight + sixteen != bits.shape[1]:
            found = sorted(set(bits.flatten().tolist()))
            raise ValueError(f"bits are {found}; each must be one of {(0, *WIDTHS)}")
        counts.append((two, four, eight, sixteen))
    return counts


@functools.cache
def _all_widths(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([0, *WIDTHS], device=device)


def _pack_keys(head: PackedHead, rows: Tensor) -> None:
    """Args: rows `[c, n]`, channels and tokens in packed order."""
    counts = head.counts.channels
    coded = sum(counts[:3])
    parts = [rows.new_zeros(0, rows.shape[1], dtype=torch.uint8)] * 3
    if coded:
        codes, scales, minima = quantise_rows(rows[:coded], _widths(counts, rows.device), half=True)
        head.key_scales.copy_(scales)
        head.key_minima.copy_(minima)
        parts = list(torch.split(codes, list(counts[:3])))
    head.key_words.copy_(pack_key_words([*parts, _half(rows[coded:])], rows.shape[1]))


def _pack_values(head: PackedHead, rows: Tensor) -> None:
    """Args: rows `[n, D]`, tokens in packed order."""
    counts = head.counts.tokens
    coded = sum(counts[:3])
    if coded:
        codes, scales, minima = quantise_rows(rows[:coded], _widths(counts, rows.device), half=True)
        head.value_scales.copy_(scales)
        head.value_minima.copy_(minima)
        parts = torch.split(codes, list(counts[:3]))
        targets = (head.values_2, head.values_4, head.values_8)
        for width, target, part in zip(WIDTHS, targets, parts, strict=False):
            if len(part):
                target.copy_(pack_value_rows(part, width))
    head.values_16.copy_(_half(rows[coded:]))


def _widths(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The width of each coded row. Args: counts: rows of each width."""
    return torch.tensor(WIDTHS[:3]).repeat_interleave(torch.tensor(counts[:3])).to(device)


def _half(values: Tensor) -> Tensor:
    half = values.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ValueError("a 16-bit value is not finite in float16; all must be within +-65504")
    return half


def _check_pack(keys: Tensor, values: Tensor, key_bits: Tensor, value_bits: Tensor) -> None:
    if keys.ndim != 3 or keys.shape != values.shape or not keys.is_floating_point() or keys.shape[2] < 1:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must be [H_kv, T, D]")
    num_kv_heads, num_tokens, head_dim = keys.shape
    if key_bits.shape != (num_kv_heads, head_dim) or value_bits.shape != (num_kv_heads, num_tokens):
        raise ValueError(
            f"key_bits {tuple(key_bits.shape)} and value_bits {tuple(value_bits.shape)} must be [H_kv, D] "
            f"and [H_kv, T] of keys {tuple(keys.shape)}"
        )
