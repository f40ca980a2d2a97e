"""Clocks that a test turns, so that nothing depends on how fast a machine is."""

from __future__ import annotations

import asyncio
import math


class Clock:
    """Monotonic seconds that stand still until a test turns them; any thread may read them."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def turn(self, by_s: float) -> None:
        """Let so many seconds pass."""
        self.now_s += by_s


def stop_loop_clock() -> Clock:
    """Replace the clock of the running event loop, so that its timers wait for a test to turn it."""
    loop = asyncio.get_running_loop()
    clock = Clock(math.ceil(loop.time()))  # sums of whole seconds are exact
    loop.time = clock  # type: ignore[method-assign]
    return clock


def turn_loop_clock(by_s: float) -> None:
    """Put the clock of the running event loop forward: its timers that are due by then run next."""
    loop = asyncio.get_running_loop()
    time_s = loop.time
    loop.time = lambda: time_s() + by_s  # type: ignore[method-assign]
