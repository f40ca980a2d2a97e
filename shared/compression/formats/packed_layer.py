"""A packed layer in decode and in the oracle: the packed prompt, rows of new tokens, and packed segments.

Streaming re-budgeting (the paper's future work) packs new tokens in segments, as the prompt was packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.dispatch import planned_path
from kvferry.kernels.packed.layer import PackedLayer, view_packed_layer
from kvferry.kernels.packed_hsa.batch import SparsePackedRows
from kvferry.kernels.softmax import Scaling, plain
from kvferry.kernels.trizone import trizone_decode_segments
from kvferry.kernels.trizone.batch import PackedRows
from kvferry.shared.compression.attention import Dense, Hsa
from kvferry.shared.compression.formats.interface import (
    LayerCache,
    NaiveLayer,
    Tensors,
    cache_view,
    on_host,
)
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.rdkv.compress import Rebudgeting, compress_layer_rdkv
from kvferry.shared.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.packed import PackedFormat


class PackedCache(LayerCache):
    """A packed prompt in the arena, rows of new tokens, and packed segments of earlier new tokens.

    keys, values      | 0 ... R - 1: rows of the current segment |   when it is full and one more row comes:
    segments          | segment 0 | segment 1 | ...              | <-- packed after the others
    segment_queries   | the last W queries of the current segment   |
    """

    format: PackedFormat
    settles: ClassVar[bool] = True

    def __init__(
        self, fmt: PackedFormat, regions: Tensors, packed: PackedLayer, settle: Callable[[], None]
    ) -> None:
        """Args: settle: see `LayerCache.settle`."""
        super().__init__(fmt, regions)
        self._settle = settle
        self._packed = [packed]
        self._segment_rows: tuple[tuple[Tensor, Tensor], ...] = ()
        self.bind()
        fmt.attention.build(self._view, length=0)

    def settle(self) -> None:
        self._settle()
        self._settle = lambda: None  # refers to the memory from before a move

    @property
    def packed(self) -> PackedLayer:
        """The prompt."""
        return self._packed[0]

    @property
    def segments(self) -> list[PackedLayer]:
        """The packed segments, oldest first."""
        return self._packed[1:]

    def bind(self) -> None:
        self.keys, self.values = self.regions["keys"], self.regions["values"]
        layouts, start = [its.layout for its in self._packed], 0
        self._packed = [view_packed_layer(layouts[0], self.regions["packed"][: layouts[0].size_bytes])]
        for layout in layouts[1:]:
            place = self.regions["segments"][start : start + layout.size_bytes]
            self._packed.append(view_packed_layer(layout, place))
            start += layout.size_bytes
        self._view = cache_view(self.format.shape, self.regions, self._packed)

    @property
    def name(self) -> str:
        if self.format.rebudgeting is not None:
            return "segments"
        return f"packed_{self.format.attention.name}"

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        growth, position = self.format.rebudgeting, num_appended
        if growth is not None:
            position = self._make_room(growth, queries, num_appended, plain(scaling))
        attention = self.format.attention
        attention.append(self._view, key, value, position=position)
        return attention.attend(queries, self._view, length=position + 1, scaling=scaling)

    def batched(self, num_appended: int) -> CachedRows | None:
        attention = self.format.attention
        if self.format.rebudgeting is not None or num_appended >= self.keys.shape[1]:
            return None
        if type(attention) is Dense:
            return PackedRows(keys=self.keys, values=self.values, length=num_appended, packed=self.packed)
        if type(attention) is not Hsa or planned_path("packed_hsa", self.keys.device) == "torch":
            return None  # it runs beside the others
        return SparsePackedRows(
            keys=self.keys,
            values=self.values,
            length=num_appended,
            packed=self.packed,
            pages=attention.codes(self._view),
            page_size=attention.page_size,
            num_channels=attention.num_channels,
            num_tokens=attention.num_tokens,
        )

    def used_bytes(self, num_appended: int) -> int:
        segments = sum(segment.layout.size_bytes for segment in self.segments)
        return self.format.used_bytes(num_appended, self.packed.layout.size_bytes) + segments

    def new_rows(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def new_rows_changed(self, num_rows: int) -> None:
        self.format.attention.build_again(self._view, length=num_rows)

    def generated_rows(self, num_appended: int) -> tuple[Tensor, Tensor]:
        num_packed = sum(keys.shape[1] for keys, _ in self._segment_rows)
        keys, values = (on_host(its[:, : num_appended - num_packed]) for its in (self.keys, self.values))
        return (
            torch.cat([*(rows for rows, _ in self._segment_rows), keys], 1),
            torch.cat([*(rows for _, rows in self._segment_rows), values], 1),
        )

    def _make_room(self, growth: Rebudgeting, queries: Tensor, num_appended: int, scaling: float) -> int:
        """Pack the rows if they fill a segment; returns the row number of the next token.

        Raises: KvferryError: K or V are not finite, or out of range for a packed layer.
        """
        row = num_appended - (len(self._packed) - 1) * growth.segment_tokens
        if row == growth.segment_tokens:
            self._pack_segment(growth, scaling)
            row = 0
        beyond = row - (growth.segment_tokens - growth.window)
        if beyond >= 0:
            self.regions["segment_queries"][:, :, beyond] = queries
        return row

    def _pack_segment(self, growth: Rebudgeting, scaling: float) -> None:
        inputs = LayerInputs(
            layer=0,
            queries=self.regions["segment_queries"],
            keys=self.keys,
            values=self.values,
            scaling=scaling,
        )
        try:
            packed = compress_layer_rdkv(growth.settings, inputs)
        except ValueError as error:
            raise KvferryError(f"generated tokens cannot be packed: {error}", reason="packing") from error
        start = sum(segment.layout.size_bytes for segment in self.segments)
        place = self.regions["segments"][start : start + packed.layout.size_bytes]
        place.copy_(packed.buffer)
        if self.format.shape.returns_generated:
            self._segment_rows = (*self._segment_rows, (on_host(self.keys), on_host(self.values)))
        self._packed.append(view_packed_layer(packed.layout, place))


class NaivePacked(NaiveLayer):
    """Packed prompt, packed segments and concatenated rows; auxiliary tensors are rebuilt at every step."""

    def __init__(self, fmt: PackedFormat, prompt: PackedLayer) -> None:
        self._format = fmt
        self._packed: tuple[PackedLayer, ...] = (prompt,)
        self._queries: tuple[Tensor, ...] = ()
        self._rows: tuple[tuple[Tensor, Tensor], ...] = ()

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        if self._format.rebudgeting is not None:
            self._rebudget(self._format.rebudgeting, queries, plain(scaling))
        self._rows += ((key, value),)
        keys, values = self._joined_rows()
        if dense:
            return trizone_decode_segments(queries, self._packed, keys, values, scaling=plain(scaling))
        attention = self._format.attention
        view = attention.rebuilt(self._format.shape, keys, values, self._packed)
        return attention.attend(queries, view, length=keys.shape[1], scaling=scaling)

    def replace_new_rows(self, keys: Tensor, values: Tensor) -> None:
        self._rows = tuple(zip(keys.unbind(1), values.unbind(1), strict=True))

    def _rebudget(self, growth: Rebudgeting, queries: Tensor, scaling: float) -> None:
        """Pack the generated rows if they fill a segment; then record this token's queries."""
        if len(self._rows) == growth.segment_tokens:
            keys, values = self._joined_rows()
            last = torch.stack(self._queries[-growth.window :], dim=2)
            inputs = LayerInputs(layer=0, queries=last, keys=keys, values=values, scaling=scaling)
            self._packed += (compress_layer_rdkv(growth.settings, inputs),)
            self._rows = ()
        self._queries += (queries.clone(),)

    def _joined_rows(self) -> tuple[Tensor, Tensor]:
        """K and V `[H_kv, m, D]`."""
        keys, values = (torch.stack(its, 1) for its in zip(*self._rows, strict=True))
        return keys, values
