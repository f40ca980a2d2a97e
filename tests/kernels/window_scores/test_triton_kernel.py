"""The Triton kernels in the interpreter against the reference: odd sizes, groups, strided keys, poison."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.scores import window_scores_reference

from kvferry.kernels.column_sums import window_scores


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "group_size", "window", "num_tokens", "head_dim"),
    [
        (torch.float32, 2, 3, 7, 530, 64),
        (torch.float16, 1, 16, 16, 300, 128),
        (torch.bfloat16, 1, 1, 5, 33, 96),
        (torch.float32, 1, 2, 1, 1, 16),
        (torch.float32, 1, 2, 40, 40, 256),
        (torch.float16, 1, 16, 3, 50, 256),
    ],
)
def test_scores_equal_the_reference(
    dtype: torch.dtype, num_kv_heads: int, group_size: int, window: int, num_tokens: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    queries = torch.randn(num_kv_heads, group_size, window, head_dim, generator=generator).to(dtype)
    cache = torch.randn(num_kv_heads, num_tokens + 3, head_dim, generator=generator).to(dtype)
    cache[:, num_tokens:] = torch.nan
    scores = window_scores(queries, cache[:, :num_tokens], scaling=head_dim**-0.5)
    expected = window_scores_reference(queries, cache[:, :num_tokens], head_dim**-0.5)
    torch.testing.assert_close(scores, expected, rtol=2e-4, atol=1e-5)
