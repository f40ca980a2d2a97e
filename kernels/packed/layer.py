"""One layer's packed K and V: pack, view, check, and (for references) unpack whole.

Prefill packs what the bit allocation kept; decode views the bytes it received and attends on them as they
are (`kernels/trizone`). Does not choose bits. Works a head at a time, because heads keep different numbers of
tokens and nothing is padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.checks import shape_problem
from kvferry.kernels.dispatch import path_for
from kvferry.kernels.packed.key_words import (
    WIDTHS,
    half_tiles,
    key_tiles,
    pack_key_words,
)
from kvferry.kernels.packed.layout import ALIGNMENT_BYTES, HeadCounts, PackedLayout, packed_layout
from kvferry.kernels.packed.value_rows import pack_value_rows, unpack_value_rows
from kvferry.kernels.quantise import quantise_rows


@dataclass(frozen=True, kw_only=True)
class PackedHead:
    """Views of one KV head's regions.

    Attributes:
        key_words: uint8, see `key_words.py`.
        values_2, values_4, values_8: uint8 `[n_w, row bytes]`, see `value_rows.py`.
        key_scales, key_minima: float32, of the channels below 16 bits.
        value_scales, value_minima: float32, of the tokens below 16 bits.
        values_16: float16 `[n_16, D]`, zone B.
        channels: int16, the kept K channels in packed order.
        positions: int32, the kept tokens in packed order.
    """

    counts: HeadCounts
    key_words: Tensor
    values_2: Tensor
    values_4: Tensor
    values_8: Tensor
    key_scales: Tensor
    key_minima: Tensor
    value_scales: Tensor
    value_minima: Tensor
    values_16: Tensor
    channels: Tensor
    positions: Tensor


@dataclass(frozen=True, kw_only=True)
class QueryTables:
    """What a query is taken to the codes' channels by, all heads' at once; C is the most channels of any.

    Attributes:
        channels: int64 `[H_kv, 1, C]`, in packed order.
        scales: float32 `[H_kv, 1, C]`, 1 for channels at 16 bits, 0 where a head has fewer.
        minima: float32 `[H_kv, C, 1]`, 0 for channels at 16 bits and where a head has fewer.
    """

    channels: Tensor
    scales: Tensor
    minima: Tensor


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """A layer's bytes, uint8 `[layout.size_bytes]`, and its heads' views of them."""

    layout: PackedLayout
    buffer: Tensor
    heads: tuple[PackedHead, ...]

    @cached_property
    def query_tables(self) -> QueryTables:
        """Of D entries a head, made once."""
        most = max(head.counts.num_channels for head in self.heads)
        scales, minima = torch.zeros(2, len(self.heads), most, device=self.buffer.device)
        channels = torch.zeros_like(scales, dtype=torch.int64)
        for h, head in enumerate(self.heads):
            coded, count = len(head.key_scales), head.counts.num_channels
            channels[h, :count] = head.channels
            scales[h, :coded] = head.key_scales
            scales[h, coded:count] = 1
            minima[h, :coded] = head.key_minima
        return QueryTables(channels=channels[:, None], scales=scales[:, None], minima=minima[:, :, None])

    @cached_property
    def plans(self) -> dict[int, Any]:
        """What the torch path lays down for its steps, by thread; it is this layer's as long as it lives."""
        return {}

    @cached_property
    def largest_value_scales(self) -> tuple[float, ...]:
        """Of each head, 1.0 where it has none. Read from the device once, at the first call."""
        one = torch.ones((), device=self.buffer.device)
        scales = [head.value_scales for head in self.heads]
        return tuple(torch.stack([s.max() if s.numel() else one for s in scales]).tolist())


def view_packed_layer(layout: PackedLayout, buffer: Tensor) -> PackedLayer:
    """View bytes as a packed layer; nothing is copied.

    Raises:
        ValueError: the buffer is not contiguous uint8 `[layout.size_bytes]` at a multiple of ALIGNMENT_BYTES.
    """
    if buffer.dtype != torch.uint8 or buffer.shape != (layout.size_bytes,) or not buffer.is_contiguous():
        raise ValueError(
            f"the buffer is {buffer.dtype} {tuple(buffer.shape)}; it must be contiguous uint8 "
            f"[{layout.size_bytes}]"
        )
    if layout.size_bytes and buffer.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(f"the buffer must start at a multiple of {ALIGNMENT_BYTES} bytes")
    heads = tuple(
        PackedHead(counts=counts, **{name: region.view(buffer) for name, region in regions.items()})
        for counts, regions in zip(layout.heads, layout.regions, strict=True)
    )
    return PackedLayer(layout=layout, buffer=buffer, heads=heads)


