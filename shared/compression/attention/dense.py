"""Dense decode attention: every row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvferry.kernels.dense_decode import dense_decode
from kvferry.shared.compression.attention.rows import RowsAlone


@dataclass(frozen=True, kw_only=True)
class Dense(RowsAlone):
    """Implements `AttentionKind`: softmax(q K^T * scaling) V over all rows."""

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

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        return 2 * num_rows * head_dim * element_bytes
