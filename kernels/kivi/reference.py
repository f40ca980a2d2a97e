"""KIVI value by value (Liu et al. 2024, section 3.3), written like the paper. For tests only.

Legend: H_kv KV heads, n rows, D head_dim.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.quantise.reference import quantise_row

GROUP_TOKENS = 32


def rounded(keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """K and V float32 `[H_kv, n, D]` after quantisation and back: K per channel in groups of 32 tokens, V per
    token; rows beyond the last whole group as they are."""
    new_keys, new_values = keys.float().clone(), values.float().clone()
    num_kv_heads, num_rows, head_dim = keys.shape
    for head in range(num_kv_heads):
        for start in range(0, num_rows - num_rows % GROUP_TOKENS, GROUP_TOKENS):
            group = slice(start, start + GROUP_TOKENS)
            for channel in range(head_dim):
                new_keys[head, group, channel] = _rounded_row(keys[head, group, channel], bits)
            for token in range(start, start + GROUP_TOKENS):
                new_values[head, token] = _rounded_row(values[head, token], bits)
    return new_keys, new_values


def _rounded_row(row: Tensor, bits: int) -> Tensor:
    codes, scale, minimum = quantise_row(row, bits)
    return row.new_tensor([scale * code + minimum for code in codes]).float()
