"""Layer budgets: totals exact, PyramidKV's line, and refusals by name."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.compression.plan import Part
from kvferry.shared.compression.resolve import allocate_layers
from kvferry.shared.errors import InvalidRequest

W = 32


def pyramid(rows: int, layers: int, tokens: int, beta: int = 20) -> list[int]:
    part = Part(name="pyramid", params={"window": W, "beta": beta})
    return allocate_layers(part, rows=rows, num_layers=layers, num_tokens=tokens)


def test_uniform_gives_every_layer_the_mean() -> None:
    assert allocate_layers(Part(name="uniform"), rows=7, num_layers=3, num_tokens=9) == [7, 7, 7]


def test_pyramid_falls_from_39_to_1_twentieths_of_the_mean_beside_the_window() -> None:
    """B - W 2000 over 20 layers: 3900 to 100, 200 less each layer, all beside the window of 32."""
    assert pyramid(2032, 20, 100_000) == [W + 3900 - 200 * layer for layer in range(20)]


def test_a_layer_that_would_keep_more_than_the_prompt_keeps_all_of_it_and_the_mean_stays() -> None:
    rows = pyramid(532, 5, 932)
    assert rows == [932, 732, 532, 332, 132]


@pytest.mark.parametrize("rows", [1, W - 1, W])
def test_a_budget_within_the_window_is_shared_evenly(rows: int) -> None:
    assert pyramid(rows, 4, 100) == [rows] * 4


@given(
    rows=st.integers(1, 3000), layers=st.integers(0, 48), more=st.integers(0, 5000), beta=st.integers(1, 40)
)
def test_totals_are_exact_within_the_prompt_and_near_the_line(
    rows: int, layers: int, more: int, beta: int
) -> None:
    tokens = rows + more
    budgets = pyramid(rows, layers, tokens, beta)
    assert len(budgets) == layers
    assert sum(budgets) == rows * layers
    assert all(min(rows, W) <= budget <= tokens for budget in budgets)
    assert budgets == sorted(budgets, reverse=True)
    if layers > 1 and rows > W:
        mean = rows - W
        first = min(2 * mean - Fraction(mean, beta), Fraction(tokens - W))
        last = 2 * mean - first
        for layer, budget in enumerate(budgets):
            line = W + first + (last - first) * Fraction(layer, layers - 1)
            assert abs(budget - line) < 1


@pytest.mark.parametrize(
    "part",
    [
        Part(name="nosuch"),
        Part(name="uniform", params={"beta": 2}),
        Part(name="pyramid"),
        Part(name="pyramid", params={"window": 0, "beta": 20}),
        Part(name="pyramid", params={"window": 32, "beta": 0}),
        Part(name="pyramid", params={"window": 32, "beta": 20.0}),
    ],
    ids=str,
)
def test_an_allocation_that_does_not_exist_is_refused(part: Part) -> None:
    with pytest.raises(InvalidRequest):
        allocate_layers(part, rows=100, num_layers=3, num_tokens=200)
