"""V codes as bytes, one row a token: 8 bits a byte each, 4 bits half-split, 2 bits quarter-split over D.

With m = 8 / w codes a byte and stride = ceil(D / m), byte i of a row has channels i, i + stride, ... at
bits 0, w, ...; channels at D and beyond are padding, which is written as zeros and which readers ignore.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed.tiles import Tiles, field_scales, scratch, tile_rows


def value_row_bytes(bits: int, head_dim: int) -> int:
    """Count the bytes of one token's V codes: ceil(D / (8 / w))."""
    return -(-head_dim // (8 // bits))


def pack_value_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack rows. Args: codes uint8 `[n, D]` below 2^bits. Returns: uint8 `[n, value_row_bytes]`."""
    num_tokens, head_dim = codes.shape
    per_byte = 8 // bits
    stride = -(-head_dim // per_byte)
    padded = codes.new_zeros(num_tokens, per_byte * stride)
    padded[:, :head_dim] = codes
    packed = torch.zeros_like(padded[:, :stride])
    for p in range(per_byte):
        packed |= padded[:, p * stride : (p + 1) * stride] << (bits * p)
    return packed


def unpack_value_rows(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Unpack rows. Args: packed uint8 `[n, value_row_bytes]`. Returns: the codes as float32 `[n, D]`."""
    num_tokens, stride = packed.shape
    codes = torch.empty(num_tokens, 8 // bits, stride, dtype=torch.float32, device=packed.device)
    for p in range(8 // bits):
        codes[:, p].copy_((packed >> (bits * p)) & ((1 << bits) - 1))
    return codes.flatten(1)[:, :head_dim]


def plan_value_products(
    tiles: Tiles, weights: Tensor, rows: Sequence[tuple[int, Tensor]], output: Tensor
) -> None:
    """Plan `output += weights @ codes`; codes become float32 in their packed order.

    Args:
        weights: float32 `[G, n]`, read at each run.
        rows: (width, rows) in the weights' order, by rising width: uint8 `[n_w, value_row_bytes]`, and
            float16 `[n_16, D]`.
        output: float32 `[G, D]`, in place.
    """
    start = 0
    whole: list[Tensor] = []
    for width, packed in rows:
        if width < 8:
            of_width = weights[:, start : start + len(packed)]
            _plan_fields(tiles, of_width, packed, width, output)
            start += len(packed)
        else:
            whole.append(packed)
    _plan_rows(tiles, weights[:, start:], whole, output)


def add_value_products(weights: Tensor, packed: Tensor, bits: int, output: Tensor) -> None:
    """Add `weights @ codes`, a tile of them at a time.

    Args: weights float32 `[G, n]`; packed uint8 `[n, value_row_bytes]`; output float32 `[G, D]`, in place.
    """
    tiles = Tiles(packed.device)
    plan_value_products(tiles, weights, [(bits, packed)], output)
    tiles.run()


def _plan_fields(tiles: Tiles, weights: Tensor, packed: Tensor, bits: int, output: Tensor) -> None:
    row_bytes = packed.shape[1]
    group_size, head_dim = output.shape
    per_byte = 8 // bits
    max_tokens = tile_rows(per_byte * row_bytes)
    products = scratch("products", (per_byte, group_size, row_bytes), packed.device)
    scales = field_scales(bits, packed.device)
    if per_byte * row_bytes == head_dim:
        part = output.view(group_size, per_byte, row_bytes)
        sums = [(part, products.transpose(0, 1), scales)]
    else:
        # the last channels of the last fields are padding
        parts = torch.split(output, row_bytes, dim=1)
        sums = [(part, products[p, :, : part.shape[1]], scales[p]) for p, part in enumerate(parts)]
    for start in range(0, len(packed), max_tokens):
        tile = packed[start : start + max_tokens]
        tiles.reserve(per_byte * tile.numel())
        of_fields = weights[:, start : start + max_tokens].expand(per_byte, -1, -1)
        tiles.then(torch.bmm, of_fields, tiles.fields(tile, bits), out=products)
        for part, ordered, of_part in sums:
            tiles.then(torch.addcmul, part, ordered, of_part, out=part)


def _plan_rows(tiles: Tiles, weights: Tensor, rows: Sequence[Tensor], output: Tensor) -> None:
    """Plan products of tokens whose codes are elements. Args: rows: bytes or halves, `[n, D]` each."""
    head_dim = output.shape[1]
    num_tokens, max_tokens = sum(map(len, rows)), tile_rows(head_dim)
    for start in range(0, num_tokens, max_tokens):
        stop = min(start + max_tokens, num_tokens)
        tiles.reserve((stop - start) * head_dim)
        floats = tiles.floats(stop - start, head_dim)
        first = 0
        for packed in rows:
            lower, upper = max(start, first), min(stop, first + len(packed))
            if lower < upper:
                tiles.convert(packed[lower - first : upper - first], floats[lower - start : upper - start])
            first += len(packed)
        tiles.then(torch.addmm, output, weights[:, start:stop], floats, out=output)
