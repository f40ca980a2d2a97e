"""Dense decode attention: every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.packed import PackedLayer
from kvferry.kernels.trizone import trizone_decode_segments
from kvferry.shared.compression.attention.interface import RowsAlone, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Dense(RowsAlone):
    """Implements `AttentionKind` and `PackedAttention`: `softmax(q K^T * scaling) V` over all tokens."""

    name: ClassVar[str] = "dense"

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> Dense:
        return cls()

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        *,
        length: int,
        scaling: float,
    ) -> Tensor:
        return dense_decode(queries, keys[:, :length], values[:, :length], scaling=scaling)

    def packed_specs(
        self, *, num_kv_heads: int, num_tokens: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See `PackedAttention.packed_specs`: none."""
        return ()

    def build_packed(self, packed: PackedLayer, auxiliary: tuple[Tensor, ...]) -> None:
        """See `PackedAttention.build_packed`: nothing to build."""

    def append_packed(
        self,
        packed: Sequence[PackedLayer],
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        key: Tensor,
        value: Tensor,
        *,
        position: int,
    ) -> None:
        """See `PackedAttention.append_packed`."""
        self.append(keys, values, auxiliary, key, value, position=position)

    def attend_packed(
        self,
        queries: Tensor,
        packed: Sequence[PackedLayer],
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        *,
        length: int,
        scaling: float,
    ) -> Tensor:
        """See `PackedAttention.attend_packed`."""
        return trizone_decode_segments(queries, packed, keys[:, :length], values[:, :length], scaling=scaling)

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        return 2 * num_rows * head_dim * element_bytes

    def read_packed_bytes(
        self, *, num_tokens: int, num_kv_heads: int, packed_bytes: int, head_dim: int, element_bytes: int
    ) -> int:
        """See `PackedAttention.read_packed_bytes`: all packed bytes."""
        return packed_bytes
