"""What attentions share that only ever gain rows, and those that keep K and V alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.shared.compression.attention.interface import TensorSpec


@dataclass(frozen=True, kw_only=True)
class GrowingRows:
    """The part of `AttentionKind` that says: nothing is evicted, and K and V say all."""

    evicts: ClassVar[bool] = False

    def state_size(self, *, num_kv_heads: int, num_rows: int) -> int:
        return 0

    def keep(
        self, keys: Tensor, values: Tensor, sums: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError(f"{type(self).__name__} does not evict")

    def load(
        self, auxiliary: tuple[Tensor, ...], *, positions: Tensor | None, state: Tensor, length: int
    ) -> None:
        raise AssertionError(f"{type(self).__name__} does not evict")


@dataclass(frozen=True, kw_only=True)
class RowsAlone(GrowingRows):
    """The part of `AttentionKind` that keeps nothing beside K and V."""

    def auxiliary_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        return ()

    def build(self, keys: Tensor, values: Tensor, auxiliary: tuple[Tensor, ...], *, length: int) -> None:
        """Nothing to build."""

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        key: Tensor,
        value: Tensor,
        *,
        position: int,
    ) -> None:
        keys[:, position] = key
        values[:, position] = value
