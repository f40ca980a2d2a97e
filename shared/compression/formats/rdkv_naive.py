"""RDKV's layers in the oracle: whatever can be recomputed at a step is recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.trizone import trizone_decode_segments
from kvferry.shared.compression.attention import packed_attention
from kvferry.shared.compression.attention.dense import Dense
from kvferry.shared.compression.attention.interface import AttentionKind
from kvferry.shared.compression.formats.interface import NaiveLayer
from kvferry.shared.compression.formats.rows import empty_tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.rdkv.compress import Rebudgeting, compress_layer_rdkv


class NaivePacked(NaiveLayer):
    """Packed prompt, packed segments and concatenated rows; auxiliary tensors are rebuilt at every step."""

    def __init__(
        self, attention: AttentionKind, rebudgeting: Rebudgeting | None, prompt: PackedLayer
    ) -> None:
        self._attention = attention
        self._rebudgeting = rebudgeting
        self._packed = [prompt]
        self._queries: list[Tensor] = []
        self._rows: tuple[Tensor, Tensor] | None = None

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: float, dense: bool = False
    ) -> Tensor:
        if self._rebudgeting is not None:
            self._rebudget(self._rebudgeting, queries, scaling)
        keys, values = key[:, None], value[:, None]
        if self._rows is not None:
            keys, values = torch.cat([self._rows[0], keys], 1), torch.cat([self._rows[1], values], 1)
        self._rows = (keys, values)
        if dense or isinstance(self._attention, Dense):
            return trizone_decode_segments(queries, self._packed, keys, values, scaling=scaling)
        return self._attend_sparsely(queries, self._packed, keys, values, scaling)

    def fork(self) -> NaivePacked:
        other = NaivePacked(self._attention, self._rebudgeting, self._packed[0])
        other._packed, other._queries, other._rows = list(self._packed), list(self._queries), self._rows
        return other

    def _rebudget(self, growth: Rebudgeting, queries: Tensor, scaling: float) -> None:
        """Pack the generated rows if they fill a segment; then record this token's queries."""
        if self._rows is not None and self._rows[0].shape[1] == growth.segment_tokens:
            keys, values = self._rows
            last = torch.stack(self._queries[-growth.window :], dim=2)
            inputs = LayerInputs(layer=0, queries=last, keys=keys, values=values, scaling=scaling)
            self._packed.append(compress_layer_rdkv(growth.settings, inputs).packed)
            self._rows = None
        self._queries.append(queries.clone())

    def _attend_sparsely(
        self, queries: Tensor, packed: Sequence[PackedLayer], keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        attention = packed_attention(self._attention)
        num_kv_heads, length, head_dim = keys.shape
        num_packed = max(head.num_tokens for head in packed[0].layout.heads)
        specs = attention.packed_specs(
            num_kv_heads=num_kv_heads, num_tokens=num_packed + length, head_dim=head_dim, dtype=keys.dtype
        )
        auxiliary = empty_tensors(specs, keys.device)
        attention.build_packed(packed[0], auxiliary)
        for m in range(length):
            attention.append_packed(packed, keys, values, auxiliary, keys[:, m], values[:, m], position=m)
        return attention.attend_packed(
            queries, packed, keys, values, auxiliary, length=length, scaling=scaling
        )
