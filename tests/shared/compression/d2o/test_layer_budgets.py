"""Layer budgets are exact, bounded and ordered, whatever the variances are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.shared.compression.d2o.layer_budgets import (
    LOWEST_RETENTION,
    attention_variance,
    layer_budgets,
    layer_retentions,
)
from kvferry.shared.errors import KvferryError

VARIANCES = st.lists(st.floats(0, 1e5), min_size=1, max_size=12)
# few distinct values and huge distances, so that ties and clipping are the rule
ROUGH = st.lists(st.sampled_from([0.0, 1.0, 1.5, 3.0, 40.0, 1e5]), min_size=1, max_size=12)
RETENTIONS = st.one_of(st.floats(0.001, 1.0), st.sampled_from([0.01, 0.2, 0.8, 1.0]))
NORMALISATIONS = st.sampled_from(["mean", "raw", "minmax"])


def softmax_of_minus(variances: list[float]) -> list[float]:
    """`exp(-F_l) / sum exp(-F_l)`, shifted so that it does not underflow as a whole."""
    weights = [math.exp(min(variances) - f) for f in variances]
    return [w / sum(weights) for w in weights]


def plain_retentions(variances: list[float], retention: float) -> list[float]:
    """Eq. 5 under clipping: try every number of layers at the top and at the bottom until one fits."""
    low = min(LOWEST_RETENTION, retention)
    count = len(variances)
    mean = sum(variances) / count
    scaled = [f / mean if mean > 0 else 0.0 for f in variances]
    order = sorted(range(count), key=lambda i: scaled[i])
    for top in range(count + 1):
        for bottom in range(count + 1 - top):
            middle = order[top : count - bottom]
            left = count * retention - top - bottom * low
            shares = softmax_of_minus([scaled[i] for i in middle]) if middle else []
            alphas = {i: left * share for i, share in zip(middle, shares, strict=True)}
            inside = all(low - 1e-9 <= a <= 1 + 1e-9 for a in alphas.values())
            if not inside or (not middle and abs(left) > 1e-9):
                continue
            first, last = (middle[0], middle[-1]) if middle else (None, None)
            # with the middle's factor, the top ones would get 1 or more and the bottom ones low or less
            fits_top = first is None or all(
                math.log(alphas[first]) + scaled[first] - scaled[i] >= -1e-9 for i in order[:top]
            )
            fits_bottom = last is None or all(
                math.log(alphas[last]) + scaled[last] - scaled[i] <= math.log(low) + 1e-9
                for i in order[count - bottom :]
            )
            if fits_top and fits_bottom:
                pinned = dict.fromkeys(order[:top], 1.0) | dict.fromkeys(order[count - bottom :], low)
                return [(alphas | pinned)[i] for i in range(count)]
    raise AssertionError("no split fits")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=7), RETENTIONS)
@example([0.0, 0.0, 0.0], 0.3)
@example([0.0, 100.0], 0.505)
def test_retentions_equal_a_search_over_all_clippings(variances: list[float], retention: float) -> None:
    expected = plain_retentions(variances, retention)
    assert layer_retentions(variances, retention=retention) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@given(st.one_of(VARIANCES, ROUGH), RETENTIONS, NORMALISATIONS)
def test_retentions_sum_to_the_budget_lie_in_range_and_fall_with_variance(
    variances: list[float], retention: float, normalisation
) -> None:
    alphas = layer_retentions(variances, retention=retention, normalisation=normalisation)
    assert math.fsum(alphas) == pytest.approx(len(variances) * retention, rel=1e-9)
    assert all(min(LOWEST_RETENTION, retention) <= alpha <= 1 for alpha in alphas)
    by_variance = sorted(zip(variances, alphas, strict=True))
    for (f_low, larger), (f_high, smaller) in itertools.pairwise(by_variance):
        assert larger >= smaller
        assert f_low != f_high or larger == smaller
    assert alphas == layer_retentions(variances, retention=retention, normalisation=normalisation)


def test_without_clipping_raw_variances_give_the_papers_equation() -> None:
    variances = [0.1, 0.4, 0.2, 0.9]
    expected = [share * 4 * 0.3 for share in softmax_of_minus(variances)]
    alphas = layer_retentions(variances, retention=0.3, normalisation="raw")
    assert alphas == pytest.approx(expected, rel=1e-12)


def test_raw_variances_of_long_prompts_are_one_hot_and_mean_normalised_ones_are_not() -> None:
    variances = [900.0, 1000.0, 1100.0, 1400.0]
    raw = layer_retentions(variances, retention=0.2, normalisation="raw")
    assert raw == pytest.approx([0.77, 0.01, 0.01, 0.01])
    mean = layer_retentions(variances, retention=0.2)
    assert min(mean) > 0.1
    # and so a prompt twice as long, whose variances are twice as large, gets the same shares
    assert layer_retentions([2 * f for f in variances], retention=0.2) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("normalisation", ["mean", "raw", "minmax"])
def test_equal_variances_share_equally(normalisation) -> None:
    assert layer_retentions([5.0] * 3, retention=0.2, normalisation=normalisation) == pytest.approx([0.2] * 3)
    assert layer_retentions([0.0] * 3, retention=0.2, normalisation=normalisation) == pytest.approx([0.2] * 3)


@pytest.mark.parametrize("variance", [math.nan, math.inf, -1.0])
def test_a_variance_that_is_no_number_is_refused_with_its_layer(variance: float) -> None:
    with pytest.raises(KvferryError, match=f"layer 1 is {variance}"):
        layer_retentions([1.0, variance], retention=0.5)


def plain_counts(alphas: tuple[float, ...], variances: list[float], num_tokens: int, total: int) -> list[int]:
    """Largest remainder, one token at a time; the smaller variance, then the lower layer, first of equals."""
    counts = [math.floor(alpha * num_tokens) for alpha in alphas]
    waiting = set(range(len(counts)))
    while sum(counts) < total:
        chosen = min(waiting, key=lambda i: (counts[i] - alphas[i] * num_tokens, variances[i], i))
        counts[chosen] += 1
        waiting.remove(chosen)
    return counts


@given(st.one_of(VARIANCES, ROUGH), st.data(), NORMALISATIONS)
def test_budgets_sum_exactly_and_every_layer_has_one_to_all_tokens(
    variances: list[float], data: st.DataObject, normalisation
) -> None:
    num_tokens = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([97, 1009, 131072])))
    rows = data.draw(st.integers(1, num_tokens))
    exempt = data.draw(st.sets(st.integers(0, len(variances) - 1)))
    budgets = layer_budgets(
        variances, num_tokens=num_tokens, rows=rows, normalisation=normalisation, exempt_layers=exempt
    )
    shared = [layer for layer in range(len(variances)) if layer not in exempt]
    assert all(budgets[layer] == num_tokens for layer in exempt)
    assert sum(budgets[layer] for layer in shared) == len(shared) * rows
    assert all(1 <= budget <= num_tokens for budget in budgets)
    for i in shared:
        for j in shared:
            assert variances[i] >= variances[j] or budgets[i] >= budgets[j]
    if shared:
        alphas = layer_retentions(
            [variances[layer] for layer in shared],
            retention=rows / num_tokens,
            normalisation=normalisation,
            lowest=max(LOWEST_RETENTION, 1 / num_tokens),
        )
        assert [budgets[layer] for layer in shared] == plain_counts(
            alphas, [variances[layer] for layer in shared], num_tokens, len(shared) * rows
        )


def test_of_equal_remainders_the_smaller_variance_then_the_lowest_layer_is_rounded_up() -> None:
    # raw: the first has all 150 tokens, the others 0.01 of that, 1.5 each
    bottom = layer_budgets([0.0, 1e5, 40.0], num_tokens=150, rows=51, normalisation="raw")
    assert bottom == (150, 1, 2)
    assert layer_budgets([0.0, 40.0, 40.0], num_tokens=150, rows=51, normalisation="raw") == (150, 2, 1)


def test_exempt_layers_variances_do_not_matter() -> None:
    first = layer_budgets([1.0, 2.0, 3.0], num_tokens=100, rows=20, exempt_layers=(0,))
    second = layer_budgets([math.nan, 2.0, 3.0], num_tokens=100, rows=20, exempt_layers=(0,))
    assert first == second
    assert layer_budgets([1.0, 2.0], num_tokens=9, rows=3, exempt_layers=(0, 1)) == (9, 9)


def test_attention_variance_is_the_mean_over_query_heads() -> None:
    variances = torch.tensor([[1.0, 2.0], [3.0, 10.0]])
    assert attention_variance(variances) == 4.0
    assert attention_variance(variances, normalisation="raw") == 4.0
    # (0 + 1/9 + 2/9 + 1) / 4, as the authors' code
    assert attention_variance(variances, normalisation="minmax") == pytest.approx(12 / 36)


def test_one_query_head_or_equal_heads_have_a_minmax_variance_of_zero() -> None:
    assert attention_variance(torch.tensor([[7.0]]), normalisation="minmax") == 0.0
    assert attention_variance(torch.full((2, 4), 7.0), normalisation="minmax") == 0.0
