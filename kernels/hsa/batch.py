"""Hybrid sparse attention of a whole batch: other lengths, page sizes and budgets share the three
launches of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kvferry.kernels.checks import shape_problem
from kvferry.kernels.decode_batch import (
    BatchShape,
    CachedRows,
    SlotBatch,
    elements_from,
    in_buckets,
    row_fields,
)
from kvferry.kernels.dispatch import decided_path
from kvferry.kernels.hsa import num_pages
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
"""A head without rows: pages of one token, for pages of none cannot be counted."""


@dataclass(frozen=True, kw_only=True)
class SparseRows(CachedRows):
    """One sequence's K and V in one layer, with their pages' extremes.

    Attributes:
        page_max, page_min: `[H_kv, ceil(cap / P), D]`, strided alike, each channel's pages beside one another
            and readable to the next 16 bytes; K itself where P is 1.
        num_channels: k1; num_tokens: k2.
    """

    page_max: Tensor
    page_min: Tensor
    page_size: int
    num_channels: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class SparseSize:
    """What scratch memory has room for, in powers of two, and which launches there are; one size, one
    shape of every launch."""

    max_pages: int
    max_tokens: int
    max_channels: int
    page_sizes: PageSizes

    @classmethod
    def of(cls, layers: Sequence[Mapping[int, SparseRows]]) -> SparseSize:
        """The size for a batch, each sequence at its full length."""
        every = [rows for layer in layers for rows in layer.values()]
        return cls(
            max_pages=in_buckets(max(rows.page_max.shape[1] for rows in every), least=BLOCK_PAGES),
            max_tokens=in_buckets(max(min(rows.num_tokens, rows.keys.shape[1]) for rows in every)),
            max_channels=in_buckets(max(rows.num_channels for rows in every)),
            page_sizes=PageSizes.of(rows.page_size for rows in every),
        )


def is_too_long(rows: SparseRows) -> bool:
    """Whether a sequence has more pages than one program selects among."""
    return rows.page_max.shape[1] > MAX_PAGES


class HsaBatch(SlotBatch[SparseRows]):
    """A `SlotBatch` by `hsa.append_row` and `hsa.attend`.

    Args: size: of every batch that it is filled with.
    """

    def __init__(self, shape: BatchShape, base: Tensor, size: SparseSize) -> None:
        problem = shape_problem(shape.dtype, shape.group_size, shape.head_dim)
        is_launched = decided_path("hsa", shape.device, problem) != "torch"
        super().__init__("hsa", shape, base, is_launched=is_launched, empty=_EMPTY)
        self._max_channels, self._page_sizes = size.max_channels, size.page_sizes
        self._views: list[dict[int, CacheViews]] = []
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
            self._views = [
                {slot: CacheViews.of(*_tensors(rows)) for slot, rows in layer.items()} for layer in layers
            ]

    def release(self) -> None:
        """See `SlotBatch.release`."""
        super().release()
        self._views = []

    def _attend_each(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Iterator[tuple[int, Callable[[], Tensor]]]:
        """See `SlotBatch`; channels are ranked together."""
        ranked = _rank_together(self._layers[layer], queries)
        views = self._views[layer]
        for slot, rows, tensors in self._slots(layer, queries, keys, values):
            yield (
                slot,
                partial(
                    self._attend_one,
                    rows,
                    *tensors,
                    scaling=scaling,
                    ranked=ranked.get(slot),
                    views=views[slot],
                ),
            )

    def _attend_one(
        self,
        rows: SparseRows,
        queries: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        ranked: RankedQueries | None = None,
        views: CacheViews | None = None,
    ) -> Tensor:
        length, page_size = rows.length + self._num_steps, rows.page_size
        keys, values = rows.append(key, value, position=length - 1)
        page_max, page_min = rows.page_max, rows.page_min
        update_page_extremes(page_max, page_min, key, position=length - 1, page_size=page_size)
        pages = num_pages(length, page_size)
        return attend(
            queries,
            keys,
            values,
            page_max.narrow(1, 0, pages),
            page_min.narrow(1, 0, pages),
            page_size=page_size,
            num_channels=rows.num_channels,
            num_tokens=rows.num_tokens,
            scaling=scaling,
            ranked=ranked,
            views=views,
        )

    def _fields(self, rows: SparseRows) -> tuple[list[int], list[int]]:
        first, step = row_fields(self._base, rows)
        extremes = (rows.page_max, rows.page_min)
        first += [elements_from(self._base, tensor) for tensor in extremes]
        step += [tensor.stride(0) for tensor in extremes]
        first += [rows.page_max.stride(2), rows.page_size, rows.num_channels, rows.num_tokens]
        return first, [*step, 0, 0, 0, 0]

    def _launch(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        # Here, because a CPU install has no Triton.
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


def _tensors(rows: SparseRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rows.keys, rows.values, rows.page_max, rows.page_min


def _rank_together(members: Mapping[int, SparseRows], queries: Tensor) -> dict[int, RankedQueries]:
    """`rank_channels` of sequences that read equally many channels, by the same operators as one; nothing
    where there is one sequence, which ranks its own.

    Args: queries `[S, H_kv, G, D]`.
    """
    found: dict[int, RankedQueries] = {}
    if len(members) == 1:
        return found
    num_kv_heads = queries.shape[1]
    for num_channels in {rows.num_channels for rows in members.values()}:
        slots = sorted(slot for slot, rows in members.items() if rows.num_channels == num_channels)
        of_slots = queries if len(slots) == queries.shape[0] else queries[slots]
        ranked = rank_channels(of_slots.flatten(0, 1), num_channels=num_channels)
        for i, slot in enumerate(slots):
            found[slot] = ranked.heads(i * num_kv_heads, (i + 1) * num_kv_heads)
    return found
