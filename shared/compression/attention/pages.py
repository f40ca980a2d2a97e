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
    """The part of `AttentionKind` that keeps `(page_max, page_min)`, `[H_kv, ceil(rows / P), D]` each.

    Attributes:
        page_size: P, tokens that share one Kmax/Kmin pair.
    """

    page_size: int

    def auxiliary_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        pages = (num_kv_heads, hsa.num_pages(num_rows, self.page_size), head_dim)
        return (TensorSpec(shape=pages, dtype=dtype),) * 2

    def build(self, keys: Tensor, values: Tensor, auxiliary: tuple[Tensor, ...], *, length: int) -> None:
        page_max, page_min = auxiliary
        hsa.page_extremes(keys, page_max, page_min, length=length, page_size=self.page_size)

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
        page_max, page_min = auxiliary
        hsa.append_row(
            keys, values, page_max, page_min, key, value, position=position, page_size=self.page_size
        )
