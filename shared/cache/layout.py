"""Byte layout of one sequence in the arena: where each layer's K, V and auxiliary tensors lie.

    sequence: | layer 0: K | V | auxiliary ... | layer 1: packed | K | V | ...
    K and V `[H_kv, cap, D]`; auxiliary as the layer's decode attention asks: page extremes, a sum of values.
    A packed layer's prompt lies in `packed`, with room for its largest, one that is stored otherwise
    likewise; its K and V are of new tokens only.
    Where those are packed too (`segments.py`), K and V have room for one segment, and segments and the last
    queries lie behind them.
    A layer that evicts has one row beside the prompt's; where new tokens go back to the history, their own K
    and V lie in `generated`, as no eviction leaves them.

Computed by decode at admission from the model and the resolved plan, before any byte arrives. Knows sizes and
places, not who owns them (`arena.py`) nor what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.packed.layout import Region
from kvferry.shared.cache.segments import PackedSegments
from kvferry.shared.compression.attention import make_attention, packed_attention
from kvferry.shared.compression.attention.interface import AttentionKind, TensorSpec
from kvferry.shared.compression.interface import StoredPrompt
from kvferry.shared.compression.measured import is_measured
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.representation import Rebudgeting, packed_limit_bytes, rebudgeting
from kvferry.shared.compression.representations import stored_bytes
from kvferry.shared.model.spec import ModelSpec

ALIGNMENT_BYTES = 64
TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def align(size_bytes: int) -> int:
    """The next multiple of ALIGNMENT_BYTES."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """One layer's regions.

    Attributes:
        rows: prompt rows in K and V per KV head; 0 where the layer is packed.
        capacity: cap, rows that K and V have room for.
        attention: how decode attends to this layer, and what it keeps in `auxiliary`.
        packed: uint8, room for the packed prompt; None where the layer is rows.
        generated: K and V of new tokens, `[H_kv, max_new_tokens - 1, D]` each, of a layer that evicts; None
            where they are not wanted, and where K and V keep them after the prompt's rows.
        segments: where new tokens are packed; None where they stay rows.
        num_packed: prompt tokens that a head packs at most; `auxiliary` has room for them and for new tokens.
    """

    rows: int
    capacity: int
    attention: AttentionKind
    keys: Region
    values: Region
    auxiliary: tuple[Region, ...]
    packed: Region | None = None
    generated: tuple[Region, Region] | None = None
    num_packed: int = 0
    segments: SegmentsLayout | None = None

    def rows_in_use(self, num_appended: int) -> int:
        """Rows of K and V once `num_appended` have joined the prompt's."""
        if self.attention.evicts:
            return self.rows + min(num_appended, 1)
        if self.segments is None or num_appended == 0:
            return self.rows + num_appended
        return self.rows + (num_appended - 1) % self.segments.rebudgeting.segment_tokens + 1


