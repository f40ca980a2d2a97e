"""SparQ's attention agrees with the plain reference up to ties, and its running sum with a recomputed one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.reference import sparse as reference

from kvferry.baselines.sparq import SparQ, approximate_scores
from kvferry.shared.compression.attention import CacheView

NAN = float("nan")
KIND = SparQ(num_channels=4, num_tokens=4)


def make_cache(length, capacity, *, heads=2, dim=12, dtype=torch.float32, seed=0):
    """A cache whose unused rows are NaN, and the sum of its values."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((2, heads, capacity, dim), NAN, dtype=dtype)
    cache[:, :, :length] = torch.randn(2, heads, length, dim, generator=generator).to(dtype)
    value_sum = torch.full((heads, dim), NAN)
    cache = CacheView(keys=cache[0], values=cache[1], auxiliary=(value_sum,))
    KIND.build(cache, length=length)
    return cache.keys, cache.values, value_sum


def attend(queries, keys, values, value_sum, *, length, num_channels, num_tokens, scaling):
    kind = SparQ(num_channels=num_channels, num_tokens=num_tokens)
    cache = CacheView(keys=keys, values=values, auxiliary=(value_sum,))
    return kind.attend(queries, cache, length=length, scaling=scaling)


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    ("length", "num_channels", "num_tokens"),
    [(1, 4, 1), (2, 4, 1), (17, 5, 8), (40, 12, 7), (41, 1, 16), (97, 7, 96), (33, 6, 33), (211, 3, 20)],
)
def test_scores_and_output_agree_with_the_reference(group_size, length, num_channels, num_tokens):
    keys, values, value_sum = make_cache(length, length + 9, seed=length)
    queries = torch.randn(2, group_size, 12, generator=torch.Generator().manual_seed(7))
    sizes = {"num_channels": num_channels, "scaling": 0.25}
    output = attend(queries, keys, values, value_sum, length=length, num_tokens=num_tokens, **sizes)
    used = keys[:, :length], values[:, :length]
    torch.testing.assert_close(
        approximate_scores(queries, used[0], **sizes),
        reference.sparq_scores(queries, used[0], **sizes),
    )
    expected = reference.sparq_attend(queries, *used, num_tokens=num_tokens, **sizes)
    torch.testing.assert_close(output, expected, atol=5e-6, rtol=5e-6)


@given(length=st.integers(1, 9), appended=st.integers(1, 20))
def test_the_sum_after_appends_equals_recomputation(length, appended):
    keys, values, value_sum = make_cache(length, length + appended)
    cache = CacheView(keys=keys, values=values, auxiliary=(value_sum,))
    rows = torch.randn(2, appended, 2, 12, generator=torch.Generator().manual_seed(1))
    for i in range(appended):
        KIND.append(cache, rows[0, i], rows[1, i], position=length + i)
    assert torch.equal(keys[:, length:], rows[0].transpose(0, 1))
    assert torch.equal(values[:, length:], rows[1].transpose(0, 1))
    torch.testing.assert_close(value_sum, values.sum(1), atol=1e-5, rtol=1e-5)


def test_what_is_not_attended_is_filled_in_by_the_mean_value():
    """Equal keys make every score 1/n: k of n tokens carry k/n of the output, the mean of all the rest."""
    values = torch.randn(1, 10, 4, generator=torch.Generator().manual_seed(2))
    keys, queries = torch.ones(1, 10, 4), torch.ones(1, 2, 4)
    output = attend(
        queries, keys, values, values.sum(1), length=10, num_channels=2, num_tokens=4, scaling=0.5
    )
    attended = values[0, [0, 1, 2, 9]].mean(0)
    torch.testing.assert_close(output[0], (0.4 * attended + 0.6 * values[0].mean(0)).expand(2, -1))


def test_all_channels_give_the_exact_scores():
    keys, _, _ = make_cache(31, 31)
    queries = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(3))
    scores = approximate_scores(queries, keys, num_channels=12, scaling=0.3)
    torch.testing.assert_close(scores, (queries @ keys.transpose(1, 2) * 0.3).softmax(-1))


def test_channels_of_equal_magnitude_go_to_the_lowest_index():
    keys = torch.tensor([[[5.0, 0.0, -9.0], [0.0, 0.0, 9.0]]])
    scores = approximate_scores(torch.tensor([[[1.0, -1.0, 1.0]]]), keys, num_channels=1, scaling=1.0)
    # only channel 0 is read, at the temperature of a third of |q|
    torch.testing.assert_close(scores[0, 0], torch.softmax(torch.tensor([5.0, 0.0]) * 3**0.5, 0))


def test_a_head_that_is_zero_on_the_chosen_channels_stays_finite():
    queries = torch.tensor([[[9.0, 9.0, 0.0], [0.0, 0.0, 1.0]], [[0.0] * 3, [0.0] * 3]])
    output = attend(queries, *make_cache(20, 20, dim=3), length=20, num_channels=2, num_tokens=4, scaling=1.0)
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_near_the_reference(dtype):
    keys, values, value_sum = make_cache(40, 45, dtype=dtype)
    queries = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(7)).to(dtype)
    sizes = {"num_channels": 6, "num_tokens": 12, "scaling": 0.3}
    output = attend(queries, keys, values, value_sum, length=40, **sizes)
    assert output.dtype == dtype
    expected = reference.sparq_attend(queries, keys[:, :40], values[:, :40], **sizes)
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("length", [0, 17])
def test_attend_refuses_a_length_out_of_range(length):
    sizes = {"num_channels": 4, "num_tokens": 4, "scaling": 1.0}
    with pytest.raises(ValueError, match="must be"):
        attend(torch.zeros(2, 1, 12), *make_cache(16, 16), length=length, **sizes)


def test_append_refuses_a_row_beyond_the_cache():
    keys, values, value_sum = make_cache(16, 16)
    row = torch.zeros(2, 12)
    with pytest.raises(IndexError, match="16"):
        KIND.append(CacheView(keys=keys, values=values, auxiliary=(value_sum,)), row, row, position=16)
