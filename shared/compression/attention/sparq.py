"""SparQ: chooses tokens by approximate scores from a few channels; the mean value stands for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels import sparq
from kvferry.shared.compression.attention.interface import RowsAlone, TensorSpec


@dataclass(frozen=True, kw_only=True)
class SparQ(RowsAlone):
    """Implements `AttentionKind` by `kernels.sparq` (Ribar et al. 2024; RocketKV appendix A.3).

    Attributes:
        num_channels: r, channels of K read for the scores.
        num_tokens: k, tokens attended exactly, including the newest.
    """

    name: ClassVar[str] = "sparq"

    num_channels: int
    num_tokens: int

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> SparQ:
        """Half of the budget is for reading channels of K, half for K and V of the chosen tokens.

        `r = floor(d/c)` with `c = cap/t`, so that r channels of cap keys take no more bytes than K and V of
        t/2 tokens; `floor(t/2)` tokens are attended.
        """
        num_channels = min(max(head_dim * budget // cap, 1), head_dim)
        return cls(num_channels=num_channels, num_tokens=max(budget // 2, 1))

    def auxiliary_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """The running sum of the values, float32 `[H_kv, D]`."""
        return (TensorSpec(shape=(num_kv_heads, head_dim), dtype=torch.float32),)

    def build(self, keys: Tensor, values: Tensor, auxiliary: tuple[Tensor, ...], *, length: int) -> None:
        sparq.write_value_sum(values, auxiliary[0], length=length)

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
        sparq.append_row(keys, values, auxiliary[0], key, value, position=position)

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
        return sparq.attend(
            queries,
            keys,
            values,
            auxiliary[0],
            length=length,
            num_channels=self.num_channels,
            num_tokens=self.num_tokens,
            scaling=scaling,
        )

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        """r channels of every key, then the chosen rows of K and V, and the mean value."""
        if num_rows <= self.num_tokens:
            return 2 * num_rows * head_dim * element_bytes
        scores = num_rows * self.num_channels
        return (scores + 2 * self.num_tokens * head_dim) * element_bytes + 4 * head_dim
