"""V codes as bytes, one row a token: 8 bits a byte each, 4 bits half-split, 2 bits quarter-split over D.

With m = 8 / w codes a byte and stride = ceil(D / m), byte i of a row holds channels i, i + stride, ... at
bits 0, w, ...; channels at D and beyond are padding, zeros when written and anything when read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.packed.tiles import as_floats, field_floats, field_scales, tile_rows


def value_row_bytes(bits: int, head_dim: int) -> int:
    """Bytes of one token's V codes: ceil(D / (8 / w))."""
    return -(-head_dim // (8 // bits))


def pack_value_rows(codes: Tensor, bits: int) -> Tensor:
    """Args: codes uint8 `[n, D]` below 2^bits. Returns: uint8 `[n, value_row_bytes]`."""
    num_tokens, head_dim = codes.shape
    per_byte, stride = 8 // bits, value_row_bytes(bits, head_dim)
    padded = codes.new_zeros(num_tokens, per_byte * stride)
    padded[:, :head_dim] = codes
    packed = torch.zeros_like(padded[:, :stride])
    for p in range(per_byte):
        packed |= padded[:, p * stride : (p + 1) * stride] << (bits * p)
    return packed


def unpack_value_rows(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Args: packed uint8 `[n, value_row_bytes]`. Returns: the codes as float32 `[n, D]`."""
    num_tokens, stride = packed.shape
    codes = torch.empty(num_tokens, 8 // bits, stride, dtype=torch.float32, device=packed.device)
    for p in range(8 // bits):
        codes[:, p].copy_((packed >> (bits * p)) & ((1 << bits) - 1))
    return codes.flatten(1)[:, :head_dim]


def add_value_products(weights: Tensor, packed: Tensor, bits: int, output: Tensor) -> None:
    """Add `weights @ codes`; the codes become float32, a tile at a time, in the order in which they lie.

    Args: weights float32 `[G, n]`; packed uint8 `[n, value_row_bytes]`; output float32 `[G, D]`, in place.
    """
    num_tokens, row_bytes = packed.shape
    group_size, head_dim = output.shape
    per_byte = 8 // bits
    max_tokens = tile_rows(per_byte * row_bytes)
    for start in range(0, num_tokens, max_tokens):
        tile, of_tile = packed[start : start + max_tokens], weights[:, start : start + max_tokens]
        if bits == 8:
            output.addmm_(of_tile, as_floats(tile))
            continue
        of_fields = torch.bmm(of_tile.expand(per_byte, -1, -1), field_floats(tile, bits)).transpose(0, 1)
        scales = field_scales(bits, packed.device)
        if per_byte * row_bytes == head_dim:
            output.view(group_size, per_byte, row_bytes).addcmul_(of_fields, scales)
        else:
            output += (of_fields * scales).flatten(1)[:, :head_dim]
