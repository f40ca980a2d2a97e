"""Hybrid sparse attention of a batch: any lengths, page sizes and budgets share a layer's three launches, or
one call of C code.

Page extremes of a head are stored channel by channel, because a step reads only the highest-ranked channels:
page p of channel c is at `offset + c * channel_stride + p`. The stride is a multiple of 16 bytes. Pages of
one token have no extremes: their keys are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import (
    BatchShape,
    CachedRows,
    Errors,
    Fields,
    NewToken,
    NewTokens,
    SlotBatch,
    in_buckets,
    row_fields,
)
from kvferry.kernels.descriptors import (
    ROW_FIELDS,
    SplitWorkspace,
    choose_num_splits,
    split_workspace,
    splits_at_once,
)
from kvferry.kernels.dispatch import alignment_problem
from kvferry.kernels.hsa import MAX_PAGES, update_page_extremes
from kvferry.kernels.hsa.torch_path import CacheViews, RankedQueries, attend, rank_channels
from kvferry.kernels.softmax import scale_of

FIELDS = ROW_FIELDS + 6
MAX_OFFSET, MIN_OFFSET, CHANNEL_STRIDE, PAGE_SIZE, NUM_CHANNELS, NUM_TOKENS = range(ROW_FIELDS, FIELDS)
"""Columns: offsets of Kmax and Kmin of the first page and channel, elements between channels, P, k1, k2."""
BLOCK_PAGES = 128
"""Pages that one program scores."""
SCORING_PER_SM = 2
"""Programs that score pages at once on each multiprocessor. Each ranks channels, so more would do that again.
On an H200 those of a batch of eight took 26 microseconds when a few had to wait, 22 when none had to
(benchmarks/results/gpu/2026-11-28/call-5)."""
BLOCKS_A_PROGRAM = 8
"""The most blocks that one program scores, so that a long sequence among many short ones has more
programs."""
MAX_ROWS = 1 << 21
"""A head has fewer rows than this: kernels count them in 21 bits."""
LEAST_TOKENS = 16
"""For a batch's tokens: kernels are compiled once for numbers that 16 divides, and once for others."""
LEAST_CHANNELS = 16
EMPTY_HEAD = [int(column == PAGE_SIZE) for column in range(FIELDS)]
"""A head without rows. Its page size is 1, because kernels divide by it."""


@dataclass(frozen=True, kw_only=True)
class SparseRows(CachedRows):
    """One sequence's K and V in one layer, with their pages' extremes.

    Attributes:
        page_max, page_min: `[H_kv, ceil(cap / P), D]` with equal strides; a channel's pages are contiguous
            and readable to the next 16 bytes. K itself if P is 1.
        num_channels: k1; num_tokens: k2.
    """

    page_max: Tensor
    page_min: Tensor
    page_size: int
    num_channels: int
    num_tokens: int


class SparseSize(NamedTuple):
    """Sizes of a batch's launches, powers of two; equal sizes have equal grids.

    Attributes:
        max_pages, max_tokens, max_channels: the most pages, min(k2, n) and k1 of a head.
        pages_of_one, larger_pages: which there are; each kind has its own launch.
    """

    max_pages: int
    max_tokens: int
    max_channels: int
    pages_of_one: bool
    larger_pages: bool

    @classmethod
    def of(cls, rows: SparseRows) -> SparseSize:
        """Return the sizes for one sequence at its full length."""
        return cls(
            max_pages=in_buckets(rows.page_max.shape[1], least=BLOCK_PAGES),
            max_tokens=in_buckets(min(rows.num_tokens, rows.keys.shape[1]), least=LEAST_TOKENS),
            max_channels=in_buckets(rows.num_channels, least=LEAST_CHANNELS),
            pages_of_one=rows.page_size == 1,
            larger_pages=rows.page_size > 1,
        )

    @classmethod
    def of_all(cls, sizes: Iterable[SparseSize]) -> SparseSize:
        """Return the sizes for all of these, of which there is at least one."""
        return cls(*map(max, zip(*sizes, strict=True)))

    @classmethod
    def every_kernel(cls, head_dim: int, max_rows: int) -> list[SparseSize]:
        """Return sizes that together launch every kernel that sequences of up to `max_rows` rows can need,
        whatever their budgets: scoring kernels differ by channels, selecting ones by pages."""
        least = cls(BLOCK_PAGES, LEAST_TOKENS, LEAST_CHANNELS, pages_of_one=True, larger_pages=False)
        most = min(in_buckets(max_rows, least=BLOCK_PAGES), MAX_PAGES)
        selecting = [least._replace(max_pages=pages) for pages in _doubling(BLOCK_PAGES, most)]
        scoring = [
            least._replace(max_channels=channels, pages_of_one=False, larger_pages=True)
            for channels in _doubling(LEAST_CHANNELS, in_buckets(head_dim, least=LEAST_CHANNELS))
        ]
        return selecting + scoring


