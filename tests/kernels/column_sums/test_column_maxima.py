"""The most attention that a token gets, chunk by chunk, against softmaxes written query by query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvferry.kernels.column_sums import MAX_CHUNK_QUERIES, column_maxima


def make(num_kv_heads: int, group: int, num_queries: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens * 31 + num_queries)
    queries = torch.randn(num_kv_heads, group, num_queries, 16, generator=generator)
    return queries, torch.randn(num_kv_heads, num_tokens, 16, generator=generator)


def plain_maxima(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    num_kv_heads, group, num_queries, _ = queries.shape
    num_tokens = keys.shape[1]
    maxima = torch.zeros(num_kv_heads, num_tokens)
    for head in range(num_kv_heads):
        for member in range(group):
            for i in range(num_queries):
                visible = num_tokens - num_queries + i + 1
                weights = torch.softmax(keys[head, :visible] @ queries[head, member, i] * scaling, dim=0)
                for t in range(visible):
                    maxima[head, t] = max(float(maxima[head, t]), float(weights[t]))
    return maxima


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("num_queries", "num_tokens"), [(1, 1), (2, 2), (17, 17), (1, 61), (13, 59)])
def test_maxima_are_those_of_every_query(num_queries: int, num_tokens: int, group: int) -> None:
    queries, keys = make(2, group, num_queries, num_tokens)
    found = column_maxima(queries, keys, scaling=0.25)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, plain_maxima(queries, keys, 0.25), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("max_logits", [1, 500, 4000])
def test_chunking_changes_nothing(max_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys = make(2, 4, 23, 61)
    monkeypatch.setattr("kvferry.kernels.column_sums.MAX_LOGITS", max_logits)
    found = column_maxima(queries, keys, scaling=0.25)
    torch.testing.assert_close(found, plain_maxima(queries, keys, 0.25), atol=1e-6, rtol=1e-5)


def test_more_queries_than_a_chunk_has() -> None:
    queries, keys = make(1, 1, MAX_CHUNK_QUERIES + 3, MAX_CHUNK_QUERIES + 8)
    keys[0, 2] = 9 * queries[0, 0, -1]  # only the last chunk's last query attends to it so much
    found = column_maxima(queries, keys, scaling=0.25)
    assert found[0, 2] > 0.99
    torch.testing.assert_close(found, plain_maxima(queries, keys, 0.25), atol=1e-6, rtol=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    queries, keys = (tensor.to(torch.bfloat16) for tensor in make(2, 2, 9, 37))
    expected = plain_maxima(queries.float(), keys.float(), 0.25)
    torch.testing.assert_close(column_maxima(queries, keys, scaling=0.25), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "named"),
    [
        (torch.zeros(2, 1, 5, 4), torch.zeros(2, 4, 4), "is 5; it must be 1 to 4"),
        (torch.zeros(2, 1, 0, 4), torch.zeros(2, 4, 4), "is 0; it must be 1 to 4"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(3, 4, 4), r"\(3, 4, 4\)"),
        (torch.zeros(2, 1, 1, 4), torch.zeros(2, 4, 4, dtype=torch.float16), "float16"),
    ],
)
def test_bad_shapes_are_refused_by_name(queries: Tensor, keys: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        column_maxima(queries, keys, scaling=1.0)
