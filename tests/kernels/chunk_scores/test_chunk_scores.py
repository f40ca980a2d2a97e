"""The batched paths against the equation, at every awkward length and chunk size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from kvtest.reference.scores import chunk_scores_reference, shared_chunk_scores_reference
from torch import Tensor

from kvferry.kernels.chunk_scores import chunk_scores, chunk_scores_torch, shared_chunk_scores_torch
from kvferry.kernels.dispatch import torch_only

shared_chunk_scores = partial(chunk_scores, shared=True)
Context = Callable[[], AbstractContextManager[None]]


def make(group: int, num_queries: int, num_tokens: int, num_kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens * 31 + num_queries)
    queries = torch.randn(num_kv_heads, group, num_queries, 16, generator=generator)
    return queries, torch.randn(num_kv_heads, num_tokens, 16, generator=generator)


@pytest.mark.parametrize("context", [nullcontext, torch_only])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens"), [(0, 4), (1, 1), (1, 9), (7, 1), (8, 8), (9, 8), (97, 32), (301, 256)]
)
def test_scores_equal_the_reference(group: int, num_tokens: int, chunk_tokens: int, context: Context) -> None:
    queries, keys = make(group, num_tokens, num_tokens)
    with context():
        scores = chunk_scores(queries, keys, chunk_tokens=chunk_tokens, scaling=0.25)
    assert scores.dtype == torch.float32
    expected = chunk_scores_reference(queries, keys, chunk_tokens, 0.25)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("context", [nullcontext, torch_only])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("num_queries", "num_tokens", "chunk_tokens"), [(1, 0, 4), (1, 1, 1), (1, 9, 8), (5, 97, 32), (40, 31, 8)]
)
def test_shared_scores_equal_the_reference(
    group: int, num_queries: int, num_tokens: int, chunk_tokens: int, context: Context
) -> None:
    queries, keys = make(group, num_queries, num_tokens)
    with context():
        scores = shared_chunk_scores(queries, keys, chunk_tokens=chunk_tokens, scaling=0.25)
    assert scores.dtype == torch.float32
    expected = shared_chunk_scores_reference(queries, keys, chunk_tokens, 0.25)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_references_equal_softmaxes_written_query_by_query() -> None:
    queries, keys = make(3, 13, 13)
    own, shared = torch.zeros(2, 13), torch.zeros(2, 13)
    for head in range(2):
        for group in range(3):
            for begin, end in ((0, 5), (5, 10), (10, 13)):
                for i in range(13):
                    column = torch.softmax(keys[head, begin:end] @ queries[head, group, i] * 0.5, dim=0)
                    shared[head, begin:end] += column * (end - begin) / 13 / 3
                    if begin <= i < end:
                        own[head, begin:end] += column / 3
    torch.testing.assert_close(chunk_scores_reference(queries, keys, 5, 0.5), own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        shared_chunk_scores_reference(queries, keys, 5, 0.5), shared, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("max_logits", [1, 300, 5000, 10**6])
def test_the_bound_on_logits_changes_nothing(max_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kernels.chunk_scores.MAX_LOGITS", max_logits)
    queries, keys = make(4, 61, 61)
    torch.testing.assert_close(
        chunk_scores_torch(queries, keys, 8, 0.25),
        chunk_scores_reference(queries, keys, 8, 0.25),
        atol=1e-5,
        rtol=1e-5,
    )
    torch.testing.assert_close(
        shared_chunk_scores_torch(queries[:, :, :9], keys, 8, 0.25),
        shared_chunk_scores_reference(queries[:, :, :9], keys, 8, 0.25),
        atol=1e-5,
        rtol=1e-5,
    )


def test_each_chunk_sums_to_its_length_the_short_one_too() -> None:
    queries, keys = make(4, 53, 53)
    for scores in (
        chunk_scores(queries, keys, chunk_tokens=16, scaling=0.25),
        shared_chunk_scores(queries[:, :, :3], keys, chunk_tokens=16, scaling=0.25),
    ):
        sums = torch.stack([chunk.sum(dim=1) for chunk in scores.split(16, dim=1)], dim=1)
        torch.testing.assert_close(sums, torch.tensor([[16.0, 16, 16, 5]] * 2), atol=1e-4, rtol=0)


def test_half_precision_inputs_are_scored_in_float32_from_any_strides() -> None:
    queries, keys = make(2, 37, 37)
    queries, keys = queries.bfloat16(), keys.bfloat16().transpose(0, 1).contiguous().transpose(0, 1)
    expected = chunk_scores_reference(queries.float(), keys.float(), 8, 0.25)
    scores = chunk_scores(queries, keys, chunk_tokens=8, scaling=0.25)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "chunk_tokens", "named"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4), 0, "chunk_tokens is 0"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(3, 4, 4), 2, r"\(3, 4, 4\)"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 8), 2, r"\(2, 4, 8\)"),
        (torch.zeros(2, 4, 4), torch.zeros(2, 4, 4), 2, "expected"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.float16), 2, "float16"),
    ],
)
def test_bad_shapes_are_refused_by_name(queries: Tensor, keys: Tensor, chunk_tokens: int, named: str) -> None:
    for function in (chunk_scores, shared_chunk_scores):
        with pytest.raises(ValueError, match=named):
            function(queries, keys, chunk_tokens=chunk_tokens, scaling=1.0)


def test_own_queries_must_be_as_many_as_keys_and_shared_ones_at_least_one() -> None:
    with pytest.raises(ValueError, match="3 queries and 4 keys"):
        chunk_scores(torch.zeros(2, 1, 3, 4), torch.zeros(2, 4, 4), chunk_tokens=2, scaling=1.0)
    with pytest.raises(ValueError, match="0 queries"):
        shared_chunk_scores(torch.zeros(2, 1, 0, 4), torch.zeros(2, 4, 4), chunk_tokens=2, scaling=1.0)
