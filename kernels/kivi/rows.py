"""KIVI's rows: uniform quantisation of K per channel in groups of tokens, of V per token.

Prefill quantises the selected rows; decode attends to the packed bytes as received (`__init__.py`), or
dequantises them on arrival where only the wire is quantised. Rows after the last whole group are not
quantised. Does not choose rows or widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.packed.value_rows import pack_value_rows, unpack_value_rows, value_row_bytes
from kvferry.kernels.quantise import WIDTHS, dequantise_rows, quantise_rows

GROUP_TOKENS = 32
"""Tokens that share one scale of a K channel (Liu et al. 2024, group size 32)."""
WORD_BITS = 32
"""Kernels load codes as words of this many bits."""
TILE_GROUPS = 32
"""Groups of each head that are expanded to float32 at a time: 1,024 tokens."""


@dataclass(frozen=True, kw_only=True)
class KiviRows:
    """Rows of one layer, n = 32 g + r of them per KV head, r < 32.

    Attributes:
        bits: b, 2, 4 or 8.
        codes: uint8 `[H_kv, g, D * 4 b + 32 * ceil(D b / 8)]`: of each group the K codes of channel 0, 1, ...
            and then the V codes of token 0, 1, ..., each packed as `kernels.packed.value_rows` packs a row.
        scales: float16 `[H_kv, g, 2 D + 64]`: K scales, K minima, V scales, V minima (`half_headers`).
        keys, values: `[H_kv, r, D]`, the last r rows as they are.
        latent_dim: of latent rows, the first channels of K that are V, too: there are no codes, scales and
            minima of V, and `values` have as many channels. 0: K and V are quantised each.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    keys: Tensor
    values: Tensor
    latent_dim: int = 0

    def __post_init__(self) -> None:
        num_kv_heads, num_left, head_dim = self.keys.shape
        num_groups = self.codes.shape[1] if self.codes.ndim == 3 else 0
        codes, scales, left = kivi_shapes(
            num_groups * GROUP_TOKENS + num_left,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bits=self.bits,
            is_latent=bool(self.latent_dim),
        )
        shapes = tuple(tuple(t.shape) for t in (self.codes, self.scales, self.keys, self.values))
        expected = (codes, scales, left, (*left[:2], self.latent_dim or head_dim))
        if shapes != expected:
            raise ValueError(f"codes, scales, keys, values are {shapes}; they must be {expected}")

    @property
    def num_rows(self) -> int:
        """The number of rows, n."""
        return self.codes.shape[1] * GROUP_TOKENS + self.keys.shape[1]

    @property
    def problem(self) -> str | None:
        """The reason why no batched kernel can attend to these rows; None if one can."""
        if self.latent_dim:
            return "rows are latent"
        row_bits = self.keys.shape[2] * self.bits
        if row_bits % WORD_BITS:
            return f"the codes of a token's V have {row_bits} bits; they must be a multiple of {WORD_BITS}"
        return None


