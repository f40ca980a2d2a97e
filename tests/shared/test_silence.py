"""A silence timer calls back while an item is waited for too long, and at no other time."""

from __future__ import annotations

import asyncio

from kvferry.shared.silence import SilenceTimer

LIMIT_S = 0.05


async def test_each_long_silence_calls_back_and_items_in_time_do_not() -> None:
    loop = asyncio.get_running_loop()
    calls_s: list[float] = []
    with SilenceTimer(LIMIT_S, lambda: calls_s.append(loop.time())) as timer:
        await asyncio.sleep(3 * LIMIT_S)  # nothing is waited for
        assert calls_s == []
        began_s = loop.time()
        timer.begin()
        while len(calls_s) < 3:
            await asyncio.sleep(0.001)
        timer.end()
        ended_s = loop.time()
        await asyncio.sleep(2 * LIMIT_S)
        assert len(calls_s) == 3
        assert all(call_s - began_s >= index * LIMIT_S for index, call_s in enumerate(calls_s, 1))
        timer.begin()
    await asyncio.sleep(2 * LIMIT_S)  # it was left: its timer is gone
    assert max(calls_s) <= ended_s


async def test_a_wait_that_begins_late_gets_its_whole_time() -> None:
    loop = asyncio.get_running_loop()
    calls_s: list[float] = []
    with SilenceTimer(LIMIT_S, lambda: calls_s.append(loop.time())) as timer:
        await asyncio.sleep(0.9 * LIMIT_S)
        began_s = loop.time()
        timer.begin()
        while not calls_s:
            await asyncio.sleep(0.001)
    assert calls_s[0] - began_s >= LIMIT_S
