"""Hybrid sparse attention agrees with the plain reference up to ties, and reads nothing beyond its length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.reference import sparse as reference

from kvferry.kernels import hsa
from kvferry.kernels.hsa import torch_path

NAN = float("nan")


def make_cache(length, capacity, page_size, *, heads=2, dim=12, dtype=torch.float32, seed=0):
    """A cache whose unused rows and pages are NaN."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((2, heads, capacity, dim), NAN, dtype=dtype)
    cache[:, :, :length] = torch.randn(2, heads, length, dim, generator=generator).to(dtype)
    pages = torch.full((2, heads, hsa.num_pages(capacity, page_size), dim), NAN, dtype=dtype)
    hsa.page_extremes(cache[0], pages[0], pages[1], length=length, page_size=page_size)
    return cache[0], cache[1], pages[0], pages[1]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 9, 31])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_page_extremes_equal_the_reference_and_leave_other_pages_alone(length, page_size):
    keys, _, page_max, page_min = make_cache(length, length + 7, page_size)
    expected_max, expected_min = reference.page_extremes(keys[:, :length], page_size=page_size)
    pages = hsa.num_pages(length, page_size)
    assert torch.equal(page_max[:, :pages], expected_max)
    assert torch.equal(page_min[:, :pages], expected_min)
    assert page_max[:, pages:].isnan().all()
    assert page_min[:, pages:].isnan().all()


@given(length=st.integers(1, 9), appended=st.integers(1, 20), page_size=st.integers(1, 5))
def test_extremes_after_appends_equal_recomputation(length, appended, page_size):
    capacity = length + appended
    keys, _, page_max, page_min = make_cache(length, capacity, page_size)
    rows = torch.randn(appended, 2, 12, generator=torch.Generator().manual_seed(1))
    for i in range(appended):
        keys[:, length + i] = rows[i]
        hsa.update_page_extremes(page_max, page_min, rows[i], position=length + i, page_size=page_size)
    expected_max, expected_min = reference.page_extremes(keys, page_size=page_size)
    assert torch.equal(page_max, expected_max)
    assert torch.equal(page_min, expected_min)


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    ("length", "page_size", "num_channels", "num_tokens"),
    [
        (1, 3, 4, 1),
        (2, 3, 4, 1),
        (17, 3, 5, 8),
        (40, 1, 12, 7),
        (41, 4, 1, 16),
        (97, 5, 7, 96),
        (33, 4, 6, 33),
    ],
)
def test_selection_and_output_agree_with_the_reference_up_to_ties(
    group_size, length, page_size, num_channels, num_tokens
):
    keys, values, page_max, page_min = make_cache(length, length + 9, page_size, seed=length)
    queries = torch.randn(2, group_size, 12, generator=torch.Generator().manual_seed(7))
    sizes = {"page_size": page_size, "num_channels": num_channels}
    pages = hsa.num_pages(length, page_size)
    output = hsa.attend(
        queries, keys, values, page_max, page_min, length=length, num_tokens=num_tokens, scaling=0.25, **sizes
    )
    assert output.isfinite().all()
    if length <= num_tokens:
        expected = reference.dense_decode(queries, keys[:, :length], values[:, :length], scaling=0.25)
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)
        return
    used = (page_max[:, :pages], page_min[:, :pages])
    scores = reference.hsa_scores(queries, *used, length=length, scaling=0.25, **sizes)
    ranked = torch_path.rank_channels(queries, num_channels=num_channels, scaling=0.25)
    selected = torch_path.select_tokens(
        ranked, *used, length=length, page_size=page_size, num_tokens=num_tokens
    )
    expected_selection = reference.select_tokens(scores, num_tokens=num_tokens)
    assert (selected == length - 1).any(1).all()
    for h in range(2):
        assert selected[h].unique().numel() == num_tokens
        # scores, not indices: sums in another order may swap what is equal but for rounding
        torch.testing.assert_close(
            scores[h, selected[h]].sort().values, scores[h, expected_selection[h]].sort().values
        )
    rows = [values[h, selected[h]] for h in range(2)], [keys[h, selected[h]] for h in range(2)]
    exact = reference.dense_decode(queries, torch.stack(rows[1]), torch.stack(rows[0]), scaling=0.25)
    torch.testing.assert_close(output, exact, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("length", "page_size", "num_channels"), [(29, 1, 12), (40, 3, 7), (41, 5, 1)])
def test_pages_that_lie_channel_by_channel_are_attended_as_those_that_lie_page_by_page(
    length, page_size, num_channels, together
):
    keys, values, page_max, page_min = make_cache(length, length + 8, page_size, heads=3)
    by_channel = torch.stack([page_max, page_min]).mT.contiguous().mT
    lying = tuple(by_channel) if together else (by_channel[0], by_channel[1].mT.clone().mT)
    sizes = {"page_size": page_size, "num_channels": num_channels, "num_tokens": 11, "scaling": 0.25}
    generator = torch.Generator().manual_seed(3)
    for position in range(length, length + 7):
        key, value = torch.randn(2, 3, 12, generator=generator)
        keys[:, position], values[:, position] = key, value
        for pages in ((page_max, page_min), lying):
            hsa.update_page_extremes(*pages, key, position=position, page_size=page_size)
        queries = torch.randn(3, 4, 12, generator=generator)
        expected = hsa.attend(queries, keys, values, page_max, page_min, length=position + 1, **sizes)
        output = hsa.attend(queries, keys, values, *lying, length=position + 1, **sizes)
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)


