"""Figures: a median of what was measured lately, by size, forgotten in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.services.prefill.figures import DecayingFigures


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def figures(clock: Clock) -> DecayingFigures:
    return DecayingFigures(half_life_s=10.0, clock=clock)


def test_three_measurements_make_a_figure_and_it_is_their_median(clock: Clock) -> None:
    its = figures(clock)
    assert its.get("load", 100) is None
    for value in (1.0, 900.0):
        its.add("load", value, 100)
        assert its.get("load", 100) is None
    its.add("load", 2.0, 100)
    assert its.get("load", 100) == 2.0
    assert its.get("run", 100) is None


def test_a_figure_is_forgotten_and_one_measurement_brings_it_back(clock: Clock) -> None:
    its = figures(clock)
    for _ in range(3):
        its.add("load", 5.0)
    clock.now_s += 5.0
    assert its.get("load") == 5.0
    clock.now_s += 5.0
    assert its.get("load") is None
    its.add("load", 5.0)
    assert its.get("load") == 5.0


def test_newer_measurements_weigh_more_and_drive_older_ones_out(clock: Clock) -> None:
    its = figures(clock)
    for _ in range(5):
        its.add("load", 1.0)
    clock.now_s += 20.0
    its.add("load", 9.0)
    its.add("load", 9.0)
    # two of weight 1 against three of weight 1/4
    assert its.get("load") == 9.0


def test_measurements_answer_together_for_sizes_from_half_to_twice_theirs(clock: Clock) -> None:
    its = figures(clock)
    for num_tokens in (60, 100, 200):
        its.add("run", float(num_tokens), num_tokens, 1024)
    assert its.get("run", 64, 1500) == its.get("run", 127, 1024) == 100.0
    assert its.get("run", 100, 600) == its.get("run", 100, 4000) == 100.0
    assert its.get("run", 32, 1024) is None
    assert its.get("run", 100, 511) is None
    assert its.get("run", 100, 4096) is None


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12))
def test_a_figure_is_one_of_the_last_five_measurements_and_splits_them_evenly(values: list[float]) -> None:
    its = figures(Clock())
    for value in values:
        its.add("x", value)
    last = values[-5:]
    figure = its.get("x")
    if len(last) < 3:
        assert figure is None
        return
    assert figure in last
    assert sum(value <= figure for value in last) * 2 >= len(last)
    assert sum(value < figure for value in last) * 2 <= len(last)
