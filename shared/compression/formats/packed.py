"""Packed prompts: codes, scales, 16-bit rows and indexes in one buffer that decode attends as it is.

`rdkv.py` and `uniform.py` choose the widths. The layer in decode and in the oracle is in `packed_layer.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.packed.check import begin_packed_check
from kvferry.kernels.packed.layer import PackedLayer, view_packed_layer
from kvferry.kernels.packed.layout import KINDS, LAYOUT_VERSION, HeadCounts, PackedLayout, packed_layout
from kvferry.kernels.packed.packing import Packing
from kvferry.shared.compression.attention import AttentionKind
from kvferry.shared.compression.formats.interface import (
    Encoded,
    InvalidTensors,
    LayerFormat,
    Specs,
    Tensors,
    named_auxiliary,
)
from kvferry.shared.compression.formats.packed_layer import NaivePacked, PackedCache
from kvferry.shared.compression.interface import LayerInputs, TensorSpec
from kvferry.shared.compression.rdkv.compress import Rebudgeting

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
        rebudgeting: how new tokens are packed; None if they stay rows.
    """

    kinds: ClassVar[Mapping[str, str]] = {
        "layout": "manifest", "codes": "codes", "scales": "scales", "rows": "rows", "index": "index"
    }  # fmt: skip
    attentions: ClassVar[tuple[str, ...] | None] = ("dense", "hsa")
    attention: AttentionKind
    rebudgeting: Rebudgeting | None = None

    @property
    @abstractmethod
    def limit_bytes(self) -> int:
        """The largest possible size of the packed prompt."""

    @abstractmethod
    def begin(self, inputs: LayerInputs, scores: Tensor | None) -> Packing:
        """Begin to pack a layer. Args, Raises: as of `encode`."""

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        encoded = self.encode(inputs, scores)
        return encoded.finish(encoded.tensors)

    def encode(self, inputs: LayerInputs, scores: Tensor | None) -> Encoded:
        packing = self.begin(inputs, scores)
        return Encoded(
            tensors=packing.tensors, make=lambda tensors: self._tensors_of(packing.finish(tensors))
        )

    def _tensors_of(self, packed: PackedLayer) -> Tensors:
        """A packed layer's tensors as they are sent."""
        counts = [count for head in packed.layout.heads for count in (*head.channels, *head.tokens)]
        tensors = {"layout": torch.tensor([LAYOUT_VERSION, *counts], dtype=torch.int32)}
        for name in KINDS:
            start, size_bytes = packed.layout.kinds[name]
            tensors[name] = packed.buffer[start : start + size_bytes]
        return tensors

    def positions_by_head(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        return tuple(head.positions.to(torch.int64) for head in self.packed(tensors).heads)

    def tensors(self) -> Specs:
        """The layout only: the other sizes depend on the prompt; `receive` checks their sum."""
        return {"layout": TensorSpec(shape=(1 + _HEAD_COUNTS * self.shape.num_kv_heads,), dtype=torch.int32)}

    def regions(self) -> Specs:
        rows = self.shape.row_spec(self.num_rows)
        packed = TensorSpec(shape=(self.limit_bytes,), dtype=torch.uint8)
        return {"packed": packed, "keys": rows, "values": rows, **self._auxiliary(self.num_rows)}

    @property
    def num_rows(self) -> int:
        """The most new tokens that are rows at the same time."""
        return self.shape.num_new_rows

    def _auxiliary(self, num_rows: int) -> dict[str, TensorSpec]:
        return named_auxiliary(self.attention.specs(self.shape, self.rows + num_rows, packed=True))

    def receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        sizes = {name: its.shape for name, its in header.items() if name != "layout"}
        is_bytes = all(
            len(size) == 1 and size[0] >= 0 and header[name].dtype == torch.uint8
            for name, size in sizes.items()
        )
        expected = self.tensors()
        self.check_header({name: its for name, its in header.items() if name in expected}, expected)
        total = sum(its[0] for its in sizes.values() if its)
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
        """The offsets of the packed buffer's parts.

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
        """The packed layer, in new memory."""
        return view_packed_layer(self._layout(tensors), torch.cat([tensors[name] for name in KINDS]))

    def parts(self, tensors: Tensors, num_parts: int) -> Sequence[Tensors]:
        """Each head's regions follow one another in every kind, so a part is a piece of each."""
        layout, (version, *counts) = self._layout(tensors), tensors["layout"].tolist()
        size = self.shape.num_kv_heads // num_parts
        offsets, parts = dict.fromkeys(KINDS, 0), list[Tensors]()
        for first in range(0, self.shape.num_kv_heads, size):
            heads = layout.heads[first : first + size]
            its_layout = packed_layout(heads, self.shape.head_dim, num_tokens=layout.num_tokens)
            its_counts = counts[first * _HEAD_COUNTS : (first + size) * _HEAD_COUNTS]
            part = {"layout": torch.tensor([version, *its_counts], dtype=torch.int32)}
            for name in KINDS:
                begin, size_bytes = offsets[name], its_layout.kinds[name][1]
                part[name] = tensors[name][begin : begin + size_bytes]
                offsets[name] += size_bytes
            parts.append(part)
        return parts

    def prompt_bytes(self, tensors: Tensors) -> int:
        return sum(tensors[name].numel() for name in KINDS)

    def used_bytes(self, num_appended: int, prompt_bytes: int | None = None) -> int:
        packed_bytes = self.limit_bytes if prompt_bytes is None else prompt_bytes
        auxiliary = [its.size_bytes for its in self._auxiliary(num_appended).values()]
        return packed_bytes + self.shape.rows_bytes(num_appended) + sum(auxiliary)

    def shipped_bytes(self) -> int:
        return super().shipped_bytes() + self.limit_bytes

    def kept_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.used_bytes(0, prompt_bytes)

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        packed_bytes = self.limit_bytes if prompt_bytes is None else prompt_bytes
        return self.attention.read_bytes(self.shape, self.rows, packed_bytes)

    def naive(self, tensors: Tensors) -> NaivePacked:
        return NaivePacked(self, self.packed(tensors))
