"""The oracle's decode side: rows appended by concatenation, attention as the layer's plan says.

Keeps no arena, no batch and no incremental auxiliary tensors: what can be recomputed at a step is. Private to
`oracle.py`, which says what it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.trizone import trizone_decode_segments
from kvferry.shared.compression.attention import make_attention, packed_attention
from kvferry.shared.compression.attention.dense import Dense
from kvferry.shared.compression.attention.interface import AttentionKind
from kvferry.shared.compression.interface import CompressedLayer, LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.rdkv.compress import compress_layer_rdkv
from kvferry.shared.compression.representation import rebudgeting
from kvferry.shared.model.spec import ModelSpec

LayerKV = tuple[Tensor, Tensor]
"""K (post-RoPE) and V of one layer, `[H_kv, n, D]`."""


@dataclass(frozen=True, kw_only=True)
class _EvictingLayer:
    """A layer whose rows change in place: K and V with the row of the token under way, and their state."""

    keys: Tensor
    values: Tensor
    auxiliary: tuple[Tensor, ...]

    @classmethod
    def of(cls, kind: AttentionKind, kept: CompressedLayer) -> _EvictingLayer:
        """Begin with what is kept of the prompt."""
        num_kv_heads, rows, head_dim = kept.keys.shape
        keys, values = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (kept.keys, kept.values))
        specs = kind.auxiliary_specs(
            num_kv_heads=num_kv_heads, num_rows=rows + 1, head_dim=head_dim, dtype=keys.dtype
        )
        auxiliary = tuple(torch.empty(s.placed_shape, dtype=s.dtype, device=keys.device) for s in specs)
        assert kept.state is not None
        kind.load(auxiliary, positions=kept.positions, state=kept.state, length=rows)
        return cls(keys=keys, values=values, auxiliary=auxiliary)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self.keys, self.values, self.auxiliary

    def clone(self) -> _EvictingLayer:
        auxiliary = tuple(tensor.clone() for tensor in self.auxiliary)
        return _EvictingLayer(keys=self.keys.clone(), values=self.values.clone(), auxiliary=auxiliary)


class OracleDecode:
    """Appends each new row by concatenation and attends as the layer's plan says.

    Args: kept: what the plan keeps of the prompt, one entry a layer.
    """

    def __init__(self, spec: ModelSpec, resolved: ResolvedPlan, kept: tuple[CompressedLayer, ...]) -> None:
        self._spec = spec
        self._resolved = resolved
        self._kinds = tuple(make_attention(layer.attention) for layer in resolved.layers)
        self._rebudgeting = [
            rebudgeting(resolved, layer, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
            for layer in resolved.layers
        ]
        self._kept = kept
        self.kv = [(layer.keys, layer.values) for layer in kept]
        self.packed = [[] if layer.packed is None else [layer.packed] for layer in kept]
        self.queries: list[list[Tensor]] = [[] for _ in kept]
        self.generated: list[list[LayerKV]] = [[] for _ in kept]
        self._evicting = {
            i: _EvictingLayer.of(kind, kept[i]) for i, kind in enumerate(self._kinds) if kind.evicts
        }

    def fork(self) -> OracleDecode:
        """A copy that grows by itself: rows are appended by concatenation, never in place."""
        other = OracleDecode(self._spec, self._resolved, self._kept)
        other.kv = list(self.kv)
        other.packed = [list(segments) for segments in self.packed]
        other.queries = [list(queries) for queries in self.queries]
        other.generated = [list(rows) for rows in self.generated]
        other._evicting = {i: state.clone() for i, state in self._evicting.items()}
        return other

    def densely(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Append the row and attend to all rows; where rows are evicted, that is so at every step."""
        if layer in self._evicting:
            return self._evict(layer, queries, keys, values, scaling)
        self._rebudget(layer, queries, scaling)
        all_keys, all_values = self._append(layer, keys, values)
        packed = self.packed[layer]
        if packed:
            return trizone_decode_segments(queries[0], packed, all_keys, all_values, scaling=scaling)[None]
        stored = self._kept[layer].stored
        if stored is not None:
            return stored.attend(queries[0], all_keys, all_values, scaling=scaling)[None]
        return dense_decode(queries[0], all_keys, all_values, scaling=scaling)[None]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        kind, packed = self._kinds[layer], self._kept[layer].packed
        not_rows = packed is not None or self._kept[layer].stored is not None
        if (not_rows and isinstance(kind, Dense)) or layer in self._evicting:
            return self.densely(layer, queries, keys, values, scaling)
        all_keys, all_values = self._append(layer, keys, values)
        num_kv_heads, length, head_dim = all_keys.shape
        if packed is not None:
            return _attend_packed(kind, queries[0], packed, all_keys, all_values, scaling)[None]
        specs = kind.auxiliary_specs(
            num_kv_heads=num_kv_heads, num_rows=length, head_dim=head_dim, dtype=all_keys.dtype
        )
        auxiliary = tuple(torch.empty(s.placed_shape, dtype=s.dtype, device=all_keys.device) for s in specs)
        kind.build(all_keys, all_values, auxiliary, length=length)
        return kind.attend(queries[0], all_keys, all_values, auxiliary, length=length, scaling=scaling)[None]

    def _evict(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self._record(layer, keys, values)
        kind, held = self._kinds[layer], self._evicting[layer]
        rows = held.keys.shape[1] - 1
        kind.append(*held.tensors, keys[0], values[0], position=rows)
        return kind.attend(queries[0], *held.tensors, length=rows + 1, scaling=scaling)[None]

    def _rebudget(self, layer: int, queries: Tensor, scaling: float) -> None:
        """Pack the generated rows where they are a whole segment; then remember this token's queries."""
        plan = self._rebudgeting[layer]
        if plan is None:
            return
        keys, values = self.kv[layer]
        if keys.shape[1] == plan.segment_tokens:
            last = torch.stack(self.queries[layer][-plan.window :], dim=2)
            inputs = LayerInputs(layer=layer, queries=last, keys=keys, values=values, scaling=scaling)
            self.packed[layer].append(compress_layer_rdkv(plan.settings, inputs).packed)
            self.kv[layer] = (keys[:, :0], values[:, :0])
        self.queries[layer].append(queries[0].clone())

    def _record(self, layer: int, keys: Tensor, values: Tensor) -> LayerKV:
        """Note a new token's K and V as the model made them; returns them, `[H_kv, 1, D]`."""
        row = (keys.transpose(0, 1), values.transpose(0, 1))
        self.generated[layer].append((row[0].clone(), row[1].clone()))
        return row

    def _append(self, layer: int, keys: Tensor, values: Tensor) -> LayerKV:
        row = self._record(layer, keys, values)
        all_keys = torch.cat([self.kv[layer][0], row[0]], 1)
        all_values = torch.cat([self.kv[layer][1], row[1]], 1)
        self.kv[layer] = (all_keys, all_values)
        return all_keys, all_values


def _attend_packed(
    kind: AttentionKind,
    queries: Tensor,
    packed: PackedLayer,
    keys: Tensor,
    values: Tensor,
    scaling: float,
) -> Tensor:
    """A packed prompt and rows `[H_kv, m, D]`, with auxiliary tensors built anew."""
    attention = packed_attention(kind)
    num_kv_heads, length, head_dim = keys.shape
    num_packed = max(head.num_tokens for head in packed.layout.heads)
    specs = attention.packed_specs(
        num_kv_heads=num_kv_heads, num_tokens=num_packed + length, head_dim=head_dim, dtype=keys.dtype
    )
    auxiliary = tuple(torch.empty(s.placed_shape, dtype=s.dtype, device=keys.device) for s in specs)
    attention.build_packed(packed, auxiliary)
    for m in range(length):
        attention.append_packed((packed,), keys, values, auxiliary, keys[:, m], values[:, m], position=m)
    return attention.attend_packed(
        queries, (packed,), keys, values, auxiliary, length=length, scaling=scaling
    )
