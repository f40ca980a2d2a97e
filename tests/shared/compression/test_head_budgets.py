"""AdaKV's head budgets: exact totals, the floor, and the plain top-k over all heads."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.compression.formats.ragged import head_budgets


def plain_head_budgets(scores: list[list[float]], rows: int, window: int, floor: float) -> list[int]:
    """Each head's own best first, then one top-k over what is left of all heads."""
    tokens = [(h, t) for h in range(len(scores)) for t in range(len(scores[h]) - window)]
    guaranteed = math.floor(Fraction(repr(floor)) * (rows - window))
    kept: set[tuple[int, int]] = set()
    for h in range(len(scores)):
        own = sorted((token for token in tokens if token[0] == h), key=lambda ht: (-scores[ht[0]][ht[1]], ht))
        kept.update(own[:guaranteed])
    rest = sorted(
        (token for token in tokens if token not in kept), key=lambda ht: (-scores[ht[0]][ht[1]], ht)
    )
    kept.update(rest[: len(scores) * (rows - window) - len(kept)])
    return [window + sum(head == h for head, _ in kept) for h in range(len(scores))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], int, int, float]:
    heads = draw(st.integers(1, 4))
    tokens = draw(st.one_of(st.integers(1, 30), st.sampled_from([31, 37])))
    # few distinct values, so that ties are the rule; the window's columns may hold anything
    value = st.sampled_from([0.0, 0.5, 1.0, 2.5, float("inf")])
    scores = [draw(st.lists(value, min_size=tokens, max_size=tokens)) for _ in range(heads)]
    rows = draw(st.integers(1, tokens))
    return scores, rows, draw(st.integers(0, rows)), draw(st.sampled_from([0.0, 0.2, 0.29, 0.7, 1.0]))


@given(cases())
def test_budgets_equal_a_plain_selection_with_exact_totals(case) -> None:
    scores, rows, window, floor = case
    budgets = head_budgets(torch.tensor(scores), rows=rows, window=window, floor=floor)
    assert budgets.dtype == torch.int64
    assert budgets.tolist() == plain_head_budgets(scores, rows, window, floor)
    assert budgets.sum() == rows * len(scores)
    assert budgets.min() >= window + math.floor(Fraction(repr(floor)) * (rows - window))
    assert budgets.max() <= len(scores[0])


def test_a_head_without_any_score_keeps_its_window_and_a_fifth_of_the_rest() -> None:
    scores = torch.stack([torch.zeros(200), torch.linspace(1, 2, 200), torch.linspace(1, 2, 200)])
    assert head_budgets(scores, rows=82, window=32).tolist() == [32 + 10, 102, 102]


def test_the_floor_is_the_decimal_that_was_written() -> None:
    # 0.29 * 100 is 28.999999999999996 in floating point
    scores = torch.stack([torch.zeros(200), torch.ones(200)])
    assert head_budgets(scores, rows=100, window=0, floor=0.29).tolist() == [29, 171]


def test_equal_heads_get_equal_budgets_but_for_ties_which_go_to_the_lowest() -> None:
    # one head's scores all differ and repeat in the next: rank by rank the lowest head is first
    scores = torch.arange(20.0).repeat(3, 1)
    assert head_budgets(scores, rows=8, window=2).tolist() == [8, 8, 8]
    assert head_budgets(torch.ones(3, 20), rows=10, window=0).tolist() == [20, 8, 2]


@pytest.mark.parametrize(("rows", "window"), [(20, 5), (20, 0), (5, 5), (20, 20)])
def test_budgets_at_the_edges_leave_no_choice(rows: int, window: int) -> None:
    scores = torch.rand(4, 20, generator=torch.Generator().manual_seed(0))
    assert head_budgets(scores, rows=rows, window=window).tolist() == [rows] * 4


def test_sizes_out_of_range_are_assertions() -> None:
    with pytest.raises(AssertionError, match="rows 21"):
        head_budgets(torch.zeros(1, 20), rows=21, window=0)
    with pytest.raises(AssertionError, match="window 5"):
        head_budgets(torch.zeros(1, 20), rows=4, window=5)
    with pytest.raises(AssertionError, match=r"1\.5"):
        head_budgets(torch.zeros(1, 20), rows=4, window=1, floor=1.5)