def pack_layer(keys: Tensor, values: Tensor, key_bits: Tensor, value_bits: Tensor) -> PackedLayer:
    """Quantise and pack what the bits keep: K per channel over the kept tokens, V per token over D.

    Args:
        keys, values: floating `[H_kv, T, D]`; keys post-RoPE.
        key_bits: uint8 `[H_kv, D]`, each 0, 2, 4, 8 or 16.
        value_bits: uint8 `[H_kv, T]`, likewise; a token of 0 bits loses its K too.

    Raises:
        ValueError: shapes do not fit together, another width, or a kept value that is not finite (in float16
            where it is kept at 16 bits).
    """
    _check_pack(keys, values, key_bits, value_bits)
    heads = tuple(
        # Without tokens there are no channels to speak of.
        HeadCounts(channels=channels if any(tokens) else (0, 0, 0, 0), tokens=tokens)
        for channels, tokens in zip(_counts(key_bits), _counts(value_bits), strict=True)
    )
    layout = packed_layout(heads, keys.shape[2])
    packed = view_packed_layer(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8, device=keys.device))
    by_torch = path_for("pack", keys.device, _unsupported(keys, values)) == "torch"
    channel_order = key_bits.sort(dim=1, stable=True).indices
    token_order = value_bits.sort(dim=1, stable=True).indices
    for h, head in enumerate(packed.heads):
        counts = head.counts
        # Zero bits sort first and are dropped.
        channels = channel_order[h, keys.shape[2] - counts.num_channels :]
        positions = token_order[h, keys.shape[1] - counts.num_tokens :]
        head.channels.copy_(channels)
        head.positions.copy_(positions)
        if counts.num_tokens and by_torch:
            _pack_keys(head, keys[h].index_select(0, positions).index_select(1, channels).T)
            _pack_values(head, values[h].index_select(0, positions))
    if not by_torch:
        # Here, because a CPU install has no Triton.
        from kvferry.kernels.packed import triton_kernel

        triton_kernel.fill(packed, keys, values)
    return packed


