"""K and V alone: what attentions without auxiliary tensors share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.compression.attention.interface import TensorSpec


@dataclass(frozen=True, kw_only=True)
class RowsAlone:
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
