"""Ragged attention head by head in float32, written like the equation. For tests only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.reference import dense_decode


def ragged_decode(
    queries: Tensor,
    head_rows: Sequence[int],
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """As `kernels.ragged_decode.ragged_decode`: dense attention of each head alone. Returns float32."""
    outputs, start = [], 0
    for head, count in enumerate(head_rows):
        rows = slice(start, start + count)
        outputs.append(
            dense_decode(
                queries[head : head + 1],
                torch.cat([keys[rows], new_keys[head]])[None],
                torch.cat([values[rows], new_values[head]])[None],
                scaling=scaling,
            )
        )
        start += count
    return torch.cat(outputs)
