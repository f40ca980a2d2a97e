"""Tasks that outlive the request that began them: a turn's end, an abort told to a worker.

Keeps them referenced, logs what they raise, and ends them at shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from kvferry.shared.errors import KvferryError


class BackgroundTasks:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger(__name__)

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait for the tasks, then cancel those that are left."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=timeout_s + 1.0)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, KvferryError):
            self._log.warning("background task failed", task=task.get_name(), error=error.message)
        elif error is not None:
            self._log.error("background task failed unexpectedly", task=task.get_name(), exc_info=error)
