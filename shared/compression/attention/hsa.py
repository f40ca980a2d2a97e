"""RocketKV's hybrid sparse attention: estimates from page extremes of a few channels choose the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels import hsa, packed_hsa
from kvferry.kernels.hsa import num_pages
from kvferry.kernels.packed import PackedLayer
from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.attention.pages import PagedAttention


@dataclass(frozen=True, kw_only=True)
class Hsa(PagedAttention):
    """Implements `AttentionKind` by `kernels.hsa` (RocketKV section 3.4), and `PackedAttention` likewise.

    Attributes:
        num_channels: k1, channels read for the estimate.
        num_tokens: k2, tokens attended exactly, the newest one among them.
    """

    num_channels: int
    num_tokens: int

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> Hsa:
        """RocketKV sections 3.4 and 3.6: `c2 = max(1, cap/t)`, `P = ceil(sqrt(c2))` where that is <= c2, else
        1; `k1 = floor(d P t / cap)` channels, `k2 = floor(t / 2)` tokens."""
        page_size = 1
        while page_size * page_size * budget < cap:
            page_size += 1
        if page_size * budget > cap:
            page_size = 1
        num_channels = min(max(head_dim * page_size * budget // cap, 1), head_dim)
        return cls(page_size=page_size, num_channels=num_channels, num_tokens=max(budget // 2, 1))

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
        return hsa.attend(
            queries,
            keys,
            values,
            *self.extremes(keys, auxiliary),
            length=length,
            page_size=self.page_size,
            num_channels=self.num_channels,
            num_tokens=self.num_tokens,
            scaling=scaling,
        )

    def packed_specs(
        self, *, num_kv_heads: int, num_tokens: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """See `PackedAttention.packed_specs`: page extremes, with P = 1 too, for packed keys are no rows."""
        return self.page_specs(num_kv_heads=num_kv_heads, num_rows=num_tokens, head_dim=head_dim, dtype=dtype)

    def build_packed(self, packed: PackedLayer, auxiliary: tuple[Tensor, ...]) -> None:
        """See `PackedAttention.build_packed`."""
        packed_hsa.page_extremes(packed, *self.pages(auxiliary), page_size=self.page_size)

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
        """See `PackedAttention.append_packed`; one packed layer."""
        (prompt,) = packed
        keys[:, position] = key
        values[:, position] = value
        packed_hsa.append_key(prompt, *self.pages(auxiliary), key, num_new=position, page_size=self.page_size)

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
        """See `PackedAttention.attend_packed`; one packed layer."""
        (prompt,) = packed
        return packed_hsa.attend(
            queries,
            prompt,
            keys[:, :length],
            values[:, :length],
            *self.pages(auxiliary),
            page_size=self.page_size,
            num_channels=self.num_channels,
            num_tokens=self.num_tokens,
            scaling=scaling,
        )

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        """One of Kmax and Kmin for k1 channels of each page, then k2 rows of K and V."""
        if num_rows <= self.num_tokens:
            return 2 * num_rows * head_dim * element_bytes
        estimates = num_pages(num_rows, self.page_size) * self.num_channels
        return (estimates + 2 * self.num_tokens * head_dim) * element_bytes

    def read_packed_bytes(
        self, *, num_tokens: int, num_kv_heads: int, packed_bytes: int, head_dim: int, element_bytes: int
    ) -> int:
        """See `PackedAttention.read_packed_bytes`: estimates as `read_bytes` has them, and of the
        packed bytes the chosen tokens' share: which tokens, and so how wide ones, depends on a step's query.
        """
        if num_tokens <= self.num_tokens:
            return packed_bytes
        estimates = num_kv_heads * num_pages(num_tokens, self.page_size) * self.num_channels * element_bytes
        return estimates + packed_bytes * self.num_tokens // num_tokens
