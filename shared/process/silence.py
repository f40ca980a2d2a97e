"""Notices that a stream is silent, at no cost per item."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SilenceTimer:
    """Calls back if an item takes longer than `limit_s`, and again after each further `limit_s`.

        idle ──begin()──► waiting ──limit_s──► on_silence(), waiting
          ▲                  │
          └──────end()───────┘

    `asyncio.timeout` sets and cancels a timer for every item. Here one timer runs all the time, and only when
    it expires checks whether the wait began long enough ago. Use it as a context manager, in one event loop.
    """

    def __init__(self, limit_s: float, on_silence: Callable[[], object]) -> None:
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self._handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> SilenceTimer:
        self._handle = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None, "it was entered"
        self._handle.cancel()

    def begin(self) -> None:
        """Begin to wait for an item."""
        self._since_s = self._loop.time()

    def end(self) -> None:
        """End the wait: the item has come."""
        self._since_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        remaining_s = self._limit_s
        if self._since_s is not None:
            remaining_s = self._since_s + self._limit_s - now_s
            if remaining_s <= 0:
                self._since_s, remaining_s = now_s, self._limit_s
                self._on_silence()
        self._handle = self._loop.call_later(remaining_s, self._look)
