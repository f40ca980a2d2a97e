"""The in-process channels: the same frames over queues, for services that share a process.

Place in the request's path: under sender and server where prefill and decode run in one process (the embedded
default, and tests). Payloads are passed by reference.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvferry.shared.errors import ConfigurationError, TransferFailed
from kvferry.shared.wire.channel import Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.receiver import DEFAULT_IDLE_TIMEOUT_S, BlockServer, BlockSink
from kvferry.shared.wire.sender import KEEPALIVE_INTERVAL_S, BlockSender

SCHEME = "inproc://"
MAX_QUEUED_MESSAGES = 64
BATCH_MESSAGES = 32
_RETRY_S = 0.005


class Mailbox:
    """One channel's bounded inbox: any thread may put, the channel's I/O thread takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._events: deque[Received | PeerLost] = deque()
        self._woken = False
        self._closed = False

    def put(self, event: Received | PeerLost, *, limit: int | None = None) -> SendResult:
        """BLOCKED if `limit` messages are waiting already, LOST if the mailbox is closed."""
        with self._condition:
            if self._closed:
                return SendResult.LOST
            if limit is not None and len(self._events) >= limit:
                return SendResult.BLOCKED
            self._events.append(event)
            self._condition.notify()
            return SendResult.SENT

    def take(self, timeout_s: float, *, limit: int) -> list[Received | PeerLost]:
        """Up to `limit` events; waits for one, or for `wake`."""
        with self._condition:
            if not self._events and not self._woken:
                self._condition.wait(timeout_s)
            self._woken = False
            events: list[Received | PeerLost] = []
            while self._events and len(events) < limit:
                events.append(self._events.popleft())
            return events

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._events.clear()


class InProcessHub:
    """Connects the senders and servers of one process: mailboxes by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.mailboxes: dict[Peer, Mailbox] = {}
        self._numbers = itertools.count(1)

    def server(
        self,
        sink: BlockSink,
        *,
        name: str = "",
        idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S,
        on_late_block: Callable[[], None] | None = None,
        on_failed: Callable[[str], None] | None = None,
    ) -> BlockServer:
        """A server at `inproc://name` (a number if empty). See `BlockServer`."""
        return BlockServer(
            InProcessListeningChannel(self, name),
            sink,
            idle_timeout_s=idle_timeout_s,
            on_late_block=on_late_block,
            on_failed=on_failed,
        )

    def sender(
        self,
        *,
        buffer_bytes: int,
        timeout_s: float,
        keepalive_interval_s: float = KEEPALIVE_INTERVAL_S,
    ) -> BlockSender:
        """A sender to this hub's servers. See `BlockSender`."""
        return BlockSender(
            InProcessConnectingChannel(self),
            buffer_bytes=buffer_bytes,
            timeout_s=timeout_s,
            keepalive_interval_s=keepalive_interval_s,
        )

    def register(self, name: Peer) -> Mailbox:
        """A new mailbox. Raises ConfigurationError if the name is taken."""
        with self._lock:
            if name in self.mailboxes:
                raise ConfigurationError(f"in-process endpoint {name.decode()!r} is already in use")
            mailbox = self.mailboxes[name] = Mailbox()
            return mailbox

    def new_name(self, prefix: str) -> Peer:
        """A name that no mailbox has."""
        return f"{prefix}{next(self._numbers)}".encode()

    def unregister(self, name: Peer) -> None:
        """Close a mailbox and notify all others."""
        with self._lock:
            gone = self.mailboxes.pop(name, None)
            others = tuple(self.mailboxes.values())
        if gone is not None:
            gone.close()
            for mailbox in others:
                mailbox.put(PeerLost(name))


class _InProcessChannel:
    """A mailbox of a hub and the peers it sends to. At most MAX_QUEUED_MESSAGES wait at a server."""

    def __init__(self, hub: InProcessHub, name: Peer) -> None:
        self._hub = hub
        self._name = name
        self._mailbox = hub.register(name)
        self.wake = self._mailbox.wake
        self._blocked = False

    def open(self) -> None:
        pass

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        mailbox = self._hub.mailboxes.get(peer)
        if mailbox is None:
            return SendResult.LOST
        limit = MAX_QUEUED_MESSAGES if peer.startswith(SCHEME.encode()) else None
        result = mailbox.put(Received(self._name, frames), limit=limit)
        self._blocked = self._blocked or result is SendResult.BLOCKED
        return result

    def poll(self, timeout_s: float) -> list[Received | PeerLost]:
        wait_s = min(timeout_s, _RETRY_S) if self._blocked else timeout_s
        self._blocked = False
        return self._mailbox.take(wait_s, limit=BATCH_MESSAGES)

    def close(self) -> None:
        self._hub.unregister(self._name)


class InProcessConnectingChannel(_InProcessChannel):
    """Implements `ConnectingChannel` over a hub."""

    def __init__(self, hub: InProcessHub) -> None:
        super().__init__(hub, hub.new_name("client/"))

    def connect(self, peer: Peer) -> None:
        if not peer.startswith(SCHEME.encode()):
            raise TransferFailed(f"endpoint is {peer.decode()!r}; {SCHEME} is allowed", reason="endpoint")

    def disconnect(self, peer: Peer) -> None:
        pass


class InProcessListeningChannel(_InProcessChannel):
    """Implements `ListeningChannel` over a hub."""

    def __init__(self, hub: InProcessHub, name: str) -> None:
        """Args: name: a number if empty."""
        super().__init__(hub, f"{SCHEME}{name}".encode() if name else hub.new_name(SCHEME))
        self.endpoint = self._name.decode()
