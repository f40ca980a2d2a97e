"""A silence timer calls back while an item is waited for too long, and at no other time."""

from __future__ import annotations

import asyncio

from kvtest.clock import Clock, stop_loop_clock

from kvferry.shared.process.silence import SilenceTimer

LIMIT_S = 10.0


async def turn(clock: Clock, by_s: float) -> None:
    """Turn the loop's clock, and let the timers that are due by then run."""
    clock.turn(by_s)
    for _ in range(3):
        await asyncio.sleep(0)


async def test_each_long_silence_calls_back_and_items_in_time_do_not() -> None:
    clock = stop_loop_clock()
    begin_s = clock()
    calls_s: list[float] = []
    with SilenceTimer(LIMIT_S, lambda: calls_s.append(clock() - begin_s)) as timer:
        for _ in range(3):  # nothing is waited for
            await turn(clock, LIMIT_S)
        for _ in range(5):  # each item comes in time
            timer.begin()
            await turn(clock, 0.75 * LIMIT_S)
            timer.end()
        assert calls_s == []
        begin_s = clock()
        timer.begin()
        for _ in range(14):
            await turn(clock, LIMIT_S / 4)
        assert calls_s == [LIMIT_S, 2 * LIMIT_S, 3 * LIMIT_S]
        timer.end()
        await turn(clock, 2 * LIMIT_S)
        assert len(calls_s) == 3
        timer.begin()
    for _ in range(2):  # it was left: its timer is gone
        await turn(clock, LIMIT_S)
    assert len(calls_s) == 3


async def test_a_wait_that_begins_late_gets_its_whole_time() -> None:
    clock = stop_loop_clock()
    calls_s: list[float] = []
    with SilenceTimer(LIMIT_S, lambda: calls_s.append(clock())) as timer:
        await turn(clock, 0.75 * LIMIT_S)
        begin_s = clock()
        timer.begin()
        await turn(clock, 0.75 * LIMIT_S)  # the timer ran out in the meantime
        assert calls_s == []
        await turn(clock, LIMIT_S / 4)
    assert calls_s == [begin_s + LIMIT_S]
