"""The events of completions, from the engine's thread to the streams that the event loop reads."""

from __future__ import annotations

import asyncio
import contextlib

from kvferry.shared.control.messages import GenerateEvent
from kvferry.shared.errors import DeadlineExceeded, KvferryError


class EventStream:
    """A queue into the event loop of the task that creates and reads it. It needs no bound: a completion has
    a limited number of events."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[GenerateEvent | KvferryError] = asyncio.Queue()

    def put(self, event: GenerateEvent | KvferryError) -> None:
        """Add an event. An error is raised in the reader and ends the stream. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self, *, deadline_s: float) -> GenerateEvent:
        """Return the next event. Args: deadline_s: on the loop's clock. Raises: DeadlineExceeded: none came
        in time; KvferryError: the request failed."""
        try:
            async with asyncio.timeout_at(deadline_s):
                event = await self._queue.get()
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its completion ended") from None
        if isinstance(event, KvferryError):
            raise event
        return event


def deliver(events: list[tuple[EventStream, GenerateEvent]]) -> None:
    """Put one event into each of many streams, and wake every event loop once rather than for each."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EventStream, GenerateEvent]]] = {}
    for stream, event in events:
        by_loop.setdefault(stream._loop, []).append((stream, event))
    for loop, puts in by_loop.items():
        with contextlib.suppress(RuntimeError):  # closed: there is no reader any more
            loop.call_soon_threadsafe(_put_each, puts)


def _put_each(events: list[tuple[EventStream, GenerateEvent]]) -> None:
    for stream, event in events:
        stream._queue.put_nowait(event)