@dataclass(frozen=True, kw_only=True)
class SegmentsLayout:
    """Where a packed layer's generated tokens are packed.

    Attributes:
        packed: uint8, room for every segment at its largest.
        queries: `[H_kv, G, window, D]`, those of the segment's last tokens.
        returns_rows: whether their rows are wanted in the end, for the session's history.
    """

    rebudgeting: Rebudgeting
    packed: Region
    queries: Region
    returns_rows: bool


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """All of a sequence's regions.

    Attributes:
        size_bytes: from the sequence's start to the end of the last region, a multiple of ALIGNMENT_BYTES.
    """

    layers: tuple[LayerLayout, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's views onto a sequence's arena bytes, shaped as `LayerLayout` says.

    Attributes:
        packed: the packed prompt as it came; None where the layer is rows.
        generated: views of `LayerLayout.generated`.
        segments: new tokens packed so far; None where they stay rows.
    """

    layout: LayerLayout
    keys: Tensor
    values: Tensor
    auxiliary: tuple[Tensor, ...]
    packed: PackedLayer | None = None
    stored: StoredPrompt | None = None
    generated: tuple[Tensor, Tensor] | None = None
    segments: PackedSegments | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of what is packed or stored, the prompt and new tokens: codes, scales, rows and index."""
        prompt_bytes = self.packed.layout.size_bytes if self.packed is not None else 0
        prompt_bytes += stored_bytes(self.stored) if self.stored is not None else 0
        return prompt_bytes + (self.segments.packed_bytes if self.segments is not None else 0)


def sequence_layout(
    spec: ModelSpec, resolved: ResolvedPlan, *, returns_generated: bool = False
) -> SequenceLayout:
    """Lay out a sequence: kept rows or their packed bytes, room for growth, auxiliary tensors.

    cap = rows + max_new_tokens - 1: the last token of a completion never gets a KV row. Where rows are
    evicted, at most one more than rows; where new tokens are packed, no more than a segment's.

    Args: returns_generated: whether K and V of new tokens are wanted in the end, unmerged and in order.
    """
    offset = 0

    def region(wanted: TensorSpec) -> Region:
        nonlocal offset
        placed = Region(offset=offset, shape=wanted.placed_shape, dtype=wanted.dtype)
        offset += align(placed.size_bytes)
        return placed

    layers = []
    for plan in resolved.layers:
        limit_bytes = packed_limit_bytes(
            plan,
            num_prompt_tokens=resolved.num_prompt_tokens,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=TORCH_DTYPES[spec.dtype],
        )
        packed = region(TensorSpec(shape=(limit_bytes,), dtype=torch.uint8)) if limit_bytes else None
        rows = 0 if packed is not None else plan.rows
        growth = rebudgeting(resolved, plan, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
        attention = make_attention(plan.attention)
        num_new = max(resolved.max_new_tokens - 1, 0)
        capacity = rows + _growth_rows(attention, growth, num_new)
        own_rows = attention.evicts and returns_generated
        new_rows = _rows(spec, num_new)
        keys, values, *auxiliary = (
            region(wanted) for wanted in _tensors(spec, attention, capacity, num_packed=plan.rows - rows)
        )
        layers.append(
            LayerLayout(
                rows=rows,
                capacity=capacity,
                attention=attention,
                keys=keys,
                values=values,
                auxiliary=tuple(auxiliary),
                packed=packed,
                generated=(region(new_rows), region(new_rows)) if own_rows else None,
                num_packed=plan.rows - rows,
                segments=(
                    SegmentsLayout(
                        rebudgeting=growth,
                        packed=region(
                            TensorSpec(shape=(growth.max_segments * growth.limit_bytes,), dtype=torch.uint8)
                        ),
                        queries=region(_queries(spec, growth)),
                        returns_rows=returns_generated,
                    )
                    if growth is not None
                    else None
                ),
            )
        )
    return SequenceLayout(layers=tuple(layers), size_bytes=offset)


def used_bytes(layout: SequenceLayout, spec: ModelSpec, num_appended: int, *, packed_bytes: int = 0) -> int:
    """Bytes in use once `num_appended` rows have joined the prompt's: rows, and what is kept beside them;
    beside packed tokens, of as many as there may be.

    Args: packed_bytes: what the packed layers came to, `LayerCache.packed_bytes` summed.
    """
    held = [
        tensor
        for layer in layout.layers
        for tensor in _tensors(
            spec, layer.attention, layer.rows_in_use(num_appended), num_packed=layer.num_packed
        )
    ]
    num_own = sum(layer.generated is not None for layer in layout.layers)
    held += [_rows(spec, num_appended)] * (2 * num_own)
    held += [
        _queries(spec, layer.segments.rebudgeting) for layer in layout.layers if layer.segments is not None
    ]
    return packed_bytes + sum(tensor.size_bytes for tensor in held)


def reserved_bytes(layout: SequenceLayout, spec: ModelSpec, resolved: ResolvedPlan) -> int:
    """Bytes to reserve for a sequence before its rows are known to the last.

    Where layers share rows as prefill measures them, K and V come to the same total however they are shared;
    what else is kept grows by at most one row's share a layer (a page begun), and every region may be aligned
    anew.
    """
    if not is_measured(resolved):
        return layout.size_bytes
    return layout.size_bytes + sum(
        align(tensor.placed_bytes) + ALIGNMENT_BYTES
        for layer in layout.layers
        for tensor in _tensors(spec, layer.attention, 1, num_packed=0)
    )


def view_layers(layout: SequenceLayout, buffer: Tensor) -> tuple[LayerCache, ...]:
    """Typed views of every layer but its packed prompt, of which only its bytes can tell the shapes.

    Args: buffer uint8 `[>= layout.size_bytes]`, aligned to ALIGNMENT_BYTES.
    """
    return tuple(
        LayerCache(
            layout=layer,
            keys=layer.keys.view(buffer),
            values=layer.values.view(buffer),
            auxiliary=tuple(region.view(buffer) for region in layer.auxiliary),
            generated=(layer.generated[0].view(buffer), layer.generated[1].view(buffer))
            if layer.generated is not None
            else None,
            segments=(
                PackedSegments(
                    layer.segments.rebudgeting,
                    layer.segments.packed.view(buffer),
                    layer.segments.queries.view(buffer),
                    keeps_rows=layer.segments.returns_rows,
                )
                if layer.segments is not None
                else None
            ),
        )
        for layer in layout.layers
    )


def _growth_rows(attention: AttentionKind, growth: Rebudgeting | None, num_new: int) -> int:
    """Rows of K and V for new tokens."""
    if attention.evicts:
        return min(num_new, 1)
    return min(num_new, growth.segment_tokens) if growth is not None else num_new


def _queries(spec: ModelSpec, growth: Rebudgeting) -> TensorSpec:
    shape = (spec.num_kv_heads, spec.group_size, growth.window, spec.head_dim)
    return TensorSpec(shape=shape, dtype=TORCH_DTYPES[spec.dtype])


def _tensors(
    spec: ModelSpec, attention: AttentionKind, num_rows: int, *, num_packed: int
) -> tuple[TensorSpec, ...]:
    """K, V and the attention's own tensors of these rows per KV head; the latter for packed tokens too."""
    rows = _rows(spec, num_rows)
    if num_packed:
        beside = packed_attention(attention).packed_specs(
            num_kv_heads=spec.num_kv_heads,
            num_tokens=num_packed + num_rows,
            head_dim=spec.head_dim,
            dtype=rows.dtype,
        )
    else:
        beside = attention.auxiliary_specs(
            num_kv_heads=spec.num_kv_heads, num_rows=num_rows, head_dim=spec.head_dim, dtype=rows.dtype
        )
    return (rows, rows, *beside)


def _rows(spec: ModelSpec, num_rows: int) -> TensorSpec:
    """K or V of this many rows per KV head."""
    return TensorSpec(shape=(spec.num_kv_heads, num_rows, spec.head_dim), dtype=TORCH_DTYPES[spec.dtype])
