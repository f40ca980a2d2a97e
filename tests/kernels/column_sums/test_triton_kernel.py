"""The Triton kernels in the interpreter against the reference: sums, variances, history."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.scores import column_sums_reference

from kvferry.kernels.column_sums import column_sums, window_scores


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


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("num_queries", [40, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_beyond_the_range_of_exp_stay_finite(dtype: torch.dtype, num_queries: int) -> None:
    """Logits are computed twice, and those of 1e9 are multiples of 64: one that is rounded up the second time
    must count as 1, not as e^64. One that is rounded down counts as nothing."""
    generator = torch.Generator().manual_seed(3)
    queries = (1e4 * torch.randn(1, 2, num_queries, 16, generator=generator)).to(dtype)
    keys = (1e4 * torch.randn(1, 300, 16, generator=generator)).to(dtype)
    sums, variances = column_sums(queries, keys, scaling=1.0)
    assert variances.isfinite().all()
    for found in (sums, window_scores(queries, keys, scaling=1.0)):
        assert found.isfinite().all()
        assert (found >= 0).all()
        assert num_queries < float(found.sum()) < 2 * num_queries + 1e-3


@pytest.mark.usefixtures("interpreter")
def test_large_logits_give_each_querys_share_to_its_best_token() -> None:
    """Of 1e5, which are multiples of 1/128."""
    generator = torch.Generator().manual_seed(4)
    queries = 100 * torch.randn(1, 2, 20, 16, generator=generator)
    keys = 100 * torch.randn(1, 300, 16, generator=generator)
    sums, _ = column_sums(queries, keys, scaling=1.0)
    expected, _ = column_sums_reference(queries, keys, 1.0)
    torch.testing.assert_close(sums, expected, rtol=5e-2, atol=5e-2)
