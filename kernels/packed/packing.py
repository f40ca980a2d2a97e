"""Packing one layer: quantise and pack the channels and tokens that the bit allocation retains.

Called by prefill. Does not choose bits. In torch it works a head at a time, because heads retain different
numbers of tokens and nothing is padded to the longest. In Triton nothing is read back before the layer is
handed over (`Packing`), so the device never waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.dispatch import path_for, shape_problem
from kvferry.kernels.packed.key_words import WIDTHS, block_runs, groups_of_block, pack_key_words
from kvferry.kernels.packed.layer import PackedHead, PackedLayer, view_packed_layer
from kvferry.kernels.packed.layout import Bound, HeadCounts, packed_bound, packed_layout, position_dtype
from kvferry.kernels.packed.value_rows import pack_value_rows
from kvferry.kernels.quantise import quantise_rows
from kvferry.kernels.quarantine import attempt

_UNUSABLE = "distortion weights must be finite and at least 0; some are not"
_NOT_FINITE = "a value is not finite in float16, or too large for its width; all must be within +-65504"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """A layer whose packing is queued on its device.

    Attributes:
        tensors: what `finish` needs, on the device.
        finish: makes the layer of `tensors` or of copies of them. It reads what was found, so it waits for
            the device unless these are copies on the host. The layer shares the memory of the last one.

            Raises: ValueError: the bits mean nothing, another width, or a retained value that is not finite
            in float16.
    """

    tensors: tuple[Tensor, ...]
    finish: Callable[[Sequence[Tensor]], PackedLayer]


def pack_layer(keys: Tensor, values: Tensor, key_bits: Tensor, value_bits: Tensor) -> PackedLayer:
    """Pack like `begin_packing`, with valid bits and any number of tokens, and wait for the layer."""
    packing = begin_packing(keys, values, key_bits, value_bits)
    return packing.finish(packing.tensors)


def begin_packing(
    keys: Tensor,
    values: Tensor,
    key_bits: Tensor,
    value_bits: Tensor,
    *,
    usable: Tensor | None = None,
    bound: Bound | None = None,
) -> Packing:
    """Quantise and pack: K per channel and group of retained tokens (`key_words.py`), V per token over D. In
    Triton the host waits for nothing.

    Deviation: RDKV quantises a channel of K over all retained tokens. On a real model that costs 4 times the
    divergence of groups of 32 tokens at 4 bits, and 11 times at 2 bits.

    Args:
        keys, values: floating `[H_kv, T, D]`; keys post-RoPE.
        key_bits: uint8 `[H_kv, D]`, each 0, 2, 4, 8 or 16.
        value_bits: uint8 `[H_kv, T]`, the same widths; a token of 0 bits is dropped, with its K.
        usable: bool `[]` on the device, whether the bits mean something; None if they do.
        bound: on what is retained, and on its bytes; None if every token may be, at 16 bits.

    Raises: ValueError: shapes do not fit together; in torch, also what `Packing.finish` raises.
    """
    _check_pack(keys, values, key_bits, value_bits)

    def in_torch() -> Packing:
        packed = indexed_layer(keys, values, key_bits, value_bits, usable)
        fill_in_torch(packed, keys, values)
        return Packing(
            tensors=(packed.buffer,), finish=lambda tensors: view_packed_layer(packed.layout, tensors[-1])
        )

    unsupported = partial(_unsupported, keys, values)
    if path_for("pack", keys.device, unsupported) == "torch" or not value_bits.numel():
        return in_torch()
    num_kv_heads, num_tokens, head_dim = keys.shape
    most = bound or packed_bound(
        num_tokens=num_tokens, budget_tokens=num_tokens, num_kv_heads=num_kv_heads, head_dim=head_dim
    )

    def launch() -> Packing:
        # a CPU install has no Triton
        from kvferry.kernels.packed import triton_kernel

        tensors = triton_kernel.pack(keys, values, key_bits, value_bits, usable, most)
        return Packing(
            tensors=tensors,
            finish=lambda tensors: _reported(tensors[0], tensors[1], head_dim, num_tokens, most),
        )

    return attempt("pack", launch, in_torch)


def _reported(report: Tensor, buffer: Tensor, head_dim: int, num_tokens: int, bound: Bound) -> PackedLayer:
    """View the layer at the beginning of a buffer. Args: report: see `triton_kernel.pack`."""
    *of_heads, (is_usable, fits, num_refused, *_) = report.tolist()
    if not is_usable:
        raise ValueError(_UNUSABLE)
    if num_others := sum(head[8] for head in of_heads):
        raise ValueError(f"bits of {num_others} channels and tokens are not one of {(0, *WIDTHS)}")
    if not fits:
        raise ValueError(f"the bits retain more than {bound.tokens} tokens or {bound.size_bytes} bytes")
    if num_refused:
        raise ValueError(_NOT_FINITE)
    heads = [_head_counts(head[:4], head[4:8]) for head in of_heads]
    layout = packed_layout(heads, head_dim, num_tokens=num_tokens)
    return view_packed_layer(layout, buffer[: layout.size_bytes])


def _head_counts(channels: Sequence[int], tokens: Sequence[int]) -> HeadCounts:
    two, four, eight, sixteen = channels
    # without tokens there are no channels to store
    kept = (two, four, eight, sixteen) if any(tokens) else (0, 0, 0, 0)
    return HeadCounts(channels=kept, tokens=(tokens[0], tokens[1], tokens[2], tokens[3]))


def indexed_layer(
    keys: Tensor, values: Tensor, key_bits: Tensor, value_bits: Tensor, usable: Tensor | None = None
) -> PackedLayer:
    """Do the first part of packing in torch: channels and positions are written, all else is zero."""
    num_kv_heads, (num_tokens, head_dim) = len(keys), keys.shape[1:]
    counts = _counts(key_bits, value_bits, usable)
    heads = [
        _head_counts(channels, tokens)
        for channels, tokens in zip(counts[:num_kv_heads], counts[num_kv_heads:], strict=True)
    ]
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
    """Do the rest of packing in torch: quantise and pack the channels and tokens in the layer's index."""
    for h, head in enumerate(packed.heads):
        if head.counts.num_tokens:
            channels, positions = head.channels.long(), head.positions.long()
            _pack_keys(head, keys[h].index_select(0, positions).index_select(1, channels).T)
            _pack_values(head, values[h].index_select(0, positions))


