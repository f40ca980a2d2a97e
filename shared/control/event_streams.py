"""Both ends of the streams that carry the events of many calls of Generate.

A decode step gives every running sequence a token. A message for each token would take more time than all
other work on it, at both ends; here a step's tokens travel in one message.

    router:  Events(stream_id) ──► open ──► Generate(names the stream) ──► Generate ... ──► closes it
    worker:            first message ◄┘        ticket, accepted: in its own stream
                                               tokens, finished, returned, end: in the shared one

A call's own stream stays: it has the request's deadline, its errors and its signs of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from kvferry.shared.control.messages import EventOfCall, EventsOfCalls, GenerateEvent
from kvferry.shared.errors import InvalidRequest, KvferryError, WorkerUnavailable

EVENTS_KEY = "kvferry-events"
"""Names the stream in a call's metadata; in the answer's metadata, says that the call uses it."""
REOPEN_S = 1.0
"""How long after the end of a stream another one may be opened."""
UNKNOWN_S = 60.0
"""The same where the worker has never had one: workers of the previous release have none."""


class EventStream:
    """At the worker: the events still to be sent of the calls that use one stream. For one event loop."""

    def __init__(self) -> None:
        self._events: list[EventOfCall] = []
        self._ended: list[str] = []
        self._news = asyncio.Event()
        self._num_calls = 0
        self._is_closed = False

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Let a call use the stream in this context."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self.wake()

    def put(self, call_id: str, event: GenerateEvent) -> None:
        """Add a call's next event. Raises: WorkerUnavailable: the stream is closed ("closed")."""
        if self._is_closed:
            raise WorkerUnavailable(
                "the router closed the stream that the call's events go to", reason="closed"
            )
        self._events.append(EventOfCall(call_id=call_id, event=event))
        self._news.set()

    def end(self, call_id: str) -> None:
        """Note that the call has no more events."""
        self._ended.append(call_id)
        self._news.set()

    def wake(self) -> None:
        """Make `take` return, perhaps without anything."""
        self._news.set()

    async def take(self) -> EventsOfCalls:
        """Wait for events, and return all that there are."""
        await self._news.wait()
        self._news.clear()
        taken = EventsOfCalls(events=tuple(self._events), ended=tuple(self._ended))
        self._events.clear()
        self._ended.clear()
        return taken

    @property
    def is_used(self) -> bool:
        """Return whether a call uses the stream, or something is left to be sent."""
        return bool(self._num_calls or self._events or self._ended)

    def close(self) -> None:
        """Send nothing from now on."""
        self._is_closed = True


class EventStreams:
    """The open streams of a worker, by the ids that routers have given them."""

    def __init__(self) -> None:
        self._streams: dict[str, EventStream] = {}
        self._is_ending = False

    def find(self, stream_id: str) -> EventStream | None:
        """Return the stream that a call names; None: its events go to the call's own stream."""
        return None if self._is_ending else self._streams.get(stream_id)

    async def events(self, stream_id: str, *, timeout_s: float) -> AsyncGenerator[EventsOfCalls, None]:
        """Serve the method Events. It has no deadline.

        Args: stream_id: the id that calls name; it must be hard to guess.
        Raises: InvalidRequest: the stream exists already.
        """
        if stream_id in self._streams:
            raise InvalidRequest(
                "stream_id is that of an open stream; it must be a new one", param="stream_id"
            )
        stream = self._streams[stream_id] = EventStream()
        try:
            # an empty message would only be a keepalive
            yield EventsOfCalls(ended=(stream_id,))
            while stream.is_used or not self._is_ending:
                taken = await stream.take()
                if taken.events or taken.ended:
                    yield taken
        finally:
            del self._streams[stream_id]
            stream.close()

    def end(self) -> None:
        """Prepare the worker's end: later calls use their own streams; each shared one ends with its last
        call."""
        self._is_ending = True
        for stream in self._streams.values():
            stream.wake()


class Ended:
    """A call's last event has come."""


ENDED = Ended()
Item = GenerateEvent | Ended | KvferryError | None
"""None: look at the call's own stream."""


class SharedEvents:
    """At the router: one stream from one worker, and a queue for each call whose events it carries.

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
        """The id of the open stream; "" while there is none."""

    def begin(self) -> None:
        """Open the stream, unless it is open or was tried a moment ago. Does not wait."""
        if self._reader is None and time.monotonic() >= self._next_try_s:
            self._reader = asyncio.create_task(self._read())

    @contextmanager
    def queue(self, call_id: str) -> Iterator[asyncio.Queue[Item]]:
        """Queue the events of a call while in this context."""
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
        for of_call in message.events:
            # a call that this end has left may still send events
            with contextlib.suppress(KeyError):
                queues[of_call.call_id].put_nowait(of_call.event)
        for call_id in message.ended:
            with contextlib.suppress(KeyError):
                queues[call_id].put_nowait(ENDED)
