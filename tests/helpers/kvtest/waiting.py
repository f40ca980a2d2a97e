"""Waits for what another task, thread or process brings about. No healthy machine needs their time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

WITHIN_S = 180.0
_POLL_S = 0.01


def until(condition: Callable[[], bool], within_s: float = WITHIN_S, what: object = "") -> None:
    """Wait until a condition holds; fails where it does not in time.

    Args:
        what: what is waited for, or a function that tells it after the time.
    """
    for _ in _polls(condition, within_s, what):
        time.sleep(_POLL_S)


async def eventually(condition: Callable[[], bool], within_s: float = WITHIN_S, what: object = "") -> None:
    """Wait as `until` does, while other tasks go on."""
    for _ in _polls(condition, within_s, what):
        await asyncio.sleep(_POLL_S)


def _polls(condition: Callable[[], bool], within_s: float, what: object) -> Iterator[None]:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what() if callable(what) else what}"
        yield
