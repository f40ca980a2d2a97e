"""The chunked path against the whole matrix, at every awkward length, history and chunk size."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.scores import column_sums_reference
from torch import Tensor

from kvferry.kernels.column_sums import MAX_CHUNK_QUERIES, column_sums, column_sums_torch


def make(
    num_kv_heads: int, group: int, num_queries: int, num_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens * 31 + num_queries)
    queries = torch.randn(num_kv_heads, group, num_queries, 16, generator=generator).to(dtype)
    keys = torch.randn(num_kv_heads, num_tokens, 16, generator=generator).to(dtype)
    return queries, keys


def assert_close(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    # a column sums up to T probabilities: 1e-5 relative is a few roundings of float32 each
    torch.testing.assert_close(result[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result[1], expected[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("num_queries", "num_tokens"),
    [(1, 1), (2, 2), (97, 97), (MAX_CHUNK_QUERIES + 1,) * 2, (1, 61), (31, 509)],
)
def test_sums_and_variances_equal_the_whole_matrix(group: int, num_queries: int, num_tokens: int) -> None:
    queries, keys = make(2, group, num_queries, num_tokens)
    result = column_sums(queries, keys, scaling=0.25)
    assert result.sums.dtype == result.variances.dtype == torch.float32
    assert_close(result, column_sums_reference(queries, keys, 0.25))


def test_reference_equals_a_softmax_written_query_by_query() -> None:
    queries, keys = make(2, 3, 5, 13)
    expected = torch.zeros(2, 3, 13)
    for head in range(2):
        for group in range(3):
            for i in range(5):
                visible = 13 - 5 + i + 1
                logits = keys[head, :visible] @ queries[head, group, i] * 0.5
                expected[head, group, :visible] += torch.softmax(logits, dim=0)
    sums, variances = column_sums_reference(queries, keys, 0.5)
    torch.testing.assert_close(sums, expected.sum(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(variances, expected.var(-1, correction=0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_logits", [1, 500, 4000, 10**6])
@pytest.mark.parametrize("num_queries", [61, 23])
def test_chunking_changes_nothing(max_logits: int, num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kernels.column_sums.MAX_LOGITS", max_logits)
    queries, keys = make(2, 4, num_queries, 61)
    assert_close(column_sums_torch(queries, keys, 0.25), column_sums_reference(queries, keys, 0.25))


def test_the_same_call_gives_the_same_bits() -> None:
    queries, keys = make(2, 4, 300, 300)
    first, second = (column_sums(queries, keys, scaling=0.25) for _ in range(2))
    assert torch.equal(first.sums, second.sums)
    assert torch.equal(first.variances, second.variances)


def test_each_head_sums_to_the_number_of_queries() -> None:
    queries, keys = make(3, 4, 53, 53)
    sums = column_sums(queries, keys, scaling=0.25).sums.sum(dim=1)
    torch.testing.assert_close(sums, torch.full((3,), 4 * 53.0), atol=1e-3, rtol=0)


def test_attention_to_one_sink_varies_more_than_attention_to_everything() -> None:
    keys = torch.zeros(2, 64, 8)
    keys[0, 0, 0] = 40.0
    queries = torch.zeros(2, 1, 64, 8)
    queries[..., 0] = 1.0
    sink, even = column_sums(queries, keys, scaling=1.0).variances[:, 0].tolist()
    # every query of head 0 gives all it has to the first column: T of T there, 0 elsewhere
    assert sink == pytest.approx(64**2 / 64 - 1, rel=1e-4)
    assert even < sink / 10


def test_logits_beyond_the_range_of_exp_stay_finite() -> None:
    queries, keys = make(1, 2, 40, 40)
    result = column_sums(queries * 1e4, keys * 1e4, scaling=1.0)
    assert result.sums.isfinite().all()
    torch.testing.assert_close(result.sums.sum(), torch.tensor(80.0), atol=1e-3, rtol=0)


def test_half_precision_inputs_are_summed_in_float32() -> None:
    queries, keys = make(2, 2, 37, 37, torch.bfloat16)
    expected = column_sums_reference(queries.float(), keys.float(), 0.25)
    assert_close(column_sums(queries, keys, scaling=0.25), expected)


def test_inputs_are_left_as_they_were_and_may_be_strided() -> None:
    queries, keys = make(2, 2, 40, 41)
    strided = keys.transpose(0, 1).contiguous().transpose(0, 1)
    before = queries.clone(), strided.clone()
    result = column_sums(queries[:, :, 3:], strided, scaling=0.25)
    assert torch.equal(queries, before[0])
    assert torch.equal(strided, before[1])
    assert_close(result, column_sums_reference(queries[:, :, 3:], keys, 0.25))


@pytest.mark.parametrize(
    ("queries", "keys", "named"),
    [
        (torch.zeros(2, 1, 5, 4), torch.zeros(2, 4, 4), "5 queries"),
        (torch.zeros(2, 1, 0, 4), torch.zeros(2, 4, 4), "0 queries"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(3, 4, 4), r"\(3, 4, 4\)"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(2, 4, 8), r"\(2, 4, 8\)"),
        (torch.zeros(2, 1, 4), torch.zeros(2, 4, 4), r"\(2, 1, 4\)"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(2, 4, 4, dtype=torch.float16), "float16"),
    ],
)
def test_bad_shapes_are_refused_by_name(queries: Tensor, keys: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        column_sums(queries, keys, scaling=1.0)
