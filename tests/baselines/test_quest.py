"""Quest's attention agrees with the plain reference up to ties, and its page logits bound every token's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.reference import sparse as reference
from kvtest.reference.dense import dense_decode
from kvtest.reference.sparse import page_extremes

from kvferry.baselines import quest
from kvferry.kernels import hsa
from kvferry.kernels.torch_attention import top_tokens
from kvferry.shared.compression.attention import CacheView

NAN = float("nan")


def make_cache(length, capacity, page_size, *, heads=2, dim=12, seed=0):
    """A cache whose unused rows and pages are NaN."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((2, heads, capacity, dim), NAN)
    cache[:, :, :length] = torch.randn(2, heads, length, dim, generator=generator)
    pages = torch.full((2, heads, hsa.num_pages(capacity, page_size), dim), NAN)
    hsa.page_extremes(cache[0], pages[0], pages[1], length=length, page_size=page_size)
    return cache[0], cache[1], pages[0], pages[1]


def attend(queries, keys, values, page_max, page_min, *, length, page_size, num_tokens, scaling):
    kind = quest.Quest(page_size=page_size, num_tokens=num_tokens)
    pages = torch.stack([page_max, page_min]).mT
    cache = CacheView(keys=keys, values=values, auxiliary=(pages,))
    return kind.attend(queries, cache, length=length, scaling=scaling)


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    ("length", "page_size", "num_tokens"),
    [(1, 3, 1), (2, 3, 1), (17, 3, 8), (40, 1, 7), (41, 16, 8), (97, 5, 96), (33, 4, 33), (211, 100, 20)],
)
def test_selection_and_output_agree_with_the_reference_up_to_ties(group_size, length, page_size, num_tokens):
    keys, values, page_max, page_min = make_cache(length, length + 9, page_size, seed=length)
    queries = torch.randn(2, group_size, 12, generator=torch.Generator().manual_seed(7))
    output = attend(
        queries, keys, values, page_max, page_min,
        length=length, page_size=page_size, num_tokens=num_tokens, scaling=0.25,
    )  # fmt: skip
    assert output.isfinite().all()
    expected_scores = reference.quest_scores(queries, keys[:, :length], page_size=page_size, scaling=0.25)
    pages = hsa.num_pages(length, page_size)
    used = page_max[:, :pages], page_min[:, :pages]
    scores = quest.token_scores(queries, *used, length=length, page_size=page_size, scaling=0.25)
    torch.testing.assert_close(scores, expected_scores)
    torch.testing.assert_close(scores.sum(1), torch.ones(2))
    if length <= num_tokens:
        chosen = torch.arange(length).expand(2, -1)
    else:
        chosen = top_tokens(scores, num_tokens).sort().values
        best = torch.sort(expected_scores[:, :-1], descending=True).values[:, : num_tokens - 1]
        taken = expected_scores.gather(1, chosen[:, :-1]).sort(descending=True).values
        torch.testing.assert_close(taken, best)
        assert (chosen[:, -1] == length - 1).all()
    heads = torch.arange(2)[:, None]
    exact = dense_decode(queries, keys[heads, chosen], values[heads, chosen], scaling=0.25)
    torch.testing.assert_close(output, exact, atol=2e-6, rtol=2e-6)


@given(length=st.integers(1, 40), page_size=st.integers(1, 12), seed=st.integers(0, 1000))
def test_with_pages_of_one_token_scores_are_exact_and_larger_pages_bound_them(length, page_size, seed):
    keys, *_ = make_cache(length, length, page_size, seed=seed)
    query = torch.randn(2, 1, 12, generator=torch.Generator().manual_seed(seed))
    page_max, page_min = page_extremes(keys, page_size=page_size)
    bounds = torch.matmul(query.clamp(min=0), page_max.transpose(1, 2))
    bounds += torch.matmul(query.clamp(max=0), page_min.transpose(1, 2))
    logits = torch.matmul(query, keys.transpose(1, 2))
    per_token = bounds.repeat_interleave(page_size, dim=2)[..., :length]
    assert (per_token >= logits - 1e-5).all()
    one, other = page_extremes(keys, page_size=1)
    scores = quest.token_scores(query, one, other, length=length, page_size=1, scaling=1.0)
    torch.testing.assert_close(scores, logits[:, 0].softmax(-1))


def test_each_head_of_a_group_takes_the_extreme_of_its_own_sign():
    queries = torch.tensor([[[1.0], [-1.0]]])
    page_max, page_min = torch.tensor([[[3.0], [0.0], [0.0]]]), torch.tensor([[[-5.0], [0.0], [0.0]]])
    scores = quest.token_scores(queries, page_max, page_min, length=3, page_size=1, scaling=1.0)
    plus, minus = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([5.0, 0.0, 0.0])
    torch.testing.assert_close(scores[0], (plus.softmax(0) + minus.softmax(0)) / 2)


def test_equal_scores_select_the_lowest_indices_and_the_newest_token():
    page = torch.ones(1, 4, 8)
    scores = quest.token_scores(torch.ones(1, 2, 8), page, page, length=15, page_size=4, scaling=1.0)
    assert top_tokens(scores, 6).sort().values.tolist() == [[0, 1, 2, 3, 4, 14]]


@pytest.mark.parametrize("change", [{"length": 0}, {"length": 17}, {"page_size": 2}], ids=str)
def test_sizes_out_of_range_are_refused(change):
    sizes = {"length": 16, "page_size": 3, "num_tokens": 4, "scaling": 1.0} | change
    with pytest.raises(ValueError, match="must be"):
        attend(torch.zeros(2, 1, 12), *make_cache(16, 16, 3), **sizes)
