"""Zones add up, and the kept tokens are the paper's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest import d2o_reference as reference

from kvferry.shared.compression.d2o.eviction import half_zones, protected, zones
from kvferry.shared.compression.formats.interface import select_rows


@given(st.integers(1, 5000), st.integers(0, 8))
def test_zones_add_up_and_always_hold_the_newest_token(rows: int, num_sinks: int) -> None:
    made = zones(rows, num_sinks=num_sinks)
    assert made.rows == rows
    assert (made.num_sinks, made.num_important, made.num_recents) == reference.zone_sizes(rows, num_sinks)
    assert made.num_recents >= 1
    assert made.num_important >= 0


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, (0, 0, 1)), (4, (3, 0, 1)), (5, (4, 0, 1)), (6, (4, 1, 1)), (12, (4, 6, 2)), (404, (4, 300, 100))],
)
def test_sinks_are_four_and_important_to_recent_is_three_to_one(
    rows: int, expected: tuple[int, int, int]
) -> None:
    made = zones(rows)
    assert (made.num_sinks, made.num_important, made.num_recents) == expected


@st.composite
def scores_and_rows(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    tokens = draw(st.integers(1, 40))
    value = st.sampled_from([0.0, 0.5, 1.0, 2.5])
    heads = [draw(st.lists(value, min_size=tokens, max_size=tokens)) for _ in range(draw(st.integers(1, 3)))]
    return heads, draw(st.integers(1, tokens))


@given(scores_and_rows())
def test_kept_positions_equal_the_paper_with_lowest_index_on_ties(
    case: tuple[list[list[float]], int],
) -> None:
    scores, rows = case
    given_scores = torch.tensor(scores)
    kept = select_rows(protected(given_scores, zones(rows)), rows)
    assert kept.dtype == torch.int32
    assert kept.tolist() == [reference.kept_tokens(head, rows) for head in scores]
    assert given_scores.tolist() == scores


@pytest.mark.parametrize(("rows", "expected"), [(1, (0, 0, 1)), (2, (0, 1, 1)), (7, (0, 3, 4))])
def test_h2o_divides_its_rows_in_halves_an_odd_one_to_the_recents(
    rows: int, expected: tuple[int, int, int]
) -> None:
    made = half_zones(rows)
    assert (made.num_sinks, made.num_important, made.num_recents) == expected
    assert made.rows == rows


@pytest.mark.parametrize("rows", [0, -3])
@pytest.mark.parametrize("divide", [zones, half_zones])
def test_a_cache_without_rows_is_an_assertion(divide: Callable[[int], object], rows: int) -> None:
    with pytest.raises(AssertionError, match=str(rows)):
        divide(rows)
