"""Memory for a tile of codes, as bytes and as float32, that each thread uses again and again.

The torch paths unpack into it what they multiply next: a matrix product wants floats, and a tile that stays
in a core's cache costs less to convert than its codes to read. Nothing stays unpacked: the next tile takes
its place.

What a step does with packed bytes is the same at every step, so it is laid down once: views of the bytes, of
this memory and of what comes out, in `Tile`s. A step goes through them and makes no view of its own.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 17
"""Codes that are floats at a time: 512 KiB, a part of a core's second-level cache."""


class _Memory(threading.local):
    """A thread's memory by what it is for, device and dtype."""

    def __init__(self) -> None:
        self._areas: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def area(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At least `size` elements; zeros when they are first given."""
        area = self._areas.get((name, device, dtype))
        if area is None or area.shape[0] < size:
            # what is allocated in inference mode cannot be written to outside it
            with torch.inference_mode(False):
                area = torch.zeros(max(size, TILE_ELEMENTS), dtype=dtype, device=device)
            self._areas[name, device, dtype] = area
        return area


_memory = _Memory()


def scratch(
    name: str,
    shape: Sequence[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
) -> Tensor:
    """This thread's memory of a name, from an element on; whoever asks for the same name next writes to it
    too."""
    size = math.prod(shape)
    return _memory.area(name, first + size, dtype, device)[first : first + size].view(shape)


def tile_rows(row_elements: int) -> int:
    """How many rows of so many codes make a tile, at least one."""
    return max(TILE_ELEMENTS // max(row_elements, 1), 1)


@dataclass(frozen=True, kw_only=True)
class FieldProducts:
    """Products with the fields of bytes, which lie in another order than they are wanted in.

    Attributes:
        weights, codes, products: `products = weights @ codes`, three-dimensional.
        sums: `target = addend + lying * scales`, in this order: lying are products, seen in the target's
            order.
    """

    weights: Tensor
    codes: Tensor
    products: Tensor
    sums: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]

    def run(self) -> None:
        torch.bmm(self.weights, self.codes, out=self.products)
        for addend, lying, scales, target in self.sums:
            torch.addcmul(addend, lying, scales, out=target)


@dataclass(frozen=True, kw_only=True)
class RowProducts:
    """`target = addend + weights @ codes`, two-dimensional."""

    weights: Tensor
    codes: Tensor
    addend: Tensor
    target: Tensor

    def run(self) -> None:
        torch.addmm(self.addend, self.weights, self.codes, out=self.target)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Codes that are floats at the same time, and the products that they are for.

    Attributes:
        masked: bytes, masks, and the fields of those bytes that they leave.
        packed, floats: codes or fields, and the float32 that they become.
        products: in their order.
    """

    masked: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    packed: list[Tensor] = field(default_factory=list)
    floats: list[Tensor] = field(default_factory=list)
    products: list[FieldProducts | RowProducts] = field(default_factory=list)

    def run(self) -> None:
        for octets, masks, fields in self.masked:
            torch.bitwise_and(octets, masks, out=fields)
        if self.floats:
            torch._foreach_copy_(self.floats, self.packed)
        for products in self.products:
            products.run()


class Tiles:
    """Tiles in the making, as few as hold what is put into them; the thread that makes them runs them."""

    def __init__(self, device: torch.device) -> None:
        self.tiles: list[Tile] = []
        self._device = device
        self._used = 0

    def run(self) -> None:
        for tile in self.tiles:
            tile.run()

    def reserve(self, num_codes: int) -> None:
        """So many codes come next, and are floats together."""
        if not self.tiles or self._used + num_codes > TILE_ELEMENTS:
            self.tiles.append(Tile())
            self._used = 0

    def floats(self, *shape: int) -> Tensor:
        """Memory for codes as float32, to be given to `convert`."""
        floats = scratch("floats", shape, self._device, first=self._used)
        self._used += floats.numel()
        return floats

    def convert(self, codes: Tensor, floats: Tensor) -> None:
        """Args: codes: bytes or halves; floats: part of what `floats` gave, of the same shape."""
        self.tiles[-1].packed.append(codes)
        self.tiles[-1].floats.append(floats)

    def fields(self, octets: Tensor, bits: int) -> Tensor:
        """The fields of each byte, the lowest first, each times a power of two: where it lies in its byte.

        Args: octets uint8; bits: 2, 4 or 8.
        Returns: float32 `[8 / w, *octets.shape]`, to be multiplied by `field_scales`.
        """
        shape = (8 // bits, *octets.shape)
        if bits == 8:
            floats = self.floats(*shape)
            self.convert(octets, floats[0])
            return floats
        fields = scratch("fields", shape, self._device, dtype=torch.uint8, first=self._used)
        self.tiles[-1].masked.append((octets, _masks(bits, octets.ndim, octets.device), fields))
        floats = self.floats(*shape)
        self.convert(fields, floats)
        return floats

    def multiply(self, products: FieldProducts | RowProducts) -> None:
        self.tiles[-1].products.append(products)


@functools.cache
def field_scales(bits: int, device: torch.device) -> Tensor:
    """float32 `[8 / w, 1]`, powers of two that take `Tiles.fields` to codes."""
    with torch.inference_mode(False):
        return torch.tensor([[2.0**-shift] for shift in range(0, 8, bits)], device=device)


@functools.cache
def _masks(bits: int, ndim: int, device: torch.device) -> Tensor:
    """uint8 `[8 / w, 1, ...]`, for bytes of so many dimensions."""
    masks = [((1 << bits) - 1) << shift for shift in range(0, 8, bits)]
    with torch.inference_mode(False):
        return torch.tensor(masks, dtype=torch.uint8, device=device).view(-1, *[1] * ndim)