def _doubling(first: int, last: int) -> list[int]:
    return [first << i for i in range((last // first).bit_length())]


@dataclass(frozen=True, kw_only=True)
class HsaScratch:
    """What the launches of a batch pass to one another.

    Attributes:
        scores: float32 `[heads, G, max_pages]`, logits of pages in units of log2.
        partial: float32 `[heads, blocks, G, 2]`, maximum and sum of each block of pages.
        tokens: int32 `[heads, max_tokens]`, chosen rows, the newest last.
        counts: int32 `[heads]`, how many there are.
        splits: of the attention over them; num_splits a head.
        num_scoring: programs of a head that score its pages, at most.
    """

    size: SparseSize
    scores: Tensor
    partial: Tensor
    tokens: Tensor
    counts: Tensor
    splits: SplitWorkspace
    num_splits: int
    num_scoring: int

    @classmethod
    def of(cls, size: SparseSize, output: Tensor) -> HsaScratch:
        """Allocate a batch's scratch. Args: output `[..., G, D]`, a head for each (sequence, KV head)."""
        *heads, group_size, _ = output.shape
        num_heads, device = math.prod(heads), output.device
        blocks, num_splits = -(-size.max_pages // BLOCK_PAGES), choose_num_splits(num_heads, device)
        return cls(
            size=size,
            scores=torch.empty(num_heads, group_size, size.max_pages, dtype=torch.float32, device=device),
            partial=torch.empty(num_heads, blocks, group_size, 2, dtype=torch.float32, device=device),
            tokens=torch.empty(num_heads, size.max_tokens, dtype=torch.int32, device=device),
            counts=torch.empty(num_heads, dtype=torch.int32, device=device),
            splits=split_workspace(output, num_heads * num_splits),
            num_splits=num_splits,
            num_scoring=splits_at_once(num_heads, device, SCORING_PER_SM),
        )


_LEAST_SIZE = SparseSize(1, 1, 1, pages_of_one=True, larger_pages=False)
"""C code has memory of its own."""


def is_too_long(rows: SparseRows) -> bool:
    """Return whether a sequence has more pages, or rows, than one program can select from."""
    return rows.page_max.shape[1] > MAX_PAGES or rows.keys.shape[1] >= MAX_ROWS


def sparse_fields(base: Tensor, rows: SparseRows) -> Fields:
    """Return `row_fields` for this kernel's descriptors."""
    first, step = row_fields(base, rows, rows.page_max, rows.page_min)
    first += [rows.page_max.stride(2), rows.page_size, rows.num_channels, rows.num_tokens]
    return first, [*step, 0, 0, 0, 0]


class HsaBatch(SlotBatch[SparseRows, HsaScratch]):
    """A `SlotBatch` by `hsa.update_page_extremes` and `hsa.attend`."""

    C_FUNCTION = "kvferry_attend_sparse"

    def __init__(self, shape: BatchShape, base: Tensor) -> None:
        super().__init__("hsa", shape, base, empty=EMPTY_HEAD)
        self._sizes: dict[int, SparseSize] = {}
        self._own_scratch = HsaScratch.of(_LEAST_SIZE, self._output[:1]) if self._is_native else None
        self._views: dict[tuple[int, int], CacheViews] = {}
        self._ranked: dict[int, RankedQueries] = {}

    def place(self, slot: int, layers: Mapping[int, SparseRows]) -> None:
        super().place(slot, layers)
        if self._in_triton:
            self._sizes[slot] = SparseSize.of_all(set(map(SparseSize.of, layers.values())))

    def remove(self, slot: int) -> None:
        super().remove(slot)
        self._sizes.pop(slot, None)
        self._ranked = {}
        for layer in range(self._shape.num_layers):
            self._views.pop((layer, slot), None)

    def size(self) -> SparseSize:
        return _LEAST_SIZE if self._is_native else SparseSize.of_all(self._sizes.values())

    def scratch(self, num_slots: int) -> HsaScratch:
        if self._own_scratch is not None:
            return self._own_scratch
        return HsaScratch.of(self.size(), self._output[:num_slots])

    def attend(self, layer: int, step: NewTokens, *, errors: Errors, scratch: HsaScratch | None) -> Tensor:
        """See `SlotBatch.attend`; in torch the channels of several slots are ranked together."""
        members = self._layers[layer]
        ranks = len(members) > 1 and (scratch is None or self._is_beyond(step))
        self._ranked = _rank_together(members, step) if ranks else {}
        return super().attend(layer, step, errors=errors, scratch=scratch)

    def _attend_one(self, layer: int, slot: int, rows: SparseRows, token: NewToken) -> Tensor:
        keys, values = rows.append(token)
        extremes = rows.page_max, rows.page_min
        if (views := self._views.get((layer, slot))) is None:
            views = self._views[layer, slot] = CacheViews.of(rows.keys, rows.values, *extremes)
        update_page_extremes(*extremes, token.key, position=token.position, page_size=rows.page_size)
        return attend(
            token.queries,
            keys,
            values,
            *extremes,
            page_size=rows.page_size,
            num_channels=rows.num_channels,
            num_tokens=rows.num_tokens,
            scaling=token.scaling,
            ranked=self._ranked.get(slot),
            views=views,
        )

    def _fields(self, rows: SparseRows) -> Fields:
        return sparse_fields(self._base, rows)

    def _problem(self, rows: SparseRows) -> str | None:
        problem = super()._problem(rows)
        if problem is None and rows.page_size > 1:
            # read along pages
            problem = alignment_problem(page_max=rows.page_max.mT, page_min=rows.page_min.mT)
        return problem

    def _launch(
        self, layer: int, heads: Tensor, step: NewTokens, scratch: HsaScratch, output: Tensor
    ) -> None:
        # a CPU install has no Triton
        from kvferry.kernels.hsa.triton_kernel import append_and_attend_batch

        append_and_attend_batch(
            step.queries,
            self._base,
            heads,
            scratch,
            scaling=step.scaling,
            output=output,
            new_keys=step.keys,
            new_values=step.values,
        )


def _rank_together(members: Mapping[int, SparseRows], step: NewTokens) -> dict[int, RankedQueries]:
    """Return `rank_channels` by slot, with one call for all sequences that read equally many channels."""
    found: dict[int, RankedQueries] = {}
    queries = step.queries
    num_kv_heads = queries.shape[1]
    for num_channels in {rows.num_channels for rows in members.values()}:
        slots = sorted(slot for slot, rows in members.items() if rows.num_channels == num_channels)
        of_slots = queries if len(slots) == queries.shape[0] else queries[slots]
        ranked = rank_channels(
            of_slots.flatten(0, 1), num_channels=num_channels, scaling=scale_of(step.scaling)
        )
        for i, slot in enumerate(slots):
            found[slot] = ranked.heads(i * num_kv_heads, (i + 1) * num_kv_heads)
    return found
