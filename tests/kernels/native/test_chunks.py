"""The C code of chunk scores against the equation: any strides, lengths and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.reference.scores import chunk_scores_reference, shared_chunk_scores_reference
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.chunk_scores import chunk_scores, native
from kvferry.kernels.native.library import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="this machine has no C compiler")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def make(
    group: int, num_queries: int, num_tokens: int, head_dim: int, heads: int = 2
) -> tuple[Tensor, Tensor]:
    """Queries and keys in the layout of a model's projections, between NaN."""
    generator = torch.Generator().manual_seed(num_tokens * 31 + num_queries)
    queries = torch.full((num_queries + 2, heads, group, head_dim), torch.nan)
    keys = torch.full((num_tokens + 2, heads, head_dim + 3), torch.nan)
    queries[1:-1] = 2 * torch.randn(num_queries, heads, group, head_dim, generator=generator)
    keys[1:-1, :, :head_dim] = torch.randn(num_tokens, heads, head_dim, generator=generator)
    return queries[1:-1].permute(1, 2, 0, 3), keys[1:-1, :, :head_dim].permute(1, 0, 2)


@given(
    group=st.integers(1, 7),
    num_tokens=st.integers(0, 130),
    chunk_tokens=st.integers(1, 90),
    head_dim=st.integers(1, 70),
    num_shared=st.none() | st.integers(1, 70),
    num_threads=st.integers(1, 3),
)
def test_scores_equal_the_equation(
    group: int, num_tokens: int, chunk_tokens: int, head_dim: int, num_shared: int | None, num_threads: int
) -> None:
    queries, keys = make(group, num_tokens if num_shared is None else num_shared, num_tokens, head_dim)
    torch.set_num_threads(num_threads)
    scores = native.chunk_scores(
        queries, keys, chunk_tokens=chunk_tokens, scaling=0.25, shared=num_shared is not None
    )
    reference = chunk_scores_reference if num_shared is None else shared_chunk_scores_reference
    torch.testing.assert_close(
        scores, reference(queries, keys, chunk_tokens, 0.25), atol=1e-5 * chunk_tokens, rtol=1e-5
    )


def test_the_number_of_threads_changes_no_bit() -> None:
    queries, keys = make(3, 301, 301, 24)
    found = []
    with dispatch.recording() as calls:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(chunk_scores(queries, keys, chunk_tokens=32, scaling=0.2))
    assert calls == {("chunk_scores", "native"): 3}
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_key_that_is_not_a_number_spoils_its_own_chunk_only() -> None:
    queries, keys = make(3, 97, 97, 24)
    keys[1, 40, 5] = torch.nan
    scores = chunk_scores(queries, keys, chunk_tokens=32, scaling=0.2)
    spoilt = torch.zeros(2, 97, dtype=torch.bool)
    spoilt[1, 32:64] = True
    assert torch.equal(scores.isnan(), spoilt)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    queries, keys = (tensor.to(dtype) for tensor in make(2, 40, 40, 16))
    scores = chunk_scores(queries, keys, chunk_tokens=16, scaling=0.25)
    expected = chunk_scores_reference(queries.float(), keys.float(), 16, 0.25)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_calls_are_counted_and_mode_torch_has_none() -> None:
    queries, keys = make(2, 40, 40, 16)
    with dispatch.recording() as calls:
        first = chunk_scores(queries, keys, chunk_tokens=16, scaling=0.25)
    with dispatch.torch_only(), dispatch.recording() as others:
        second = chunk_scores(queries, keys, chunk_tokens=16, scaling=0.25)
    assert calls == {("chunk_scores", "native"): 1}
    assert others == {("chunk_scores", "torch"): 1}
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
