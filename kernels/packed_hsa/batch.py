"""Hybrid sparse attention of a batch over packed prompts and their new rows: one call of C code a layer, or
torch, one slot after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvferry.kernels.decode_batch import BatchShape, CachedRows, Fields, NewToken, row_fields
from kvferry.kernels.hsa.batch import EMPTY_HEAD
from kvferry.kernels.packed_hsa import PageCodes, append_key, attend
from kvferry.kernels.softmax import plain
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch


@dataclass(frozen=True, kw_only=True)
class SparsePackedRows(PackedRows):
    """One sequence's packed prompt in one layer, the rows of its new tokens, and the extremes of its pages.

    Attributes:
        pages: a channel's pages are contiguous.
        num_channels: k1; num_tokens: k2.
    """

    pages: PageCodes
    page_size: int
    num_channels: int
    num_tokens: int


class PackedHsaBatch(TriZoneBatch):
    """A `SlotBatch` by `packed_hsa.append_key` and `packed_hsa.attend`; its rows are `SparsePackedRows`.

    Descriptors have the columns of `hsa/batch.py`, but count bytes of `codes` for extremes, and two more:
    where each channel's low and step are.
    """

    C_FUNCTION = "kvferry_attend_packed_sparse"

    def __init__(self, shape: BatchShape, base: Tensor, codes: Tensor) -> None:
        super().__init__(shape, base, codes, op="packed_hsa", empty=[*EMPTY_HEAD, 0, 0])

    def _fields(self, rows: CachedRows) -> Fields:
        assert isinstance(rows, SparsePackedRows), f"rows are {type(rows).__name__}; they must have pages"
        pages = rows.pages
        first, step = row_fields(self._base, rows)
        for tensor in (pages.highest, pages.lowest):
            first.append(tensor.data_ptr() - self._codes.data_ptr())
            step.append(tensor.stride(0))
        first += [pages.highest.stride(2), rows.page_size, rows.num_channels, rows.num_tokens]
        step += [0] * 4
        for tensor in (pages.low, pages.step):
            first.append((tensor.data_ptr() - self._base.data_ptr()) // tensor.element_size())
            step.append(tensor.stride(0))
        return first, step

    def _attend_one(self, layer: int, slot: int, rows: PackedRows, token: NewToken) -> Tensor:
        assert isinstance(rows, SparsePackedRows), f"rows are {type(rows).__name__}; they must have pages"
        sizes: dict[str, Any] = {"page_size": rows.page_size}
        keys, values = rows.append(token)
        append_key(rows.packed, rows.pages, token.key, num_new=token.position, **sizes)
        sizes |= {"num_channels": rows.num_channels, "num_tokens": rows.num_tokens}
        return attend(
            token.queries, rows.packed, keys, values, rows.pages, scaling=plain(token.scaling), **sizes
        )