def kivi_shapes(
    num_rows: int, *, num_kv_heads: int, head_dim: int, bits: int, is_latent: bool = False
) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of `KiviRows`: codes, scales, and keys or values. Latent rows have none of V.

    Raises: ValueError: another width.
    """
    if bits not in WIDTHS:
        raise ValueError(f"bits is {bits}; it must be one of {WIDTHS}")
    groups, left = divmod(num_rows, GROUP_TOKENS)
    key_bytes = head_dim * value_row_bytes(bits, GROUP_TOKENS)
    value_bytes = 0 if is_latent else GROUP_TOKENS * value_row_bytes(bits, head_dim)
    return (
        (num_kv_heads, groups, key_bytes + value_bytes),
        (num_kv_heads, groups, 2 * (head_dim + (0 if is_latent else GROUP_TOKENS))),
        (num_kv_heads, left, head_dim),
    )


def kivi_quantise(keys: Tensor, values: Tensor, bits: int, *, latent_dim: int = 0) -> KiviRows:
    """Quantise whole groups of rows; the others stay as they are.

    Deviation: KIVI leaves up to 128 of the latest tokens in full precision and quantises them as they fill
    up; here those beyond the last whole group stay, n mod 32. Scales and minima are float16.

    Args:
        keys, values: floating `[H_kv, n, D]`, n >= 0.
        latent_dim: of latent rows, as of `KiviRows`; values are then the keys' first channels.

    Raises:
        ValueError: shapes differ, another width, or a value to quantise that is not finite in float16.
    """
    value_shape = (*keys.shape[:2], latent_dim or keys.shape[-1])
    if keys.ndim != 3 or values.shape != value_shape or not keys.is_floating_point():
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must be [H_kv, n, D]")
    num_kv_heads, num_rows, head_dim = keys.shape
    shapes = kivi_shapes(
        num_rows, num_kv_heads=num_kv_heads, head_dim=head_dim, bits=bits, is_latent=bool(latent_dim)
    )
    groups = num_rows // GROUP_TOKENS
    grouped = groups * GROUP_TOKENS
    shape = (num_kv_heads, groups, GROUP_TOKENS, head_dim)
    codes, scales = [], []
    to_quantise = [keys[:, :grouped].reshape(shape).transpose(2, 3)]
    if not latent_dim:
        to_quantise.append(values[:, :grouped].reshape(shape))
    for rows in to_quantise:
        row_codes, row_scales, minima = quantise_rows(rows, bits, half=True)
        packed = pack_value_rows(row_codes.flatten(0, 2), bits)
        codes.append(packed.view(num_kv_heads, groups, rows.shape[2] * packed.shape[1]))
        scales += [row_scales, minima]
    return KiviRows(
        bits=bits,
        codes=torch.cat(codes, dim=2).reshape(shapes[0]),
        scales=torch.cat(scales, dim=2).reshape(shapes[1]),
        keys=keys[:, grouped:].contiguous(),
        values=values[:, grouped:].contiguous(),
        latent_dim=latent_dim,
    )


def kivi_dequantise(rows: KiviRows) -> tuple[Tensor, Tensor]:
    """Return K and V `[H_kv, n, D]` in the unquantised rows' dtype; codes become `s code + min` in
    float32."""
    num_kv_heads, num_left, head_dim = rows.keys.shape
    grouped = rows.num_rows - num_left
    keys = torch.empty(num_kv_heads, grouped, head_dim, device=rows.codes.device)
    values = keys[:, :, : rows.latent_dim] if rows.latent_dim else torch.empty_like(keys)
    for start, *of_keys in key_tiles(rows):
        tile = dequantise_rows(*of_keys).transpose(2, 3).flatten(1, 2)
        keys[:, start : start + tile.shape[1]] = tile
    for start, *of_values in value_tiles(rows):
        tile = dequantise_rows(*of_values).flatten(1, 2)
        values[:, start : start + tile.shape[1]] = tile
    dtype = rows.keys.dtype
    return torch.cat([keys.to(dtype), rows.keys], dim=1), torch.cat([values.to(dtype), rows.values], dim=1)


def key_tiles(rows: KiviRows) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Iterate over tiles: the tile's first token; K codes `[H_kv, t, D, 32]`, their scales and minima
    `[H_kv, t, D]`, float32."""
    return _tiles(rows, rows.keys.shape[2], GROUP_TOKENS, 0, 0)


def value_tiles(rows: KiviRows) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Iterate over tiles: the tile's first token; V codes `[H_kv, t, 32, D]`, their scales and minima
    `[H_kv, t, 32]`, float32. Latent rows have none."""
    head_dim = rows.keys.shape[2]
    key_bytes = head_dim * value_row_bytes(rows.bits, GROUP_TOKENS)
    return iter(()) if rows.latent_dim else _tiles(rows, GROUP_TOKENS, head_dim, key_bytes, 2 * head_dim)


def _tiles(
    rows: KiviRows, num_rows: int, row_codes: int, first_byte: int, first_scale: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield tiles. Args: num_rows, row_codes: of a group; first_byte, first_scale: where they begin in it."""
    row_bytes = value_row_bytes(rows.bits, row_codes)
    octets = rows.codes[:, :, first_byte : first_byte + num_rows * row_bytes]
    headers = rows.scales[:, :, first_scale : first_scale + 2 * num_rows]
    for first in range(0, octets.shape[1], TILE_GROUPS):
        tile = octets[:, first : first + TILE_GROUPS]
        codes = unpack_value_rows(tile.reshape(-1, row_bytes), rows.bits, row_codes)
        scales, minima = torch.split(headers[:, first : first + TILE_GROUPS].float(), num_rows, dim=2)
        shape = (octets.shape[0], tile.shape[1], num_rows, row_codes)
        yield first * GROUP_TOKENS, codes.view(shape), scales, minima
