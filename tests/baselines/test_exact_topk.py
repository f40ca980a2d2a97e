"""Exact top-k attention agrees with the plain reference up to ties, and reads nothing beyond its length."""

import pytest
import torch
from kvtest.reference import sparse as reference

from kvferry.baselines.exact_topk import ExactTopK, token_scores
from kvferry.kernels.torch_attention import top_tokens
from kvferry.shared.compression.attention import CacheView

NAN = float("nan")


def make_cache(length, capacity, *, heads=2, dim=12, dtype=torch.float32, seed=0):
    """Rows in use are random, the others NaN."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((2, heads, capacity, dim), NAN, dtype=dtype)
    cache[:, :, :length] = torch.randn(2, heads, length, dim, generator=generator).to(dtype)
    return cache[0], cache[1]


def make_queries(group_size, *, dim=12, dtype=torch.float32):
    return torch.randn(2, group_size, dim, generator=torch.Generator().manual_seed(7)).to(dtype)


def attend(queries, keys, values, *, length, num_tokens, scaling):
    kind, cache = ExactTopK(num_tokens=num_tokens), CacheView(keys=keys, values=values)
    return kind.attend(queries, cache, length=length, scaling=scaling)


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    ("length", "num_tokens"), [(1, 1), (2, 1), (17, 8), (33, 32), (33, 33), (97, 5), (211, 64)]
)
def test_output_agrees_with_the_reference(group_size, length, num_tokens):
    keys, values = make_cache(length, length + 9, seed=length)
    queries = make_queries(group_size)
    output = attend(queries, keys, values, length=length, num_tokens=num_tokens, scaling=0.25)
    used = keys[:, :length], values[:, :length]
    expected = reference.exact_attend(queries, *used, num_tokens=num_tokens, scaling=0.25)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("group_size", [1, 4])
def test_scores_are_the_mean_of_the_groups_softmaxes(group_size):
    keys, _ = make_cache(131, 131)
    queries = make_queries(group_size)
    scores = token_scores(queries, keys, scaling=0.25)
    expected = torch.stack(
        [torch.stack([torch.softmax(0.25 * keys[h] @ q, 0) for q in queries[h]]).mean(0) for h in range(2)]
    )
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(reference.exact_scores(queries, keys, scaling=0.25), expected)


def test_the_newest_token_is_attended_and_ties_go_to_the_lowest_index():
    scores = torch.tensor([[0.0, 3.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0, 9.0]])
    assert top_tokens(scores, 3).sort().values.tolist() == [[1, 2, 4], [0, 1, 4]]
    assert top_tokens(scores, 1).tolist() == [[4], [4]]
    assert scores[0, 4] == 1.0  # the scores given are left alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_chooses_in_float32(dtype):
    keys, values = make_cache(40, 45, dtype=dtype)
    queries = make_queries(4, dtype=dtype)
    output = attend(queries, keys, values, length=40, num_tokens=9, scaling=0.3)
    expected = reference.exact_attend(queries, keys[:, :40], values[:, :40], num_tokens=9, scaling=0.3)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("change", [{"length": 0}, {"length": 17}], ids=str)
def test_sizes_out_of_range_are_refused(change):
    sizes = {"length": 16, "num_tokens": 4, "scaling": 1.0} | change
    with pytest.raises(ValueError, match="must be"):
        attend(make_queries(1), *make_cache(16, 16), **sizes)


@pytest.mark.parametrize(
    "queries", [torch.zeros(3, 1, 12), torch.zeros(2, 12), torch.zeros(2, 1, 12).half()], ids=str
)
def test_tensors_that_do_not_fit_are_refused(queries):
    with pytest.raises(ValueError, match="must"):
        attend(queries, *make_cache(16, 16), length=16, num_tokens=4, scaling=1.0)
