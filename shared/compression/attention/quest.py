"""Quest: upper bounds of whole pages, over all channels, choose the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvferry.kernels import quest
from kvferry.kernels.hsa import num_pages
from kvferry.shared.compression.attention.pages import PagedAttention


@dataclass(frozen=True, kw_only=True)
class Quest(PagedAttention):
    """Implements `AttentionKind` by `kernels.quest` (Tang et al. 2024; RocketKV appendix A.3).

    Attributes:
        num_tokens: tokens attended exactly, the newest one among them.
    """

    num_tokens: int

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> Quest:
        """Half the budget reads bounds, half reads K and V: `P = ceil(cap/t)`, so that one extreme of d
        channels for each of cap/P pages is at most t/2 tokens of K and V; `floor(t/2)` tokens attended.

        Where heads of a group differ in sign on a channel, both its extremes are read.
        """
        return cls(page_size=max(-(-cap // budget), 1), num_tokens=max(budget // 2, 1))

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
        return quest.attend(
            queries,
            keys,
            values,
            *self.extremes(keys, auxiliary),
            length=length,
            page_size=self.page_size,
            num_tokens=self.num_tokens,
            scaling=scaling,
        )

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        """One of Kmax and Kmin for every channel of each page, then the chosen rows of K and V."""
        if num_rows <= self.num_tokens:
            return 2 * num_rows * head_dim * element_bytes
        bounds = num_pages(num_rows, self.page_size) * head_dim
        return (bounds + 2 * self.num_tokens * head_dim) * element_bytes