def _unsupported(keys: Tensor, values: Tensor) -> str | None:
    if keys.stride(2) != 1 or values.stride(2) != 1:
        return "rows of keys and values must be contiguous (stride 1 over D)"
    of_keys, of_values = (
        shape_problem(tensor.dtype, 1, tensor.shape[2], tensor.device) for tensor in (keys, values)
    )
    return of_keys or of_values


def _counts(key_bits: Tensor, value_bits: Tensor, usable: Tensor | None) -> list[tuple[int, int, int, int]]:
    """Count the units of each row that have each width, in one read: of K's heads, then of V's.

    Raises: ValueError: the bits mean nothing, or another width.
    """
    widths = _all_widths(key_bits.device)
    counted = torch.cat([(bits[:, :, None] == widths).sum(1) for bits in (key_bits, value_bits)])
    if usable is not None:
        counted = torch.cat([counted.flatten(), usable[None]])
    *read, is_usable = counted.flatten().tolist() if usable is not None else [*counted.flatten().tolist(), 1]
    if not is_usable:
        raise ValueError(_UNUSABLE)
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
    """Quantise and pack K. Args: rows `[c, n]`, channels and tokens in packed order."""
    counts, num_tokens = head.counts.channels, rows.shape[1]
    coded = sum(counts[:3])
    codes = torch.empty(coded, num_tokens, dtype=torch.uint8, device=rows.device)
    start = first = 0
    for num_blocks, lanes in block_runs(num_tokens) if coded else ():
        stop, last = start + num_blocks * 8 * lanes, first + num_blocks * groups_of_block(lanes)
        run = rows[:coded, start:stop]
        if stop > num_tokens:
            # the last token once more changes no range
            run = torch.cat([run, run[:, -1:].expand(-1, stop - num_tokens)], 1)
        of_groups, scales, minima = quantise_rows(
            run.view(coded, last - first, -1).transpose(0, 1), _widths(counts, rows.device), half=True
        )
        head.key_scales[first:last], head.key_minima[first:last] = scales, minima
        codes[:, start:stop] = of_groups.transpose(0, 1).flatten(1)[:, : num_tokens - start]
        start, first = stop, last
    parts = torch.split(codes, list(counts[:3]))
    head.key_words.copy_(pack_key_words([*parts, _half(rows[coded:])], num_tokens))


def _pack_values(head: PackedHead, rows: Tensor) -> None:
    """Quantise and pack V. Args: rows `[n, D]`, tokens in packed order."""
    counts = head.counts.tokens
    coded = sum(counts[:3])
    if coded:
        codes, scales, minima = quantise_rows(rows[:coded], _widths(counts, rows.device), half=True)
        head.value_scales.copy_(scales)
        head.value_minima.copy_(minima)
        targets = head.values_2, head.values_4, head.values_8
        for width, target, part in zip(WIDTHS, targets, torch.split(codes, list(counts[:3])), strict=False):
            if len(part):
                target.copy_(pack_value_rows(part, width))
    head.values_16.copy_(_half(rows[coded:]))


def _widths(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the width of each coded row. Args: counts: rows of each width."""
    return torch.tensor(WIDTHS[:3]).repeat_interleave(torch.tensor(counts[:3])).to(device)


def _half(values: Tensor) -> Tensor:
    half = values.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ValueError(_NOT_FINITE)
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
