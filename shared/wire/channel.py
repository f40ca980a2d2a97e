"""The transport under sender and server: how frames travel and how a thread waits for them.

Shared memory (`shared_memory.py`), ZeroMQ (`zmq.py`) and in-process queues (`in_process.py`) implement it.
Once open, a channel belongs to one I/O thread, which polls it, sends and closes it; other threads may call
`wake` only. Frames are not interpreted here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

Peer = bytes
"""For a connecting channel an endpoint; for a listening channel a name that the transport assigns."""


def ignore_transport(name: str) -> None:
    """Ignore the name of the transport to a receiver: a channel's default where nobody counts them."""


class SendResult(enum.Enum):
    """SENT: accepted by the channel. BLOCKED: no room, or not connected yet; the next `poll` returns when a
    retry may succeed. LOST: the peer is no longer connected."""

    SENT = "sent"
    BLOCKED = "blocked"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Received:
    """One message's frames, as views of the transport's own memory, which may change with the next `poll`."""

    peer: Peer
    frames: Sequence[memoryview | bytes]


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection is lost. Everything received over it has been returned before this."""

    peer: Peer


class Channel(Protocol):
    """Sends frames to peers and receives frames from them."""

    def open(self) -> None:
        """Make the sockets; a listening channel binds. Called once, before anything else.

        Raises:
            ConfigurationError: the address cannot be bound.
        """

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        """Send one message without waiting. A connecting channel connects first if it must. Large frames are
        not copied and must not change until the transfer is over.

        Raises:
            TransferFailed: the endpoint is not an address of this transport.
        """

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        """Wait for messages, lost connections, `wake`, or room for a message that was BLOCKED."""

    def wake(self) -> None:
        """Make the current or next `poll` return. Any thread may call it."""

    def close(self) -> None:
        """Close the connections and drop what is queued on them. The I/O thread's last call."""


class ListeningChannel(Channel, Protocol):
    """A receiver's channel."""

    @property
    def endpoint(self) -> str:
        """The address to put into tickets, after `open`."""


class Watching(Protocol):
    """Lets the channel above a channel between machines wait for descriptors."""

    def watch(self, descriptor: int, *, for_room: bool = False) -> None:
        """Let `poll` return also when a descriptor can be read, or written to if `for_room`."""

    def unwatch(self, descriptor: int) -> None: ...


class ConnectingNetwork(Channel, Watching, Protocol):
    """A sender's channel between machines."""

    @property
    def peers(self) -> Set[Peer]: ...


class ListeningNetwork(ListeningChannel, Watching, Protocol):
    """A receiver's channel between machines."""
