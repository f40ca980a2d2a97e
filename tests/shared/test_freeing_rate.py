"""Retry-After from what ended of late."""

from __future__ import annotations

from kvtest.clock import Clock

from kvferry.shared.process.freeing_rate import LONGEST_S, FreeingRate


def test_before_anything_was_freed_the_callers_guess_is_said() -> None:
    assert FreeingRate(Clock()).wait_s(5) == 1.0
    assert FreeingRate(Clock()).wait_s(5, unknown_s=7.0) == 7.0


def test_the_wait_is_the_amount_by_the_rate_and_grows_while_nothing_ends() -> None:
    clock = Clock()
    rate = FreeingRate(clock)
    for _ in range(5):
        clock.turn(4.0)
        rate.add(2)
    assert (rate.wait_s(1), rate.wait_s(3)) == (2.0, 6.0)
    clock.turn(20.0)
    assert rate.wait_s(1) == 4.0


def test_it_is_bounded_on_both_sides() -> None:
    clock = Clock()
    rate = FreeingRate(clock)
    rate.add(1000)
    assert rate.wait_s(1) == 1.0
    clock.turn(1e6)
    assert rate.wait_s(1000) == LONGEST_S


def test_what_is_long_ago_is_forgotten() -> None:
    clock = Clock()
    rate = FreeingRate(clock)
    for seconds in (100.0,) * 64 + (2.0,) * 80:
        clock.turn(seconds)
        rate.add(1)
    assert rate.wait_s(1) == 2.0
