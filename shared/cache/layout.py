"""Byte layout of one sequence in the arena: where each layer's K, V and auxiliary tensors lie.

    sequence: | layer 0: K | V | auxiliary ... | layer 1: packed | K | V | ...
    K and V `[H_kv, cap, D]`; auxiliary as the layer's decode attention asks: page extremes, a sum of values.
    A packed layer's prompt lies in `packed`, with room for its largest; its K and V are of new tokens only.
    A layer that evicts has one row beside the prompt's; where new tokens go back to the history, their own K
    and V lie in `generated`, as no eviction leaves them.

Computed by decode at admission from the model and the resolved plan, before any byte arrives. Knows sizes and
places, not who owns them (`arena.py`) nor what is in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedLayer
from kvferry.shared.compression.attention import make_attention
from kvferry.shared.compression.attention.interface import AttentionKind, TensorSpec
from kvferry.shared.compression.measured import is_measured
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.representation import packed_limit_bytes
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
class Region:
    """One tensor's place: bytes from the sequence's start (a multiple of ALIGNMENT_BYTES), and its shape."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The region of a sequence's uint8 buffer as a typed tensor; writes go to the buffer."""
        return buffer[self.offset : self.offset + self.size_bytes].view(self.dtype).view(self.shape)


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
    """

    rows: int
    capacity: int
    attention: AttentionKind
    keys: Region
    values: Region
    auxiliary: tuple[Region, ...]
    packed: Region | None = None
    generated: tuple[Region, Region] | None = None

    def rows_in_use(self, num_appended: int) -> int:
        """Rows of K and V once `num_appended` have joined the prompt's."""
        return self.rows + (min(num_appended, 1) if self.attention.evicts else num_appended)


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
    """

    layout: LayerLayout
    keys: Tensor
    values: Tensor
    auxiliary: tuple[Tensor, ...]
    packed: PackedLayer | None = None
    generated: tuple[Tensor, Tensor] | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed prompt: codes, scales, rows and index."""
        return self.packed.layout.size_bytes if self.packed is not None else 0


def sequence_layout(
    spec: ModelSpec, resolved: ResolvedPlan, *, returns_generated: bool = False
) -> SequenceLayout:
    """Lay out a sequence: kept rows or their packed bytes, room for growth, auxiliary tensors.

    cap = rows + max_new_tokens - 1: the last token of a completion never gets a KV row. Where rows are
    evicted, at most one more than rows.

    Args: returns_generated: whether K and V of new tokens are wanted in the end, unmerged and in order.
    """
    offset = 0

    def region(wanted: TensorSpec) -> Region:
        nonlocal offset
        placed = Region(offset=offset, shape=wanted.shape, dtype=wanted.dtype)
        offset += align(placed.size_bytes)
        return placed

    layers = []
    for plan in resolved.layers:
        limit_bytes = packed_limit_bytes(
            plan,
            num_prompt_tokens=resolved.num_prompt_tokens,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        packed = region(TensorSpec(shape=(limit_bytes,), dtype=torch.uint8)) if limit_bytes else None
        rows = 0 if packed is not None else plan.rows
        num_new = max(resolved.max_new_tokens - 1, 0)
        attention = make_attention(plan.attention)
        capacity = rows + (min(num_new, 1) if attention.evicts else num_new)
        own_rows = attention.evicts and returns_generated
        new_rows = _rows(spec, num_new)
        keys, values, *auxiliary = (region(wanted) for wanted in _tensors(spec, attention, capacity))
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
            )
        )
    return SequenceLayout(layers=tuple(layers), size_bytes=offset)


def used_bytes(layout: SequenceLayout, spec: ModelSpec, num_appended: int, *, packed_bytes: int = 0) -> int:
    """Bytes in use once `num_appended` rows have joined the prompt's: rows, and what is kept beside them.

    Args: packed_bytes: what the packed layers came to, `LayerCache.packed_bytes` summed.
    """
    held = [
        tensor
        for layer in layout.layers
        for tensor in _tensors(spec, layer.attention, layer.rows_in_use(num_appended))
    ]
    num_own = sum(layer.generated is not None for layer in layout.layers)
    held += [_rows(spec, num_appended)] * (2 * num_own)
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
        align(tensor.size_bytes) + ALIGNMENT_BYTES
        for layer in layout.layers
        for tensor in _tensors(spec, layer.attention, 1)
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
        )
        for layer in layout.layers
    )


def _tensors(spec: ModelSpec, attention: AttentionKind, num_rows: int) -> tuple[TensorSpec, ...]:
    """K, V and the attention's own tensors for this many rows per KV head."""
    rows = _rows(spec, num_rows)
    beside = attention.auxiliary_specs(
        num_kv_heads=spec.num_kv_heads, num_rows=num_rows, head_dim=spec.head_dim, dtype=rows.dtype
    )
    return (rows, rows, *beside)


def _rows(spec: ModelSpec, num_rows: int) -> TensorSpec:
    """K or V of this many rows per KV head."""
    return TensorSpec(shape=(spec.num_kv_heads, num_rows, spec.head_dim), dtype=TORCH_DTYPES[spec.dtype])
