"""Attentions that choose tokens by page extremes of keys: RocketKV's hybrid sparse attention, and Quest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels import hsa, packed_hsa, quest
from kvferry.kernels.hsa import num_pages
from kvferry.kernels.packed import PackedLayer
from kvferry.shared.compression.attention.interface import TensorSpec


@dataclass(frozen=True, kw_only=True)
class PagedAttention:
    """The part of `AttentionKind` that stores Kmax and Kmin of pages.

    Both are in one tensor `[2, H_kv, D, ceil(rows / P)]`. The pages of a channel are adjacent, because a step
    reads few channels. With P = 1 nothing is stored: each key is the extremes of its own page.

    Attributes:
        page_size: P, the tokens that share one Kmax/Kmin pair.
    """

    page_size: int

    def auxiliary_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        if self.page_size == 1:
            return ()
        return self.page_specs(num_kv_heads=num_kv_heads, num_rows=num_rows, head_dim=head_dim, dtype=dtype)

    def page_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec]:
        """The tensor for the extremes of `num_rows` tokens per KV head, for any P."""
        pages = hsa.num_pages(num_rows, self.page_size)
        return (TensorSpec(shape=(2, num_kv_heads, head_dim, pages), dtype=dtype, aligned=True),)

    def extremes(self, keys: Tensor, auxiliary: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Kmax and Kmin `[H_kv, ceil(cap / P), D]` of keys `[H_kv, cap, D]`."""
        if self.page_size == 1:
            return keys, keys
        pages = hsa.num_pages(keys.shape[1], self.page_size)
        page_max, page_min = self.pages(auxiliary)
        return page_max[:, :pages], page_min[:, :pages]

    def pages(self, auxiliary: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Kmax and Kmin `[H_kv, at least the number of pages, D]` of the tensor of `page_specs`."""
        (both,) = auxiliary
        return both[0].mT, both[1].mT

    def build(self, keys: Tensor, values: Tensor, auxiliary: tuple[Tensor, ...], *, length: int) -> None:
        if self.page_size == 1:
            return
        hsa.page_extremes(keys, *self.extremes(keys, auxiliary), length=length, page_size=self.page_size)

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
        page_max, page_min = self.extremes(keys, auxiliary)
        hsa.append_row(
            keys, values, page_max, page_min, key, value, position=position, page_size=self.page_size
        )


@dataclass(frozen=True, kw_only=True)
class Hsa(PagedAttention):
    """Implements `AttentionKind` by `kernels.hsa` (RocketKV section 3.4), and `PackedAttention` likewise.

    Attributes:
        num_channels: k1, channels read for the estimate.
        num_tokens: k2, tokens attended exactly, including the newest.
    """

    name: ClassVar[str] = "hsa"

    num_channels: int
    num_tokens: int

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> Hsa:
        """RocketKV sections 3.4 and 3.6.

        `c2 = max(1, cap/t)`; `P = ceil(sqrt(c2))` if that is <= c2, else 1; `k1 = floor(d P t / cap)`
        channels; `k2 = floor(t / 2)` tokens.
        """
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
        """See `PackedAttention.packed_specs`: page extremes, also for P = 1: packed keys are not rows."""
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
        """See `PackedAttention.read_packed_bytes`.

        The estimate reads as many bytes as in `read_bytes`. Of the packed bytes the average share of k2
        tokens counts, because a step's query decides which tokens are read, and their widths differ.
        """
        if num_tokens <= self.num_tokens:
            return packed_bytes
        estimates = num_kv_heads * num_pages(num_tokens, self.page_size) * self.num_channels * element_bytes
        return estimates + packed_bytes * self.num_tokens // num_tokens


@dataclass(frozen=True, kw_only=True)
class Quest(PagedAttention):
    """Implements `AttentionKind` by `kernels.quest` (Tang et al. 2024; RocketKV appendix A.3).

    Attributes:
        num_tokens: tokens attended exactly, including the newest.
    """

    name: ClassVar[str] = "quest"

    num_tokens: int

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> Quest:
        """Half of the budget is for reading bounds, half for K and V.

        `P = ceil(cap/t)`, so that one extreme of d channels for each of cap/P pages takes no more bytes than
        K and V of t/2 tokens; `floor(t/2)` tokens are attended. If the query heads of a group differ in sign
        on a channel, both extremes of the channel are read.
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
