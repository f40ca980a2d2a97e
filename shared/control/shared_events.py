"""The router's end of the stream that carries the events of many calls of Generate (`event_streams.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from kvferry.shared.control.messages import EventsOfCalls, GenerateEvent
from kvferry.shared.errors import KvferryError, WorkerUnavailable

REOPEN_S = 1.0
"""How long after a stream has ended another one may be opened."""
UNKNOWN_S = 60.0
"""The same where the worker has never had one: those of the release before have none."""


class Ended:
    """A call's last event has come."""


ENDED = Ended()
Item = GenerateEvent | Ended | KvferryError | None
"""None: look at the call's own stream."""


class SharedEvents:
    """One stream from one worker, and a queue for each call whose events it carries.

        closed ──begin──► opening ──first message──► open ──error, end──► closed: its calls fail

    Calls that begin while it is not open use their own streams.

    Args: call: the method Events, with the id of a stream.
    """

    def __init__(self, call: Callable[[str], AsyncGenerator[EventsOfCalls, None]]) -> None:
        self._call = call
        self._queues: dict[str, asyncio.Queue[Item]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._next_try_s = 0.0
        self._patience_s = UNKNOWN_S
        self.stream_id = ""
        """Of the open stream; "" while there is none."""

    def begin(self) -> None:
        """Open the stream, unless it is open or was tried a moment ago. Does not wait."""
        if self._reader is None and time.monotonic() >= self._next_try_s:
            self._reader = asyncio.create_task(self._read())

    @contextmanager
    def queue(self, call_id: str) -> Iterator[asyncio.Queue[Item]]:
        """The events of a call, while in this context."""
        queue = self._queues[call_id] = asyncio.Queue()
        try:
            yield queue
        finally:
            del self._queues[call_id]

    async def close(self) -> None:
        """Close the stream. Idempotent."""
        if (reader := self._reader) is not None:
            reader.cancel()
            await asyncio.wait((reader,))

    async def _read(self) -> None:
        stream_id, error = secrets.token_hex(16), "ended its stream of events"
        try:
            async with aclosing(self._call(stream_id)) as messages:
                async for message in messages:
                    self.stream_id, self._patience_s = stream_id, REOPEN_S
                    self._hand_out(message)
        except KvferryError as failure:
            error = failure.message
        finally:
            self.stream_id, self._reader = "", None
            self._next_try_s = time.monotonic() + self._patience_s
            for queue in self._queues.values():
                queue.put_nowait(WorkerUnavailable(f"the decode worker {error}", reason="events"))

    def _hand_out(self, message: EventsOfCalls) -> None:
        queues = self._queues
        for its in message.events:
            # a call that this end has left may still send
            with contextlib.suppress(KeyError):
                queues[its.call_id].put_nowait(its.event)
        for call_id in message.ended:
            with contextlib.suppress(KeyError):
                queues[call_id].put_nowait(ENDED)
