"""The Triton kernel in the interpreter against the reference: a short last chunk, own and shared queries."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.scores import chunk_scores_reference, shared_chunk_scores_reference

from kvferry.kernels.chunk_scores import chunk_scores


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "group_size", "num_tokens", "chunk_tokens", "head_dim"),
    [
        (torch.float32, 3, 310, 300, 32),
        (torch.float16, 1, 90, 40, 128),
        (torch.bfloat16, 2, 1, 64, 64),
        (torch.float32, 1, 0, 4, 16),
        (torch.float16, 16, 21, 13, 96),
        (torch.bfloat16, 1, 35, 20, 256),
    ],
)
def test_scores_equal_the_reference(
    dtype: torch.dtype, group_size: int, num_tokens: int, chunk_tokens: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    queries = torch.randn(2, group_size, num_tokens, head_dim, generator=generator).to(dtype)
    cache = torch.randn(2, num_tokens + 1, head_dim, generator=generator).to(dtype)
    cache[:, num_tokens:] = torch.nan
    keys = cache[:, :num_tokens]
    scores = chunk_scores(queries, keys, chunk_tokens=chunk_tokens, scaling=head_dim**-0.5)
    expected = chunk_scores_reference(queries, keys, chunk_tokens, head_dim**-0.5)
    torch.testing.assert_close(scores, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreter")
def test_scores_of_shared_queries_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys = (
        torch.randn(2, 2, 17, 32, generator=generator),
        torch.randn(2, 50, 32, generator=generator),
    )
    scores = chunk_scores(queries, keys, chunk_tokens=20, scaling=0.2, shared=True)
    expected = shared_chunk_scores_reference(queries, keys, 20, 0.2)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("shared", [False, True])
def test_logits_beyond_the_range_of_exp_stay_finite(shared: bool) -> None:
    """As of `column_sums`: logits of 1e9 round anew, and none counts as more than 1; those of 1e5 are exact
    enough for the scores to be right."""
    generator = torch.Generator().manual_seed(2)
    num_queries = 17 if shared else 50
    queries = torch.randn(1, 2, num_queries, 32, generator=generator)
    keys = torch.randn(1, 50, 32, generator=generator)
    reference = shared_chunk_scores_reference if shared else chunk_scores_reference
    for scale in (60.0, 1e4):
        scores = chunk_scores(scale * queries, scale * keys, chunk_tokens=20, scaling=1.0, shared=shared)
        assert scores.isfinite().all()
        assert (scores >= 0).all()
        expected = reference(scale * queries, scale * keys, 20, 1.0)
        assert scores.sum() < 1.001 * expected.sum()
        if scale < 1e4:
            torch.testing.assert_close(scores, expected, rtol=5e-2, atol=5e-2)
