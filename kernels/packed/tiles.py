"""Memory for a tile of codes, as bytes and as float32, that each thread uses again and again.

The torch paths unpack into it what they multiply next: a matrix product wants floats, and a tile that stays
in a core's cache costs less to convert than its codes to read. Nothing stays unpacked: the next tile takes
its place.
"""

from __future__ import annotations

import functools
import math
import threading

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 17
"""Codes that are floats at a time: 512 KiB, a part of a core's second-level cache."""
_MAX_VIEWS = 512


class _Memory(threading.local):
    """A thread's tiles by device and dtype, and views of them by shape."""

    def __init__(self) -> None:
        self._tiles: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._views: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], Tensor] = {}

    def view(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tile's beginning, in the shape asked for."""
        view = self._views.get((device, dtype, shape))
        if view is None:
            size = math.prod(shape)
            tile = self._tiles.get((device, dtype))
            # what is allocated in inference mode cannot be written to outside it
            with torch.inference_mode(False):
                if tile is None or tile.shape[0] < size or len(self._views) == _MAX_VIEWS:
                    tile = torch.empty(max(size, TILE_ELEMENTS), dtype=dtype, device=device)
                    self._tiles[device, dtype] = tile
                    self._views.clear()
                view = tile[:size].view(shape)
            self._views[device, dtype, shape] = view
        return view


_memory = _Memory()


def tile_rows(row_elements: int) -> int:
    """How many rows of so many codes make a tile, at least one."""
    return max(TILE_ELEMENTS // max(row_elements, 1), 1)


def as_floats(codes: Tensor) -> Tensor:
    """Args: codes: bytes or halves, a tile of them. Returns: float32, this thread's until its next call."""
    return _memory.view(codes.shape, torch.float32, codes.device).copy_(codes)


def field_floats(octets: Tensor, bits: int) -> Tensor:
    """The fields of each byte, the lowest first, each times a power of two: where it lies in its byte.

    Args: octets uint8, a tile's; bits: 2 or 4.
    Returns: float32 `[8 / w, *octets.shape]`, to be multiplied by `field_scales`; this thread's until its
        next call.
    """
    fields = _memory.view((8 // bits, *octets.shape), torch.uint8, octets.device)
    torch.bitwise_and(octets, _masks(bits, octets.ndim, octets.device), out=fields)
    return as_floats(fields)


@functools.cache
def field_scales(bits: int, device: torch.device) -> Tensor:
    """float32 `[8 / w, 1]`, powers of two that take `field_floats` to codes."""
    return torch.tensor([[2.0**-shift] for shift in range(0, 8, bits)], device=device)


@functools.cache
def _masks(bits: int, ndim: int, device: torch.device) -> Tensor:
    """uint8 `[8 / w, 1, ...]`, for bytes of so many dimensions."""
    masks = [((1 << bits) - 1) << shift for shift in range(0, 8, bits)]
    return torch.tensor(masks, dtype=torch.uint8, device=device).view(-1, *[1] * ndim)
