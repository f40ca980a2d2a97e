"""KIVI: uniform quantisation of K per channel in groups of tokens, of V per token; attention on the codes.

Prefill quantises kept rows; decode attends on the packed bytes as they came, a tile of groups at a time, or
dequantises them on arrival where only the wire is quantised. What is left over after the last whole group
stays as rows. Does not choose rows or widths. `reference.py` is the same maths in plain loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.dispatch import path_for
from kvferry.kernels.kivi import torch_path
from kvferry.kernels.packed.value_rows import value_row_bytes
from kvferry.kernels.quantise import WIDTHS

GROUP_TOKENS = torch_path.GROUP_TOKENS
"""Tokens that share one scale of a K channel (Liu et al. 2024, group size 32)."""


@dataclass(frozen=True, kw_only=True)
class KiviRows:
    """Rows of one layer, n = 32 g + r of them per KV head, r < 32.

    Attributes:
        bits: b, 2, 4 or 8.
        codes: uint8 `[H_kv, g, D * 4 b + 32 * ceil(D b / 8)]`: of each group the K codes of channel 0, 1, ...
            and then the V codes of token 0, 1, ..., each packed as `kernels.packed.value_rows` packs a row.
        scales: float32 `[H_kv, g, 2 D + 64]`: K scales, K minima, V scales, V minima.
        keys, values: `[H_kv, r, D]`, the last r rows as they are.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        num_kv_heads, num_left, head_dim = self.keys.shape
        num_groups = self.codes.shape[1] if self.codes.ndim == 3 else 0
        codes, scales, left = kivi_shapes(
            num_groups * GROUP_TOKENS + num_left,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bits=self.bits,
        )
        shapes = tuple(tuple(t.shape) for t in (self.codes, self.scales, self.keys, self.values))
        if shapes != (codes, scales, left, left):
            raise ValueError(
                f"codes, scales, keys, values are {shapes}; they must be {(codes, scales, left)}"
            )

    @property
    def num_rows(self) -> int:
        """n."""
        return self.codes.shape[1] * GROUP_TOKENS + self.keys.shape[1]


def kivi_shapes(
    num_rows: int, *, num_kv_heads: int, head_dim: int, bits: int
) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of `KiviRows`: codes, scales, and keys or values.

    Raises: ValueError: another width.
    """
    if bits not in WIDTHS:
        raise ValueError(f"bits is {bits}; it must be one of {WIDTHS}")
    groups, left = divmod(num_rows, GROUP_TOKENS)
    key_bytes = head_dim * value_row_bytes(bits, GROUP_TOKENS)
    value_bytes = GROUP_TOKENS * value_row_bytes(bits, head_dim)
    return (
        (num_kv_heads, groups, key_bytes + value_bytes),
        (num_kv_heads, groups, 2 * (head_dim + GROUP_TOKENS)),
        (num_kv_heads, left, head_dim),
    )


def kivi_quantise(keys: Tensor, values: Tensor, bits: int) -> KiviRows:
    """Quantise whole groups of rows and keep the rest.

    Deviation: KIVI leaves up to 128 of the latest tokens in full precision and quantises them as they fill
    up; here those beyond the last whole group stay, n mod 32.

    Args: keys, values: floating `[H_kv, n, D]`, n >= 0.

    Raises:
        ValueError: shapes differ, another width, or a value to quantise that is not finite.
    """
    if keys.ndim != 3 or keys.shape != values.shape or not keys.is_floating_point():
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must be [H_kv, n, D]")
    num_kv_heads, num_rows, head_dim = keys.shape
    shapes = kivi_shapes(num_rows, num_kv_heads=num_kv_heads, head_dim=head_dim, bits=bits)
    grouped = num_rows // GROUP_TOKENS * GROUP_TOKENS
    codes, scales = torch_path.quantise(keys[:, :grouped], values[:, :grouped], bits)
    return KiviRows(
        bits=bits,
        codes=codes.reshape(shapes[0]),
        scales=scales.reshape(shapes[1]),
        keys=keys[:, grouped:].contiguous(),
        values=values[:, grouped:].contiguous(),
    )


def kivi_dequantise(rows: KiviRows) -> tuple[Tensor, Tensor]:
    """K and V `[H_kv, n, D]` in the dtype of the rows left over; codes become `s code + min` first."""
    keys, values = torch_path.dequantise(rows.codes, rows.scales, rows.bits)
    dtype = rows.keys.dtype
    return torch.cat([keys.to(dtype), rows.keys], dim=1), torch.cat([values.to(dtype), rows.values], dim=1)


def kivi_decode(
    queries: Tensor, rows: KiviRows, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """Softmax attention of one new token over quantised rows and the new tokens, itself included.

    Args:
        queries: `[H_kv, G, D]`.
        new_keys, new_values: `[H_kv, m, D]`, m >= 0, at any strides.
        scaling: the softmax scale.

    Returns: `[H_kv, G, D]` in the queries' dtype; accumulated in float32.

    Raises: ValueError: shapes do not fit together, or there is nothing to attend to.
    """
    expected = (queries.shape[0], new_keys.shape[1], queries.shape[2])
    if queries.ndim != 3 or new_keys.shape != expected or new_values.shape != expected:
        raise ValueError(
            f"queries {tuple(queries.shape)}, new_keys {tuple(new_keys.shape)} and new_values "
            f"{tuple(new_values.shape)} must be [H_kv, G, D], [H_kv, m, D] and [H_kv, m, D]"
        )
    if (rows.keys.shape[0], rows.keys.shape[2]) != (queries.shape[0], queries.shape[2]):
        raise ValueError(f"rows of {tuple(rows.keys.shape)} do not fit queries {tuple(queries.shape)}")
    if rows.num_rows + new_keys.shape[1] == 0:
        raise ValueError("there is neither a quantised row nor a new one; there must be one to attend to")
    left_keys = torch.cat([rows.keys, new_keys], dim=1)
    left_values = torch.cat([rows.values, new_values], dim=1)
    path_for("kivi", queries.device)
    return torch_path.decode(
        queries, rows.codes, rows.scales, rows.bits, left_keys, left_values, scaling=scaling
    )
