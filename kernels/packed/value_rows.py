"""V codes as bytes, one row a token: 8 bits a byte each, 4 bits half-split, 2 bits quarter-split over D.

With m = 8 / w codes a byte and stride = ceil(D / m), byte i of a row holds channels i, i + stride, ... at
bits 0, w, ...; channels at D and beyond are padding, zeros when written and anything when read.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


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
    """Add `weights @ codes`; the codes become float32 in the order in which they lie.

    Args: weights float32 `[G, n]`; packed uint8 `[n, value_row_bytes]`; output float32 `[G, D]`, in place.
    """
    of_fields = torch.matmul(weights, byte_fields(packed, bits).float())
    output += of_fields.transpose(0, 1).flatten(1)[:, : output.shape[1]]


def byte_fields(packed: Tensor, bits: int) -> Tensor:
    """The fields of each byte, the lowest first.

    Args: packed uint8. Returns: uint8 `[8 / w, *packed.shape]`.
    """
    if bits == 8:
        return packed[None]
    shifts = _field_shifts(bits, packed.device).view(-1, *[1] * packed.ndim)
    return (packed >> shifts).bitwise_and_((1 << bits) - 1)


@functools.cache
def _field_shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
