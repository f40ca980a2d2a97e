"""Hybrid sparse attention of a batch: any lengths, page sizes and budgets share a layer's three launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvferry.kernels.checks import shape_problem
from kvferry.kernels.decode_batch import (
    Alone,
    BatchShape,
    CachedRows,
    SlotBatch,
    elements_from,
    in_buckets,
    row_fields,
)
from kvferry.kernels.dispatch import planned_path
from kvferry.kernels.hsa.descriptors import (
    BLOCK_PAGES,
    FIELDS,
    MAX_PAGES,
    PAGE_SIZE,
    PageSizes,
    hsa_scratch,
)
from kvferry.kernels.hsa.torch_path import (
    CacheViews,
    RankedQueries,
    attend,
    rank_channels,
    update_page_extremes,
)
from kvferry.kernels.split_workspace import choose_num_splits

_EMPTY = [int(column == PAGE_SIZE) for column in range(FIELDS)]
"""A head without rows. Its page size is 1, because kernels divide by it."""


@dataclass(frozen=True, kw_only=True)
class SparseRows(CachedRows):
    """One sequence's K and V in one layer, with their pages' extremes.

    Attributes:
        page_max, page_min: `[H_kv, ceil(cap / P), D]` with equal strides; a channel's pages are contiguous
        and
            readable to the next 16 bytes. K itself if P is 1.
        num_channels: k1; num_tokens: k2.
    """

    page_max: Tensor
    page_min: Tensor
    page_size: int
    num_channels: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class SparseSize:
    """Sizes of the scratch memory, powers of two, and the launches needed; one size, one set of grids."""

    max_pages: int
    max_tokens: int
    max_channels: int
    page_sizes: PageSizes

    @classmethod
    def of(cls, layers: Sequence[Mapping[int, SparseRows]]) -> SparseSize:
        """The size for a batch whose sequences reach their full length."""
        every = [rows for layer in layers for rows in layer.values()]
        return cls(
            max_pages=in_buckets(max(rows.page_max.shape[1] for rows in every), least=BLOCK_PAGES),
            max_tokens=in_buckets(max(min(rows.num_tokens, rows.keys.shape[1]) for rows in every)),
            max_channels=in_buckets(max(rows.num_channels for rows in every)),
            page_sizes=PageSizes.of(rows.page_size for rows in every),
        )


def is_too_long(rows: SparseRows) -> bool:
    """Whether a sequence has more pages than one program can select from."""
    return rows.page_max.shape[1] > MAX_PAGES


class HsaBatch(SlotBatch[SparseRows]):
    """A `SlotBatch` by `hsa.append_row` and `hsa.attend`.

    Args: size: of every batch that it attends.
    """

    def __init__(self, shape: BatchShape, base: Tensor, size: SparseSize) -> None:
        problem = shape_problem(shape.dtype, shape.group_size, shape.head_dim)
        is_launched = planned_path("hsa", shape.device, problem) != "torch"
        super().__init__("hsa", shape, base, is_launched=is_launched, empty=_EMPTY)
        self._max_channels, self._page_sizes = size.max_channels, size.page_sizes
        self._views: list[dict[int, CacheViews]] = []
        self._ranked: dict[int, RankedQueries] = {}
        if is_launched:
            self._num_splits = choose_num_splits(shape.num_heads, shape.device)
            self._scratch = hsa_scratch(
                num_heads=shape.num_heads,
                group_size=shape.group_size,
                head_dim=shape.head_dim,
                max_pages=size.max_pages,
                max_tokens=size.max_tokens,
                num_splits=self._num_splits,
                device=shape.device,
            )

    def fill(self, layers: Sequence[Mapping[int, SparseRows]]) -> None:
        """See `SlotBatch.fill`."""
        super().fill(layers)
        if not self.is_launched:
            self._views = [{} for _ in layers]
            for views, layer in zip(self._views, layers, strict=True):
                for slot, rows in layer.items():
                    views[slot] = CacheViews.of(rows.keys, rows.values, rows.page_max, rows.page_min)

    def release(self) -> None:
        """See `SlotBatch.release`."""
        super().release()
        self._views, self._ranked = [], {}

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, alone: Alone
    ) -> Tensor:
        """See `SlotBatch.attend`; in torch the channels of several slots are ranked together."""
        if not self.is_launched:
            members = self._layers[layer]
            self._ranked = _rank_together(members, queries) if len(members) > 1 else {}
        return super().attend(layer, queries, keys, values, scaling=scaling, alone=alone)

    def _attend_one(
        self,
        layer: int,
        slot: int,
        rows: SparseRows,
        queries: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
    ) -> Tensor:
        position = rows.length + self._num_steps - 1
        keys, values = rows.append(key, value, position=position)
        extremes = rows.page_max, rows.page_min
        update_page_extremes(*extremes, key, position=position, page_size=rows.page_size)
        return attend(
            queries,
            keys,
            values,
            *extremes,
            page_size=rows.page_size,
            num_channels=rows.num_channels,
            num_tokens=rows.num_tokens,
            scaling=scaling,
            ranked=self._ranked.get(slot),
            views=self._views[layer][slot],
        )

    def _fields(self, rows: SparseRows) -> tuple[list[int], list[int]]:
        first, step = row_fields(self._base, rows)
        extremes = (rows.page_max, rows.page_min)
        first += [elements_from(self._base, tensor) for tensor in extremes]
        step += [tensor.stride(0) for tensor in extremes]
        first += [rows.page_max.stride(2), rows.page_size, rows.num_channels, rows.num_tokens]
        return first, [*step, 0, 0, 0, 0]

    def _launch(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        # a CPU install has no Triton
        from kvferry.kernels.hsa.triton_kernel import append_and_attend_batch

        append_and_attend_batch(
            queries,
            self._base,
            self._tables.layer(layer),
            max_channels=self._max_channels,
            page_sizes=self._page_sizes,
            scaling=scaling,
            scratch=self._scratch,
            num_splits=self._num_splits,
            output=self._output,
            new_keys=keys,
            new_values=values,
        )


def _rank_together(members: Mapping[int, SparseRows], queries: Tensor) -> dict[int, RankedQueries]:
    """By slot: `rank_channels` of all sequences that read equally many channels, by one call.

    Args: queries `[S, H_kv, G, D]`.
    """
    found: dict[int, RankedQueries] = {}
    num_kv_heads = queries.shape[1]
    for num_channels in {rows.num_channels for rows in members.values()}:
        slots = sorted(slot for slot, rows in members.items() if rows.num_channels == num_channels)
        of_slots = queries if len(slots) == queries.shape[0] else queries[slots]
        ranked = rank_channels(of_slots.flatten(0, 1), num_channels=num_channels)
        for i, slot in enumerate(slots):
            found[slot] = ranked.heads(i * num_kv_heads, (i + 1) * num_kv_heads)
    return found
