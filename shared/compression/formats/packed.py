"""Packed prompts: codes, scales, 16-bit rows and indexes in one buffer that decode attends as it is.

`rdkv.py` and `uniform.py` choose the widths. Decode's layer is the packed prompt, rows of new tokens, and
packed segments of new tokens (`rdkv.PackedSegments`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.dispatch import planned_path
from kvferry.kernels.packed.check import begin_packed_check
from kvferry.kernels.packed.layer import PackedLayer, view_packed_layer
from kvferry.kernels.packed.layout import KINDS, LAYOUT_VERSION, HeadCounts, PackedLayout, packed_layout
from kvferry.kernels.packed.packing import Packing
from kvferry.kernels.packed_hsa.batch import SparsePackedRows
from kvferry.kernels.softmax import Scaling, plain
from kvferry.kernels.trizone import trizone_decode_segments
from kvferry.kernels.trizone.batch import PackedRows
from kvferry.shared.compression.attention import AttentionKind, CacheView, Dense, Hsa
from kvferry.shared.compression.formats.interface import (
    Encoded,
    InvalidTensors,
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Specs,
    Tensors,
)
from kvferry.shared.compression.interface import LayerInputs, TensorSpec

SEGMENTS = "segments"
"""The region of packed segments."""
_HEAD_COUNTS = 8


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise InvalidTensors(str(error), reason="packed") from error


@dataclass(frozen=True, kw_only=True)
class PackedFormat(LayerFormat):
    """A packed prompt.

    Tensors: layout int32 `[1 + 8 H_kv]` (LAYOUT_VERSION, then for each KV head the number of channels of 2,
    4, 8, 16 bits and the number of tokens of 2, 4, 8, 16 bits), then the parts of the packed buffer as bytes.

    Attributes:
        rows: the most prompt tokens that a head retains.
        attention: dense or HSA, over packed bytes.
    """

    kinds: ClassVar[Mapping[str, str]] = {
        "layout": "manifest", "codes": "codes", "scales": "scales", "rows": "rows", "index": "index"
    }  # fmt: skip
    attentions: ClassVar[tuple[str, ...] | None] = ("dense", "hsa")
    attention: AttentionKind

    @property
    @abstractmethod
    def limit_bytes(self) -> int:
        """The largest possible size of the packed prompt."""

    @abstractmethod
    def begin(self, inputs: LayerInputs, scores: Tensor | None) -> Packing:
        """Begin to pack a layer. Args, Raises: as in `encode`."""

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        encoded = self.encode(inputs, scores)
        return encoded.finish(encoded.tensors)

    def encode(self, inputs: LayerInputs, scores: Tensor | None) -> Encoded:
        packing = self.begin(inputs, scores)
        return Encoded(
            tensors=packing.tensors, make=lambda tensors: self._tensors_of(packing.finish(tensors))
        )

    def _tensors_of(self, packed: PackedLayer) -> Tensors:
        """Return a packed layer's tensors as they are sent."""
        counts = [count for head in packed.layout.heads for count in (*head.channels, *head.tokens)]
        tensors = {"layout": torch.tensor([LAYOUT_VERSION, *counts], dtype=torch.int32)}
        for name in KINDS:
            start, size_bytes = packed.layout.kinds[name]
            tensors[name] = packed.buffer[start : start + size_bytes]
        return tensors

    def positions_by_head(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        return tuple(head.positions.to(torch.int64) for head in self.packed(tensors).heads)

    def tensors(self) -> Specs:
        """Return the layout only: the other sizes depend on the prompt; `receive` checks their sum."""
        return {"layout": TensorSpec(shape=(1 + _HEAD_COUNTS * self.shape.num_kv_heads,), dtype=torch.int32)}

    def placed(self, num_new: int) -> Specs:
        return {
            "packed": TensorSpec(shape=(self.limit_bytes,), dtype=torch.uint8),
            **self.shape.row_specs(num_new),
            **self.attention.regions(self.shape, self.rows + num_new, packed=True),
        }

    def receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        sizes = {name: spec.shape for name, spec in header.items() if name != "layout"}
        is_bytes = all(
            len(size) == 1 and size[0] >= 0 and header[name].dtype == torch.uint8
            for name, size in sizes.items()
        )
        expected = self.tensors()
        self.check_header({name: spec for name, spec in header.items() if name in expected}, expected)
        total = sum(shape[0] for shape in sizes.values() if shape)
        if [*header] != ["layout", *KINDS] or not is_bytes or total > self.limit_bytes:
            raise InvalidTensors(
                f"its tensors are {', '.join(header)} of {total} packed bytes; layout, "
                f"{', '.join(KINDS)} of at most {self.limit_bytes} are expected",
                reason="layer_header",
            )
        places, offset = {"layout": torch.empty(header["layout"].shape, dtype=torch.int32)}, 0
        for name, (size_bytes,) in sizes.items():
            places[name] = regions["packed"][offset : offset + size_bytes]
            offset += size_bytes
        return places

    def open(self, regions: Tensors, tensors: Tensors) -> PackedCache:
        layout = self._layout(tensors)
        packed = view_packed_layer(layout, regions["packed"][: layout.size_bytes])
        with _refusing():
            check = begin_packed_check(packed, self.shape.num_prompt_tokens)
        return PackedCache(self, regions, packed, _refusing()(check))

    def _layout(self, tensors: Tensors) -> PackedLayout:
        """Compute the offsets of the packed buffer's parts.

        Raises: InvalidTensors: another layout version, impossible counts, or tensors of other sizes than the
            counts give.
        """
        version, *counts = tensors["layout"].tolist()
        if version != LAYOUT_VERSION:
            raise InvalidTensors(
                f"it is packed in layout version {version}; this side reads {LAYOUT_VERSION}",
                reason="layout_version",
            )
        try:
            heads = tuple(
                HeadCounts(channels=tuple(counts[i : i + 4]), tokens=tuple(counts[i + 4 : i + 8]))
                for i in range(0, len(counts), _HEAD_COUNTS)
            )
            layout = packed_layout(heads, self.shape.head_dim, num_tokens=self.shape.num_prompt_tokens)
        except ValueError as error:
            raise InvalidTensors(f"LAYOUT: {error}", reason="layout") from error
        sizes = {name: layout.kinds[name][1] for name in KINDS}
        sent = {name: tensors[name].numel() for name in KINDS}
        most = max(head.num_tokens for head in heads)
        if most > self.shape.num_prompt_tokens or sizes != sent or layout.size_bytes > self.limit_bytes:
            raise InvalidTensors(
                f"LAYOUT: heads keep {[head.num_tokens for head in heads]} tokens in {sizes} bytes; at most "
                f"{self.shape.num_prompt_tokens} tokens and the {sent} bytes that were announced are allowed",
                reason="layout",
            )
        return layout

    def packed(self, tensors: Tensors) -> PackedLayer:
        """Return the packed layer, in new memory."""
        return view_packed_layer(self._layout(tensors), torch.cat([tensors[name] for name in KINDS]))

    def parts(self, tensors: Tensors, num_parts: int) -> Sequence[Tensors]:
        """Divide each kind into pieces: in every kind, the heads' regions follow one another."""
        layout, (version, *counts) = self._layout(tensors), tensors["layout"].tolist()
        size = self.shape.num_kv_heads // num_parts
        offsets, parts = dict.fromkeys(KINDS, 0), list[Tensors]()
        for first in range(0, self.shape.num_kv_heads, size):
            heads = layout.heads[first : first + size]
            part_layout = packed_layout(heads, self.shape.head_dim, num_tokens=layout.num_tokens)
            part_counts = counts[first * _HEAD_COUNTS : (first + size) * _HEAD_COUNTS]
            part = {"layout": torch.tensor([version, *part_counts], dtype=torch.int32)}
            for name in KINDS:
                begin, size_bytes = offsets[name], part_layout.kinds[name][1]
                part[name] = tensors[name][begin : begin + size_bytes]
                offsets[name] += size_bytes
            parts.append(part)
        return parts

    def prompt_bytes(self, tensors: Tensors) -> int:
        return sum(tensors[name].numel() for name in KINDS)

    def used_bytes(self, num_appended: int, prompt_bytes: int | None = None) -> int:
        unused = 0 if prompt_bytes is None else self.limit_bytes - prompt_bytes
        return super().used_bytes(num_appended) - unused

    def shipped_bytes(self) -> int:
        return self.tensors()["layout"].size_bytes + self.limit_bytes

    def kept_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.used_bytes(0, prompt_bytes)

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        packed_bytes = self.limit_bytes if prompt_bytes is None else prompt_bytes
        return self.attention.read_bytes(self.shape, self.rows, packed_bytes)

    def naive(self, tensors: Tensors) -> NaivePacked:
        return NaivePacked(self, self.packed(tensors))


class PackedCache(LayerCache):
    """A packed prompt in the arena, rows of new tokens, and packed segments of earlier new tokens."""

    format: PackedFormat

    def __init__(
        self, fmt: PackedFormat, regions: Tensors, packed: PackedLayer, settle: Callable[[], None]
    ) -> None:
        """Take a packed prompt. Args: settle: see `LayerCache.settle`."""
        self._packed = [packed]
        self._settle = settle
        super().__init__(fmt, regions)
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
        self.keys, self.values = self.new_rows()
        layouts, start = [packed.layout for packed in self._packed], 0
        self._packed = [view_packed_layer(layouts[0], self.regions["packed"][: layouts[0].size_bytes])]
        for layout in layouts[1:]:
            place = self.regions[SEGMENTS][start : start + layout.size_bytes]
            self._packed.append(view_packed_layer(layout, place))
            start += layout.size_bytes
        self._view = CacheView.of(self.format.shape, self.regions, self._packed)

    @property
    def name(self) -> str:
        return f"packed_{self.format.attention.name}"

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        attention = self.format.attention
        attention.append(self._view, key, value, position=num_appended)
        return attention.attend(queries, self._view, length=num_appended + 1, scaling=scaling)

    def batched(self, num_appended: int) -> CachedRows | None:
        attention = self.format.attention
        if num_appended >= self.keys.shape[1]:
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

    def new_rows_changed(self, num_rows: int) -> None:
        self.format.attention.build_again(self._view, length=num_rows)

    def add_segment(self, packed: PackedLayer) -> None:
        """Place a packed segment of new tokens behind the others."""
        start = sum(segment.layout.size_bytes for segment in self.segments)
        place = self.regions[SEGMENTS][start : start + packed.layout.size_bytes]
        place.copy_(packed.buffer)
        self._packed.append(view_packed_layer(packed.layout, place))


class NaivePacked(NaiveLayer):
    """Packed prompt, packed segments and the new rows; auxiliary tensors are rebuilt at every step."""

    def __init__(self, fmt: PackedFormat, prompt: PackedLayer) -> None:
        self._format = fmt
        self._packed: tuple[PackedLayer, ...] = (prompt,)

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        keys, values = self.appended(key, value)
        if dense:
            return trizone_decode_segments(queries, self._packed, keys, values, scaling=plain(scaling))
        attention = self._format.attention
        view = attention.rebuilt(self._format.shape, keys, values, self._packed)
        return attention.attend(queries, view, length=keys.shape[1], scaling=scaling)

    def add_segment(self, packed: PackedLayer) -> None:
        self._packed += (packed,)
