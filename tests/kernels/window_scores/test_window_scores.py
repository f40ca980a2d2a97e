"""The chunked path against the equation, at every awkward length and chunk size."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.scores import window_scores_reference

from kvferry.kernels.column_sums import column_sums_torch, window_scores


def make(num_kv_heads: int, group: int, window: int, num_tokens: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(num_tokens * 31 + window)
    queries = torch.randn(num_kv_heads, group, window, 16, generator=generator).to(dtype)
    keys = torch.randn(num_kv_heads, num_tokens, 16, generator=generator).to(dtype)
    return queries, keys


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("window", "num_tokens"), [(1, 1), (1, 2), (31, 31), (32, 33), (7, 97), (32, 509)])
def test_scores_equal_the_reference(group: int, window: int, num_tokens: int) -> None:
    queries, keys = make(2, group, window, num_tokens)
    scores = window_scores(queries, keys, scaling=0.25)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, window_scores_reference(queries, keys, 0.25), atol=1e-5, rtol=1e-5)


def test_reference_equals_a_softmax_written_query_by_query() -> None:
    queries, keys = make(2, 3, 5, 13)
    expected = torch.zeros(2, 13)
    for head in range(2):
        for group in range(3):
            for i in range(5):
                visible = 13 - 5 + i + 1
                logits = keys[head, :visible] @ queries[head, group, i] * 0.5
                expected[head, :visible] += torch.softmax(logits, dim=0)
    torch.testing.assert_close(window_scores_reference(queries, keys, 0.5), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_logits", [1, 100, 1000, 10**6])
def test_chunking_changes_nothing(max_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kernels.column_sums.MAX_LOGITS", max_logits)
    queries, keys = make(2, 4, 9, 61)
    scores = column_sums_torch(queries, keys, 0.25).sums
    torch.testing.assert_close(scores, window_scores_reference(queries, keys, 0.25), atol=1e-5, rtol=1e-5)


def test_each_head_sums_to_the_number_of_queries() -> None:
    queries, keys = make(3, 4, 8, 53)
    sums = window_scores(queries, keys, scaling=0.25).sum(dim=1)
    torch.testing.assert_close(sums, torch.full((3,), 32.0), atol=1e-4, rtol=0)


def test_tokens_in_a_querys_future_get_nothing_from_it() -> None:
    queries, keys = make(1, 1, 3, 3)
    keys[:, 2] *= 1000
    # Only the last query sees the last token, so its column sums to at most one.
    assert window_scores(queries, keys, scaling=1.0)[0, 2] <= 1.0


def test_half_precision_inputs_are_scored_in_float32() -> None:
    queries, keys = make(2, 2, 4, 37, torch.bfloat16)
    expected = window_scores_reference(queries.float(), keys.float(), 0.25)
    torch.testing.assert_close(window_scores(queries, keys, scaling=0.25), expected, atol=1e-5, rtol=1e-5)


def test_non_contiguous_views_are_accepted() -> None:
    queries, keys = make(2, 2, 40, 41)
    strided = keys.transpose(0, 1).contiguous().transpose(0, 1)
    scores = window_scores(queries[:, :, -7:], strided, scaling=0.25)
    expected = window_scores_reference(queries[:, :, -7:], keys, 0.25)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "named"),
    [
        (torch.zeros(2, 1, 5, 4), torch.zeros(2, 4, 4), "window.s queries is 5"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(3, 4, 4), r"\(3, 4, 4\)"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(2, 4, 8), r"\(2, 4, 8\)"),
        (torch.zeros(2, 1, 4), torch.zeros(2, 4, 4), r"\(2, 1, 4\)"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(2, 4, 4, dtype=torch.float16), "float16"),
        (torch.zeros(2, 1, 0, 4), torch.zeros(2, 4, 4), "window.s queries is 0"),
    ],
)
def test_bad_shapes_are_refused_by_name(queries: torch.Tensor, keys: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        window_scores(queries, keys, scaling=1.0)
