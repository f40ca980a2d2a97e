"""KIVI in vectorised torch, all heads at once and a tile of groups at a time; arguments are checked by the
dispatch in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvferry.kernels.packed.value_rows import pack_value_rows, unpack_value_rows, value_row_bytes
from kvferry.kernels.quantise import dequantise_rows, quantise_rows

GROUP_TOKENS = 32
TILE_GROUPS = 32
"""Groups of each head whose codes are float32 at a time: 1,024 tokens."""


def quantise(keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Args: keys, values `[H_kv, 32 g, D]`. Returns: codes and scales, as `KiviRows` has them."""
    num_kv_heads, num_rows, head_dim = keys.shape
    groups = num_rows // GROUP_TOKENS
    shape = (num_kv_heads, groups, GROUP_TOKENS, head_dim)
    codes, scales = [], []
    for rows in (keys.reshape(shape).transpose(2, 3), values.reshape(shape)):
        its_codes, its_scales, minima = quantise_rows(rows, bits)
        count, width = rows.shape[2], rows.shape[3]
        packed = pack_value_rows(its_codes.reshape(num_kv_heads * groups * count, width), bits)
        codes.append(packed.view(num_kv_heads, groups, count * packed.shape[1]))
        scales += [its_scales, minima]
    return torch.cat(codes, dim=2), torch.cat(scales, dim=2)


def dequantise(codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns: K and V float32 `[H_kv, 32 g, D]`."""
    num_kv_heads, groups = codes.shape[:2]
    head_dim = scales.shape[2] // 2 - GROUP_TOKENS
    keys = codes.new_empty(num_kv_heads, groups * GROUP_TOKENS, head_dim, dtype=torch.float32)
    values = torch.empty_like(keys)
    for start, tile in _tiles(codes, scales, bits):
        key_codes, key_scales, key_minima, value_codes, value_scales, value_minima = tile
        stop = start + value_codes.shape[1] * GROUP_TOKENS
        channels_first = dequantise_rows(key_codes, key_scales, key_minima)
        keys[:, start:stop] = channels_first.transpose(2, 3).flatten(1, 2)
        values[:, start:stop] = dequantise_rows(value_codes, value_scales, value_minima).flatten(1, 2)
    return keys, values


def decode(
    queries: Tensor,
    codes: Tensor,
    scales: Tensor,
    bits: int,
    left_keys: Tensor,
    left_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """As `kernels.kivi.kivi_decode`, with rows left over and new rows as one.

    `q . k = sum_c (s_c q_c) code_c + sum_c min_c q_c` and `sum_t (p_t s_t) code_t + sum_t p_t min_t`: codes
    are never scaled.
    """
    scaled = queries.float() * scaling
    grouped = codes.shape[1] * GROUP_TOKENS
    logits = scaled.new_empty(*queries.shape[:2], grouped + left_keys.shape[1])
    for start, (key_codes, key_scales, key_minima, *_) in _tiles(codes, scales, bits):
        # [H_kv, g, G, D] @ [H_kv, g, D, 32]
        products = (scaled[:, None] * key_scales[:, :, None]) @ key_codes
        products += (scaled[:, None] @ key_minima[..., None]).expand_as(products)
        stop = start + key_codes.shape[1] * GROUP_TOKENS
        logits[:, :, start:stop] = products.transpose(1, 2).flatten(2)
    logits[:, :, grouped:] = scaled @ left_keys.float().mT
    probabilities = logits.softmax(dim=-1)
    output = probabilities[:, :, grouped:] @ left_values.float()
    for start, (*_, value_codes, value_scales, value_minima) in _tiles(codes, scales, bits):
        stop = start + value_codes.shape[1] * GROUP_TOKENS
        tile = probabilities[:, :, start:stop]
        output += (tile * value_scales.flatten(1)[:, None]) @ value_codes.flatten(1, 2)
        output += tile @ value_minima.flatten(1)[:, :, None]
    return output.to(queries.dtype)


def _tiles(codes: Tensor, scales: Tensor, bits: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """A tile's first token; K codes float32 `[H_kv, t, D, 32]`, their scales and minima `[H_kv, t, D]`, V
    codes `[H_kv, t, 32, D]`, their scales and minima `[H_kv, t, 32]`."""
    num_kv_heads, groups = codes.shape[:2]
    head_dim = scales.shape[2] // 2 - GROUP_TOKENS
    key_bytes = value_row_bytes(bits, GROUP_TOKENS)
    value_bytes = value_row_bytes(bits, head_dim)
    for first in range(0, groups, TILE_GROUPS):
        tile = codes[:, first : first + TILE_GROUPS]
        count = tile.shape[1]
        keys = tile[:, :, : head_dim * key_bytes].reshape(-1, key_bytes)
        values = tile[:, :, head_dim * key_bytes :].reshape(-1, value_bytes)
        key_scales, key_minima, value_scales, value_minima = torch.split(
            scales[:, first : first + count], [head_dim, head_dim, GROUP_TOKENS, GROUP_TOKENS], dim=2
        )
        yield (
            first * GROUP_TOKENS,
            (
                unpack_value_rows(keys, bits, GROUP_TOKENS).view(num_kv_heads, count, head_dim, GROUP_TOKENS),
                key_scales,
                key_minima,
                unpack_value_rows(values, bits, head_dim).view(num_kv_heads, count, GROUP_TOKENS, head_dim),
                value_scales,
                value_minima,
            ),
        )
