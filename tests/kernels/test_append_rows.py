"""Rows land where descriptors say, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from kvferry.kernels.split_attention import append_rows


@pytest.mark.parametrize("head_dim", [24, 96, 256])
def test_every_head_gets_its_row_and_empty_heads_none(head_dim: int) -> None:
    capacity = 5
    buffer = torch.full((3 * 2 * capacity * head_dim,), torch.nan)
    cache = buffer.view(3, 2, capacity, head_dim)
    lengths = [4, 0, 1]
    size = capacity * head_dim
    heads = torch.tensor([(2 * i * size, (2 * i + 1) * size, length) for i, length in enumerate(lengths)])
    keys, values = torch.randn(2, 3, 1, head_dim)
    append_rows(buffer, heads, keys, values)
    for i, length in enumerate(lengths):
        if length:
            assert torch.equal(cache[i, 0, length - 1], keys[i, 0])
            assert torch.equal(cache[i, 1, length - 1], values[i, 0])
            cache[i, :, length - 1] = torch.nan
    assert buffer.isnan().all()
