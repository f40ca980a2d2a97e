"""Selections are on budget, unique, ascending and in range, whatever the scores are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.compression.formats.interface import select_rows


def plain_top_k(scores: list[float], rows: int) -> list[int]:
    """By score, then by position; in position order."""
    return sorted(sorted(range(len(scores)), key=lambda t: (-scores[t], t))[:rows])


@st.composite
def scores_and_rows(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    heads = draw(st.integers(1, 3))
    tokens = draw(st.integers(1, 40))
    # Few distinct values, so that ties are the rule; inf as the window has.
    value = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.5, float("inf")])
    rows = [draw(st.lists(value, min_size=tokens, max_size=tokens)) for _ in range(heads)]
    return rows, draw(st.integers(1, tokens))


@given(scores_and_rows())
def test_selection_is_the_plain_top_k_with_lowest_index_on_ties(case: tuple[list[list[float]], int]) -> None:
    scores, rows = case
    selected = select_rows(torch.tensor(scores), rows)
    assert selected.dtype == torch.int32
    assert selected.shape == (len(scores), rows)
    assert selected.tolist() == [plain_top_k(head, rows) for head in scores]


def test_nan_scores_still_give_a_selection_on_budget() -> None:
    scores = torch.full((2, 10), float("nan"))
    selected = select_rows(scores, 4)
    assert all(len(set(head)) == 4 and head == sorted(head) for head in selected.tolist())
    assert selected.min() >= 0
    assert selected.max() < 10


@pytest.mark.parametrize("rows", [0, 11])
def test_rows_out_of_range_are_an_assertion(rows: int) -> None:
    with pytest.raises(AssertionError, match=str(rows)):
        select_rows(torch.zeros(1, 10), rows)
