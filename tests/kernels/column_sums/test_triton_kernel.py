"""The Triton kernels in the interpreter against the reference: sums, variances, history."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.scores import column_sums_reference

from kvferry.kernels.column_sums import column_sums


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "group_size", "num_queries", "num_tokens", "head_dim"),
    [
        (torch.float32, 3, 300, 300, 32),
        (torch.float16, 1, 150, 290, 64),
        (torch.float32, 2, 1, 1, 16),
        (torch.bfloat16, 16, 5, 33, 96),
        (torch.float16, 1, 7, 19, 256),
    ],
)
def test_sums_and_variances_equal_the_reference(
    dtype: torch.dtype, group_size: int, num_queries: int, num_tokens: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    queries = torch.randn(2, group_size, num_queries, head_dim, generator=generator).to(dtype)
    keys = torch.randn(2, num_tokens, head_dim, generator=generator).to(dtype)
    sums, variances = column_sums(queries, keys, scaling=head_dim**-0.5)
    expected_sums, expected_variances = column_sums_reference(queries, keys, head_dim**-0.5)
    torch.testing.assert_close(sums, expected_sums, rtol=2e-4, atol=1e-4)
    torch.testing.assert_close(variances, expected_variances, rtol=1e-3, atol=1e-6)
