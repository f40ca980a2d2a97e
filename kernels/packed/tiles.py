"""Scratch memory for a tile of codes, as bytes and as float32, that each thread reuses.

The torch paths unpack into it what they multiply next: a matrix product needs floats, and a tile that stays
in a core's cache costs less to convert than its codes cost to read. The next tile overwrites it.

A step does the same with packed bytes every time, so it is planned once: `Tile`s have views of the bytes, of
this memory and of the outputs. A step runs them and makes no view of its own.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

Operation = Callable[[], object]
TILE_ELEMENTS = 1 << 17
"""Codes unpacked at a time: 512 KiB of float32, a part of a core's second-level cache."""


class _Memory(threading.local):
    """A thread's scratch memory by name, device and dtype."""

    def __init__(self) -> None:
        self.areas: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}


_memory = _Memory()


def scratch(
    name: str,
    shape: Sequence[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
) -> Tensor:
    """Return this thread's memory of a name, from an element on. It starts as zeros; equal names share it."""
    stop = first + math.prod(shape)
    area = _memory.areas.get((name, device, dtype))
    if area is None or area.shape[0] < stop:
        # memory allocated in inference mode cannot be written to outside it
        with torch.inference_mode(False):
            area = torch.zeros(max(stop, TILE_ELEMENTS), dtype=dtype, device=device)
        _memory.areas[name, device, dtype] = area
    return area[first:stop].view(shape)


def tile_rows(row_elements: int) -> int:
    """Return how many rows of `row_elements` codes fit into a tile, at least one."""
    return max(TILE_ELEMENTS // max(row_elements, 1), 1)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Codes that are unpacked together, and their products.

    Attributes:
        unpacking: operations that write the bytes' fields.
        packed, floats: codes or fields, and out: the same as float32.
        products: operations on the floats, in their order.
    """

    unpacking: list[Operation] = field(default_factory=list)
    packed: list[Tensor] = field(default_factory=list)
    floats: list[Tensor] = field(default_factory=list)
    products: list[Operation] = field(default_factory=list)


class Tiles:
    """Collects codes into as few tiles as possible; only the thread that makes them may run them."""

    def __init__(self, device: torch.device) -> None:
        self.tiles: list[Tile] = []
        self._device = device
        self._used = 0

    def run(self) -> None:
        """Unpack and multiply tile by tile; in one function, because a step calls it for every layer."""
        for tile in self.tiles:
            for unpack in tile.unpacking:
                unpack()
            if tile.floats:
                torch._foreach_copy_(tile.floats, tile.packed)
            for multiply in tile.products:
                multiply()

    def reserve(self, num_codes: int) -> None:
        """Start a new tile unless the next `num_codes` codes, unpacked together, fit into this one."""
        if not self.tiles or self._used + num_codes > TILE_ELEMENTS:
            self.tiles.append(Tile())
            self._used = 0

    def floats(self, *shape: int) -> Tensor:
        """Reserve memory for codes as float32, to pass to `convert`."""
        floats = scratch("floats", shape, self._device, first=self._used)
        self._used += floats.numel()
        return floats

    def convert(self, codes: Tensor, floats: Tensor) -> None:
        """Plan `floats = codes`. Args: codes: bytes or halves; floats: from `floats`, of the same shape."""
        self.tiles[-1].packed.append(codes)
        self.tiles[-1].floats.append(floats)

    def fields(self, octets: Tensor, bits: int) -> Tensor:
        """Plan the fields of each byte, the lowest first, unshifted: each is its code times a power of two.

        Args: octets uint8; bits: 2, 4 or 8.
        Returns: float32 `[8 / w, *octets.shape]`, to multiply by `field_scales`.
        """
        shape = (8 // bits, *octets.shape)
        if bits == 8:
            floats = self.floats(*shape)
            self.convert(octets, floats[0])
            return floats
        fields = scratch("fields", shape, self._device, dtype=torch.uint8, first=self._used)
        masks = _masks(bits, octets.ndim, octets.device)
        self.tiles[-1].unpacking.append(partial(torch.bitwise_and, octets, masks, out=fields))
        floats = self.floats(*shape)
        self.convert(fields, floats)
        return floats

    def then(self, operation: Callable[..., object], *args: Tensor, out: Tensor) -> None:
        """Plan an operation on the current tile's floats, after those planned before."""
        self.tiles[-1].products.append(partial(operation, *args, out=out))


@functools.cache
def field_scales(bits: int, device: torch.device) -> Tensor:
    """Return float32 `[8 / w, 1]`, the powers of two that turn `Tiles.fields` into codes."""
    with torch.inference_mode(False):
        return torch.tensor([[2.0**-shift] for shift in range(0, 8, bits)], device=device)


@functools.cache
def _masks(bits: int, ndim: int, device: torch.device) -> Tensor:
    """Return masks, uint8 `[8 / w, 1, ...]`, for bytes of `ndim` dimensions."""
    masks = [((1 << bits) - 1) << shift for shift in range(0, 8, bits)]
    with torch.inference_mode(False):
        return torch.tensor(masks, dtype=torch.uint8, device=device).view(-1, *[1] * ndim)
