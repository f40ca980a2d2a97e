"""One request's events, from whatever thread makes them to the asyncio task that streams them out."""

from __future__ import annotations

import asyncio
import contextlib

from kvferry.shared.control.messages import GenerateEvent
from kvferry.shared.errors import DeadlineExceeded, KvferryError


class EventStream:
    """An unbounded queue into one event loop; bounded in fact by the completion's length.

    Made by the task that reads it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[GenerateEvent | KvferryError] = asyncio.Queue()

    def put(self, event: GenerateEvent | KvferryError) -> None:
        """Any thread. An error is raised to the reader, and is the last thing it sees."""
        # a closed loop has no reader left to tell
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self, *, deadline_s: float) -> GenerateEvent:
        """The next event.

        Args: deadline_s: by the loop's clock.

        Raises:
            DeadlineExceeded: none came in time.
            KvferryError: the request failed.
        """
        try:
            async with asyncio.timeout_at(deadline_s):
                event = await self._queue.get()
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its completion ended") from None
        if isinstance(event, KvferryError):
            raise event
        return event
