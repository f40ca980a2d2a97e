"""The in-process channel: the same frames over queues, for services that share a process.

Place in the request's path: under sender and server where prefill and decode run in one process (the embedded
default, and tests). Payloads are passed by reference.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from kvferry.shared.wire.channel import Peer, PeerLost, Received, SendResult, ignore_transport
from kvferry.shared.wire.receiver import BlockServer, BlockSink

SCHEME = "inproc://"
MAX_QUEUED_MESSAGES = 64
_RETRY_S = 0.005


class InProcessHub:
    """Connects the senders and servers of one process: channels by name. Implements `BlockTransport`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.channels: dict[Peer, InProcessChannel] = {}
        self._numbers = itertools.count(1)

    def server(self, sink: BlockSink, *, on_late_block: Callable[[], None] | None = None) -> BlockServer:
        """Make a server at a new endpoint. See `BlockServer`."""
        return BlockServer(self.listening(), sink, on_late_block=on_late_block)

    def connecting(self, on_connected: Callable[[str], None] = ignore_transport) -> InProcessChannel:
        """Make a sender's channel to this hub's servers."""
        on_connected("in_process")
        return InProcessChannel(self, f"client/{next(self._numbers)}")

    def listening(self) -> InProcessChannel:
        """Make a receiver's channel at a new endpoint."""
        return InProcessChannel(self, f"{SCHEME}{next(self._numbers)}", limit=MAX_QUEUED_MESSAGES)

    def register(self, name: Peer, channel: InProcessChannel) -> None:
        """Add a channel, whose name must be unique."""
        with self._lock:
            self.channels[name] = channel

    def unregister(self, name: Peer) -> None:
        """Remove a channel and notify all others."""
        with self._lock:
            self.channels.pop(name, None)
            others = tuple(self.channels.values())
        for channel in others:
            channel.put(PeerLost(name))


class InProcessChannel:
    """An inbox, which any thread may fill, and the peers it sends to, by a hub. Implements `Channel` and
    `ListeningChannel`."""

    def __init__(self, hub: InProcessHub, name: str, *, limit: int | None = None) -> None:
        """Args: limit: how many messages may wait in the inbox; None: any number."""
        self.endpoint = name
        self._hub = hub
        self._name = name.encode()
        self._limit = limit
        self._condition = threading.Condition()
        self._inbox: list[Received | PeerLost] = []
        self._woken = self._closed = self._blocked = False
        hub.register(self._name, self)

    def open(self) -> None:
        pass

    def put(self, event: Received | PeerLost) -> SendResult:
        """Add an event. BLOCKED if too many messages are waiting, LOST if the channel is closed."""
        with self._condition:
            if self._closed:
                return SendResult.LOST
            if self._limit is not None and len(self._inbox) >= self._limit and isinstance(event, Received):
                return SendResult.BLOCKED
            self._inbox.append(event)
            self._condition.notify()
            return SendResult.SENT

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        channel = self._hub.channels.get(peer)
        if channel is None:
            return SendResult.LOST
        result = channel.put(Received(self._name, frames))
        self._blocked = self._blocked or result is SendResult.BLOCKED
        return result

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        with self._condition:
            if not self._inbox and not self._woken:
                self._condition.wait(min(timeout_s, _RETRY_S) if self._blocked else timeout_s)
            self._woken = self._blocked = False
            events, self._inbox = self._inbox, []
            return events

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self) -> None:
        self._hub.unregister(self._name)
        with self._condition:
            self._closed = True
            self._inbox.clear()
