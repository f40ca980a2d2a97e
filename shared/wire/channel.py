"""The transport under sender and server: how frames travel and how a thread waits for them.

ZeroMQ (`zmq.py`) and in-process queues (`in_process.py`) implement it. A channel belongs to one I/O thread,
which opens it, polls it, sends and closes it; other threads may call `wake` only. Frames are not interpreted
here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Peer = bytes
"""To a connecting channel an endpoint; to a listening one a name that the transport gives."""


class SendResult(enum.Enum):
    """SENT: accepted by the channel. BLOCKED: not now; the next `poll` returns once it may be tried again.
    LOST: there is no such peer any more."""

    SENT = "sent"
    BLOCKED = "blocked"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Received:
    """One message's frames, as views of the transport's own memory."""

    peer: Peer
    frames: Sequence[memoryview | bytes]


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection is gone, after everything that came over it has been returned."""

    peer: Peer


class Channel(Protocol):
    """Frames to and from peers."""

    def open(self) -> None:
        """Make the sockets; bind where it listens. First call of the I/O thread.

        Raises:
            ConfigurationError: the address cannot be bound.
        """
        ...

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        """Never waits. Large frames are not copied and must stay as they are until the transfer is over."""
        ...

    def poll(self, timeout_s: float) -> list[Received | PeerLost]:
        """Wait for something to happen: messages, losses, `wake`, or room for what was BLOCKED."""
        ...

    def wake(self) -> None:
        """Make the current or next `poll` return. Any thread."""
        ...

    def close(self) -> None:
        """Close the connections and drop what is queued on them. Last call of the I/O thread."""
        ...


class ConnectingChannel(Channel, Protocol):
    """A sender's channel."""

    def connect(self, peer: Peer) -> None:
        """Begin to connect; sends are BLOCKED until it is done.

        Raises:
            TransferFailed: the endpoint is no address of this transport.
        """
        ...

    def disconnect(self, peer: Peer) -> None: ...


class ListeningChannel(Channel, Protocol):
    """A receiver's channel."""

    @property
    def endpoint(self) -> str:
        """The address to put into tickets, after `open`."""
        ...
