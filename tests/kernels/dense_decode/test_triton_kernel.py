"""The Triton kernel in the interpreter against the reference: shapes, raggedness, pages, poison."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.dense import dense_decode as reference
from torch import Tensor

from kvferry.kernels.dense_decode import dense_decode, triton_kernel
from kvferry.kernels.descriptors import split_workspace, uniform_heads

# float16 inputs are exact in the reference too: what is left is the rounding of probabilities and of the
# output. The interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "group_size", "length", "head_dim"),
    [
        (torch.float32, 2, 4, 600, 64),
        (torch.float16, 1, 16, 257, 128),
        (torch.bfloat16, 1, 3, 520, 96),
        (torch.float16, 3, 1, 1, 64),
        (torch.bfloat16, 1, 8, 33, 256),
        (torch.float32, 1, 2, 7, 16),
        (torch.float16, 1, 16, 75, 256),
        (torch.float32, 2, 16, 700, 256),  # several splits of wide heads
        (torch.float16, 2, 1, 41, 96),
    ],
)
def test_attention_equals_the_reference(
    dtype: torch.dtype, num_kv_heads: int, group_size: int, length: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(length)
    queries = torch.randn(num_kv_heads, group_size, head_dim, generator=generator).to(dtype)
    # a slice of a longer cache, whose unused rows are poison
    keys, values = torch.randn(2, num_kv_heads, length + 3, head_dim, generator=generator).to(dtype)
    keys[:, length:] = values[:, length:] = torch.nan
    keys, values = keys[:, :length], values[:, :length]
    result = dense_decode(queries, keys, values, scaling=head_dim**-0.5)
    assert result.dtype == dtype
    expected = reference(queries, keys, values, scaling=head_dim**-0.5)
    assert relative_error(result, expected) < TOLERANCE[dtype]


def test_a_batch_of_ragged_sequences_in_one_arena_is_one_launch() -> None:
    num_kv_heads, group_size, head_dim, lengths = 2, 3, 64, (700, 0, 1, 256)
    generator = torch.Generator().manual_seed(0)
    arena = torch.full((2 * num_kv_heads * 1000 * head_dim,), torch.nan)
    heads, expected, offset = [], [], 0
    queries = torch.randn(len(lengths), num_kv_heads, group_size, head_dim, generator=generator)
    for sequence, length in enumerate(lengths):
        for h in range(num_kv_heads):
            keys, values = torch.randn(2, length, head_dim, generator=generator)
            place = offset + (length + 1) * head_dim
            arena[offset : offset + length * head_dim] = keys.flatten()
            arena[place : place + length * head_dim] = values.flatten()
            heads.append((offset, place, length))
            offset = place + (length + 1) * head_dim
            one = queries[sequence, h][None]
            expected.append(
                reference(one, keys[None], values[None], scaling=0.125)[0]
                if length
                else torch.zeros_like(one[0])
            )
    output = torch.full_like(queries, torch.nan)
    workspace = split_workspace(output, 24)
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    triton_kernel.dense_decode_batch(
        queries,
        arena,
        arena,
        torch.tensor(heads),
        row_stride=head_dim,
        scaling=0.125,
        workspace=workspace,
        output=output,
    )
    torch.testing.assert_close(output, torch.stack(expected).view_as(output), rtol=1e-5, atol=1e-6)
    assert not workspace.counters.any()


def test_more_splits_than_are_combined_at_once_are_all_counted() -> None:
    generator = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, 1, 256 * 19 + 5, 16, generator=generator)
    queries = 2 * torch.randn(1, 1, 2, 16, generator=generator)
    output = torch.full_like(queries, torch.nan)
    triton_kernel.dense_decode_batch(
        queries,
        keys,
        values,
        uniform_heads(keys, values),
        row_stride=16,
        scaling=0.5,
        workspace=split_workspace(output, 25),
        output=output,
    )
    torch.testing.assert_close(output[0], reference(queries[0], keys, values, scaling=0.5))
