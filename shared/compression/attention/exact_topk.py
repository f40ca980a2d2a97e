"""Exact-TopK: attends to the t tokens with the largest true attention.

It reads all keys to find them, so it is an upper bound for sparse attention and saves no traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvferry.kernels import exact_topk
from kvferry.shared.compression.attention.interface import RowsAlone


@dataclass(frozen=True, kw_only=True)
class ExactTopK(RowsAlone):
    """Implements `AttentionKind` by `kernels.exact_topk` (RocketKV appendix A.3).

    Attributes:
        num_tokens: t, tokens attended per KV head, including the newest.
    """

    name: ClassVar[str] = "exact_topk"

    num_tokens: int

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> ExactTopK:
        """The whole budget is for attention: choosing the tokens counts as free."""
        return cls(num_tokens=budget)

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
        return exact_topk.attend(
            queries, keys, values, length=length, num_tokens=self.num_tokens, scaling=scaling
        )

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        """The reading of every key to choose tokens is not counted (RocketKV appendix A.3)."""
        return 2 * min(num_rows, self.num_tokens) * head_dim * element_bytes
