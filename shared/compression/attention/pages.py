"""Page extremes beside K: the auxiliary tensors that HSA and Quest share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels import hsa
from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.attention.rows import GrowingRows


@dataclass(frozen=True, kw_only=True)
class PagedAttention(GrowingRows):
    """The part of `AttentionKind` that keeps Kmax and Kmin of pages as one, `[2, H_kv, D, ceil(rows / P)]`,
    each channel's pages beside one another because a step reads few channels; with P = 1 nothing: a key is
    its own page's extremes.

    Attributes:
        page_size: P, tokens that share one Kmax/Kmin pair.
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
        """The tensor for the extremes of as many tokens per KV head, whatever P."""
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
        """Kmax and Kmin `[H_kv, pages or some more, D]` of a tensor as `page_specs` wants it."""
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