def test_equal_scores_select_the_lowest_indices_and_the_newest_token():
    page_max = page_min = torch.ones(1, 4, 8)
    ranked = torch_path.rank_channels(torch.ones(1, 2, 8), num_channels=3, scaling=1.0)
    selected = torch_path.select_tokens(ranked, page_max, page_min, length=15, page_size=4, num_tokens=6)
    assert selected.sort().values.tolist() == [[0, 1, 2, 3, 4, 14]]


def test_channels_of_equal_magnitude_go_to_the_lowest_index():
    queries = torch.tensor([[[1.0, -1.0, 1.0, 1.0]]])
    # channel 0 favours page 0, channel 2 would favour page 1; only channel 0 may be read
    page_max = torch.tensor([[[5.0, 0.0, -9.0, 0.0], [0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    ranked = torch_path.rank_channels(queries, num_channels=1, scaling=1.0)
    selected = torch_path.select_tokens(ranked, page_max, -page_max, length=3, page_size=1, num_tokens=2)
    assert selected.tolist() == [[2, 0]]


def test_a_zero_sum_over_the_group_takes_the_maximum():
    queries = torch.tensor([[[1.0], [-1.0]]])
    page_max, page_min = torch.tensor([[[3.0], [0.0], [0.0]]]), torch.tensor([[[0.0], [0.0], [0.0]]])
    kwargs = {"length": 3, "page_size": 1, "num_channels": 1, "scaling": 1.0}
    scores = reference.hsa_scores(queries, page_max, page_min, **kwargs)
    flat = torch.softmax(torch.tensor([3.0, 0.0, 0.0]), 0) + torch.softmax(torch.tensor([-3.0, 0.0, 0.0]), 0)
    torch.testing.assert_close(scores[0], flat / 2)
    # page 0 stands out by its maximum (mean 0.466 of 1); by its minimum all would tie
    ranked = torch_path.rank_channels(queries, num_channels=1, scaling=1.0)
    selected = torch_path.select_tokens(ranked, page_max, page_min, length=3, page_size=1, num_tokens=2)
    assert selected.tolist() == [[2, 0]]


def test_a_partial_last_page_counts_its_own_tokens_only():
    queries = torch.tensor([[[2.0, 1.0]]])
    page_max = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    sizes = {"page_size": 4, "num_channels": 2, "scaling": 0.7}
    scores = reference.hsa_scores(queries, page_max, page_max, length=5, **sizes)
    logits = torch.tensor([2.0, 2.0, 2.0, 2.0, 1.0]) * 0.7
    torch.testing.assert_close(scores[0], torch.softmax(logits, 0))


def test_with_all_channels_and_pages_of_one_token_estimates_are_the_attention_at_its_own_scale():
    generator = torch.Generator().manual_seed(8)
    queries, keys = torch.randn(2, 3, 16, generator=generator), torch.randn(2, 20, 16, generator=generator)
    exact = reference.exact_scores(queries, keys, scaling=0.9)
    sizes = {"page_size": 1, "num_channels": 16, "scaling": 0.9}
    estimates = reference.hsa_scores(queries, keys, keys, length=20, **sizes)
    torch.testing.assert_close(estimates, exact)
    ranked = torch_path.rank_channels(queries, num_channels=16, scaling=0.9)
    index = ranked.channels[:, None].expand(-1, 3, -1)
    in_order = torch.zeros_like(queries).scatter_(2, index, ranked.queries)
    torch.testing.assert_close(in_order, queries * 0.9)


def test_a_head_that_is_zero_on_the_chosen_channels_stays_finite():
    queries = torch.tensor([[[9.0, 9.0, 0.0], [0.0, 0.0, 1.0]], [[0.0] * 3, [0.0] * 3]])
    keys, values, page_max, page_min = make_cache(20, 20, 3, dim=3)
    output = hsa.attend(
        queries,
        keys,
        values,
        page_max,
        page_min,
        length=20,
        page_size=3,
        num_channels=2,
        num_tokens=4,
        scaling=1.0,
    )
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_near_the_reference_when_all_is_attended(dtype):
    keys, values, page_max, page_min = make_cache(12, 16, 3, dtype=dtype)
    queries = torch.randn(2, 4, 12).to(dtype)
    kwargs = {"page_size": 3, "num_channels": 6, "num_tokens": 12, "scaling": 0.3}
    output = hsa.attend(queries, keys, values, page_max, page_min, length=12, **kwargs)
    pages = page_max[:, :4], page_min[:, :4]
    expected = reference.hsa_attend(queries, keys[:, :12], values[:, :12], *pages, **kwargs)
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "change",
    [
        {"length": 0}, {"length": 17}, {"page_size": 0}, {"page_size": 2}, {"num_channels": 0},
        {"num_channels": 13}, {"num_tokens": 0},
    ],
    ids=str,
)  # fmt: skip
def test_attend_refuses_sizes_out_of_range(change):
    cache = make_cache(16, 16, 3)
    sizes = {"length": 16, "page_size": 3, "num_channels": 4, "num_tokens": 4, "scaling": 1.0} | change
    with pytest.raises(ValueError, match=r"must be"):
        hsa.attend(torch.zeros(2, 1, 12), *cache, **sizes)
