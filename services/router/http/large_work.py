"""Reads and tokenizes large bodies in threads of their own, in which keys take turns.

A text of megabytes takes seconds, and some sixty times its size in memory. In the threads that every request
uses, one key's texts would keep all others waiting, and as many at once as there are threads take gigabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from kvferry.shared.process.turns import Turns

SMALL_BYTES = 32 << 10
MOST_MIB, MOST_MIB_OF_ONE = 16, 8
"""Of bodies that are worked on at once. A larger one counts as the whole share of its key."""
_MIB = 1 << 20
_LEAST_MIB = -(-MOST_MIB_OF_ONE // max((os.cpu_count() or 1) // 2, 1))
"""What each counts as: one key's have half of the processors."""
_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of glibc, which would keep for itself what its threads have freed."""
_IDLE_S = 1.0
"""After the last large text; by then its request has been answered."""

T = TypeVar("T")


class BodyWork(Protocol):
    """Runs what is to be done with one request's body in a thread: `asyncio.to_thread` for a small one, else
    `LargeWork.run` with what is known of it."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return what `work` returns, or raise what it raises."""


class LargeWork:
    """For one event loop."""

    def __init__(self) -> None:
        self._turns = Turns(MOST_MIB, most_of_one=MOST_MIB_OF_ONE)
        self._threads = ThreadPoolExecutor(MOST_MIB // _LEAST_MIB, "kvferry-large-work")
        self._trimming: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Have each thread end after its current work."""
        if self._trimming is not None:
            self._trimming.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, owner: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Return or raise as `work` does. A caller that leaves keeps its place until the thread is done."""
        num_mib = max(-(-size_bytes // _MIB), _LEAST_MIB)
        await self._turns.take(owner, num_mib)
        loop = asyncio.get_running_loop()

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._leave, owner, num_mib, size_bytes)

        working = self._threads.submit(partial(_trimmed, work) if size_bytes > _MIB else work)
        working.add_done_callback(leave)
        return await asyncio.wrap_future(working)

    def _leave(self, owner: str, num_mib: int, size_bytes: int) -> None:
        self._turns.leave(owner, num_mib)
        if size_bytes > _MIB:
            if self._trimming is not None:
                self._trimming.cancel()
            loop = asyncio.get_running_loop()
            self._trimming = loop.call_later(_IDLE_S, self._threads.submit, _trim)


def _trim() -> None:
    if _TRIM is not None:
        _TRIM(0)


def _trimmed(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        _trim()
