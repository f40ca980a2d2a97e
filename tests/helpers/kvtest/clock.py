"""Clocks that a test turns, so that nothing depends on how fast a machine is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from kvferry.shared.process import heartbeat


class Clock:
    """Monotonic seconds that a test turns; any thread may read them.

    Args: runs_with: a clock whose seconds pass, too; by default none do.
    """

    def __init__(self, runs_with: Callable[[], float] = lambda: 1000.0) -> None:
        self._runs_with = runs_with
        self._turned_s = 0.0

    def __call__(self) -> float:
        return self._runs_with() + self._turned_s

    def turn(self, by_s: float) -> None:
        """Let so many seconds pass."""
        self._turned_s += by_s


def stop_loop_clock() -> Clock:
    """Replace the clock of the running event loop, so that its timers wait for a test to turn it."""
    loop = asyncio.get_running_loop()
    now_s = math.ceil(loop.time())  # sums of whole seconds are exact
    clock = Clock(lambda: now_s)
    loop.time = clock  # type: ignore[method-assign]
    return clock


def turn_loop_clock(by_s: float) -> None:
    """Put the clock of the running event loop forward: its timers that are due by then run next."""
    loop = asyncio.get_running_loop()
    clock = Clock(loop.time)
    clock.turn(by_s)
    loop.time = clock  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def no_engine_is_wedged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that a test stops is not given up, however long the test takes on a slow machine."""
    monkeypatch.setattr(heartbeat, "STALL_S", 600.0)
