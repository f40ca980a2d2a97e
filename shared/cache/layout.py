"""Byte layout of one sequence in the arena: the offsets of the regions of each layer's format.

    sequence: | layer 0: region | region ... | layer 1: region | ... |      each aligned to ALIGNMENT_BYTES

Computed by decode at admission, before any byte arrives. `arena.py` owns the memory; formats own its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from kvferry.kernels.packed.layout import Region
from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.formats.interface import LayerCache, LayerFormat, Tensors

ALIGNMENT_BYTES = 64


def align(size_bytes: int) -> int:
    """The next multiple of ALIGNMENT_BYTES."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """One layer's format, and its regions by the names of `LayerFormat.regions`."""

    format: LayerFormat
    regions: Mapping[str, Region]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Typed views of the regions.

        Args: buffer: uint8, the sequence's bytes, aligned to ALIGNMENT_BYTES.
        """
        return {name: region.view(buffer) for name, region in self.regions.items()}

    def place(self, buffer: Tensor, tensors: Tensors) -> LayerCache:
        """Write a whole compressed prompt to the regions and open the layer, as if it had been received.

        Args: buffer: as in `views`; tensors: as `LayerFormat.compress` returned them, on any device.
        """
        regions = self.views(buffer)
        header = {name: TensorSpec(shape=tuple(its.shape), dtype=its.dtype) for name, its in tensors.items()}
        places = self.format.receive(header, regions)
        for name, place in places.items():
            place.copy_(tensors[name])
        return self.format.open(regions, places)


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """All of a sequence's regions.

    Attributes:
        size_bytes: from the sequence's start to the end of the last region, a multiple of ALIGNMENT_BYTES.
    """

    layers: tuple[LayerLayout, ...]
    size_bytes: int


def sequence_layout(formats: tuple[LayerFormat, ...]) -> SequenceLayout:
    """Place the regions of every layer one after another."""
    layers, offset = [], 0
    for fmt in formats:
        regions = {}
        for name, wanted in fmt.regions().items():
            region = Region(offset=offset, shape=wanted.placed_shape, dtype=wanted.dtype)
            offset += align(region.size_bytes)
            regions[name] = region
        layers.append(LayerLayout(format=fmt, regions=regions))
    return SequenceLayout(layers=tuple(layers), size_bytes=offset)


def measured_limit_bytes(layout: SequenceLayout) -> int:
    """Bytes to reserve if prefill will measure how the layers divide the rows.

    The total of K and V does not depend on the division. The auxiliary tensors of a layer grow by at most one
    row's share (a started page), and the alignment of every region may change.
    """
    beside = 0
    for layer in layout.layers:
        shape = replace(layer.format.shape, max_new_tokens=1, returns_generated=False)
        one_row = replace(layer.format, rows=1, shape=shape)
        beside += sum(align(its.placed_bytes) + ALIGNMENT_BYTES for its in one_row.regions().values())
    return layout.size_bytes + beside
