"""Waiting for one thing while other tasks may fail, and ending a task."""

from __future__ import annotations

import asyncio
from typing import Any

from kvferry.shared.errors import WorkerUnavailable

_CLOSE_TIMEOUT_S = 5.0


async def until(
    wanted: asyncio.Future[None],
    shipping: asyncio.Task[None],
    *others: asyncio.Task[None],
    patience_s: float,
) -> None:
    """Wait for one future while prefill ships and other tasks run; a failure of any of them ends the wait at
    once.

    Of two failures, a lost worker tells more than the transfer that broke with it.

    Args: patience_s: how long to wait once everything is shipped.
    Raises: WorkerUnavailable: that was not enough.
    """
    tasks = (shipping, *others)
    while not wanted.done():
        pending = {future for future in (wanted, *tasks) if not future.done()}
        timeout_s = patience_s if shipping.done() else None
        done, _ = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        failed = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        if failed:
            raise next((error for error in failed if isinstance(error, WorkerUnavailable)), failed[0])
        if not done:
            raise WorkerUnavailable(
                f"Decode did not say within {timeout_s} s that it has a transfer that ended", reason="silent"
            )


async def cancelled(task: asyncio.Task[Any]) -> None:
    """End a task, so that the stream it reads can be closed."""
    task.cancel()
    await asyncio.wait((task,), timeout=_CLOSE_TIMEOUT_S)
    if task.done() and not task.cancelled():
        task.exception()  # retrieved, because asyncio would log it otherwise