def unpack_layer(packed: PackedLayer) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Dequantise everything, head by head. For references and tests: serving never inflates a layer.

    Returns: for each head, K and V float32 `[n, D]` in packed order (dropped channels are 0) and positions
        int64 `[n]`.
    """
    return [_unpack_head(head, packed.layout.head_dim) for head in packed.heads]


def check_packed_layer(packed: PackedLayer, num_prompt_tokens: int) -> None:
    """Refuse an index, scales or half floats that no packer writes, before anything attends on them.

    Raises:
        ValueError: a channel or a position is out of range, repeated or out of order, or a scale is not
            finite and positive, or a minimum or what is kept at 16 bits not finite.
    """
    for h, head in enumerate(packed.heads):
        for name, index, counts, limit in (
            ("channels", head.channels, head.counts.channels, packed.layout.head_dim),
            ("positions", head.positions, head.counts.tokens, num_prompt_tokens),
        ):
            kept = index.long()
            outside = bool(((kept < 0) | (kept >= limit)).any())
            ascending = all(bool((part.diff() > 0).all()) for part in torch.split(kept, list(counts)))
            if outside or not ascending or not bool((kept.sort().values.diff() > 0).all()):
                raise ValueError(f"{name} of head {h} must be distinct, ascending by width and below {limit}")
        for scales, minima, counts in (
            (head.key_scales, head.key_minima, head.counts.channels),
            (head.value_scales, head.value_minima, head.counts.tokens),
        ):
            highest = [
                width_scales * (2**width - 1)
                for width, width_scales in zip(WIDTHS[:3], torch.split(scales, list(counts[:3])), strict=True)
            ]
            finite = minima.isfinite() & (torch.cat(highest) + minima).isfinite()
            if not bool(((scales > 0) & finite).all()):
                raise ValueError(f"scales of head {h} must be finite and positive, and minima finite")
        halves = half_tiles(head.key_words, head.counts.channels, head.counts.num_tokens, max_blocks=64)
        if not head.values_16.isfinite().all() or not all(bool(tile.isfinite().all()) for tile in halves):
            raise ValueError(f"what head {h} keeps at 16 bits must be finite")


def _unsupported(keys: Tensor, values: Tensor) -> str | None:
    if keys.stride(2) != 1 or values.stride(2) != 1:
        return "rows of keys and values must be contiguous (stride 1 over D)"
    return shape_problem(keys.dtype, 1, keys.shape[2]) or shape_problem(values.dtype, 1, values.shape[2])


def _counts(bits: Tensor) -> list[tuple[int, int, int, int]]:
    """How many units of each row have each width. Args: bits uint8 `[H_kv, U]`."""
    counts = torch.stack([(bits == width).sum(1) for width in (0, *WIDTHS)], dim=1).tolist()
    for row in counts:
        if sum(row) != bits.shape[1]:
            raise ValueError(
                f"bits hold {sorted(set(bits.flatten().tolist()))}; each must be one of {(0, *WIDTHS)}"
            )
    return [(two, four, eight, sixteen) for _, two, four, eight, sixteen in counts]


def _pack_keys(head: PackedHead, rows: Tensor) -> None:
    """Args: rows `[c, n]`, channels and tokens in packed order."""
    codes: list[Tensor] = []
    start = 0
    for width, part in zip(WIDTHS, torch.split(rows, list(head.counts.channels)), strict=True):
        if width == 16:
            codes.append(_half(part))
            continue
        packed, scales, minima = quantise_rows(part, width)
        head.key_scales[start : start + part.shape[0]] = scales
        head.key_minima[start : start + part.shape[0]] = minima
        codes.append(packed)
        start += part.shape[0]
    head.key_words.copy_(pack_key_words(codes, rows.shape[1]))


def _pack_values(head: PackedHead, rows: Tensor) -> None:
    """Args: rows `[n, D]`, tokens in packed order."""
    parts = torch.split(rows, list(head.counts.tokens))
    start = 0
    for width, target, part in zip(
        WIDTHS[:3], (head.values_2, head.values_4, head.values_8), parts[:3], strict=True
    ):
        codes, scales, minima = quantise_rows(part, width)
        target.copy_(pack_value_rows(codes, width))
        head.value_scales[start : start + part.shape[0]] = scales
        head.value_minima[start : start + part.shape[0]] = minima
        start += part.shape[0]
    head.values_16.copy_(_half(parts[3]))


def _half(values: Tensor) -> Tensor:
    half = values.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ValueError("a value kept at 16 bits is not finite in float16; all must be within +-65504")
    return half


def _unpack_head(head: PackedHead, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = head.counts
    coded = sum(counts.channels[:3])
    channels = head.channels.long()
    keys = torch.zeros(counts.num_tokens, head_dim, device=head.key_words.device)
    for start, codes in key_tiles(head.key_words, counts.channels, counts.num_tokens, max_blocks=64):
        codes[:coded] = codes[:coded] * head.key_scales[:, None] + head.key_minima[:, None]
        keys[start : start + codes.shape[1], channels] = codes.T
    rows = [
        unpack_value_rows(packed, width, head_dim)
        for width, packed in zip(WIDTHS[:3], (head.values_2, head.values_4, head.values_8), strict=True)
    ]
    low = torch.cat(rows) * head.value_scales[:, None] + head.value_minima[:, None]
    return keys, torch.cat([low, head.values_16.float()]), head.positions.long()


def _check_pack(keys: Tensor, values: Tensor, key_bits: Tensor, value_bits: Tensor) -> None:
    if keys.ndim != 3 or keys.shape != values.shape or not keys.is_floating_point() or keys.shape[2] < 1:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must be [H_kv, T, D]")
    num_kv_heads, num_tokens, head_dim = keys.shape
    if key_bits.shape != (num_kv_heads, head_dim) or value_bits.shape != (num_kv_heads, num_tokens):
        raise ValueError(
            f"key_bits {tuple(key_bits.shape)} and value_bits {tuple(value_bits.shape)} must be [H_kv, D] "
            f"and [H_kv, T] of keys {tuple(keys.shape)}"
        )
