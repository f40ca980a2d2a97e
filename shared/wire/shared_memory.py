"""The channels between processes: shared memory between those of one machine, a network between machines.

Place in the request's path: under sender and server of every worker process. A receiver listens at a network
and on an abstract Unix socket whose name follows from its endpoint. A sender that finds this socket uses it
and a ring of memory (`ring.py`). Neither has a name in a file system, so killed processes leave nothing.

Only processes of one user that share a network namespace (its loopback interface) find each other. Where the
platform is not Linux, the network carries everything.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence

import structlog

from kvferry.shared.wire.channel import (
    ConnectingNetwork,
    ListeningNetwork,
    Peer,
    PeerLost,
    Received,
    SendResult,
    ignore_transport,
)
from kvferry.shared.wire.ring import PACKETS_VERSION, RingReader, RingWriter
from kvferry.shared.wire.zmq import IDLE_CONNECTION_S

IS_SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create")
HANDSHAKE_S = 1.0
REFUSED_S = 5.0
"""How long a receiver that did not answer the handshake is reached over the network only."""
_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a Unix socket's peer."""

_log = structlog.get_logger(__name__)


class SharedMemoryConnectingChannel:
    """A sender's channel: a ring to each receiver on this machine, the network to the others.

        unknown ──socket found──► greeted ──answered──► ring ──lost, or idle──► unknown
           └── no socket, or no answer ──► network ──sent; then lost, or idle────────┘

    A transfer's connection never changes from one transport to the other: a receiver to which something was
    sent over the network is looked for again only when that connection is gone.
    """

    def __init__(
        self, network: ConnectingNetwork, *, on_connected: Callable[[str], None] = ignore_transport
    ) -> None:
        """Make the channel. Args: on_connected: gets "shared_memory" or "network" for each connection."""
        self._network = network
        self._on_connected = on_connected
        self._rings: dict[Peer, RingWriter] = {}
        self._over_network: set[Peer] = set()
        self._refused_until_s: dict[Peer, float] = {}

    def open(self) -> None:
        self._network.open()

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        ring = self._rings.get(peer) or self._connect(peer)
        if ring is None:
            result = self._network.send(peer, frames)
            if result is SendResult.SENT and peer not in self._over_network:
                self._over_network.add(peer)
                self._on_connected("network")
                _log.info("blocks are sent over the network", endpoint=peer.decode())
            return result
        result = ring.send(frames)
        if ring.is_full:
            self._network.watch(ring.socket.fileno(), for_room=True)
        return result

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        events: list[Received | PeerLost] = list(self._network.poll(timeout_s))
        self._over_network &= self._network.peers
        now_s = time.monotonic()
        for peer, ring in tuple(self._rings.items()):
            was_ready = ring.is_ready
            events += ring.receive(peer)
            if ring.is_full:
                ring.is_full = False
                self._network.watch(ring.socket.fileno())
            if ring.is_ready and not was_ready:
                self._on_connected("shared_memory")
                _log.info("blocks are sent through shared memory", endpoint=peer.decode())
            if not ring.is_ready and (ring.is_lost or now_s - ring.opened_s > HANDSHAKE_S):
                self._refused_until_s[peer] = now_s + REFUSED_S
                self._disconnect(peer)
            elif ring.is_lost:
                events.append(PeerLost(peer))
                self._disconnect(peer)
            elif now_s - ring.used_s > IDLE_CONNECTION_S:
                self._disconnect(peer)
        return events

    def wake(self) -> None:
        self._network.wake()

    def close(self) -> None:
        for peer in tuple(self._rings):
            self._disconnect(peer)
        self._network.close()

    def _connect(self, peer: Peer) -> RingWriter | None:
        """Make a new connection, if the receiver is on this machine."""
        if peer in self._over_network or time.monotonic() < self._refused_until_s.get(peer, 0.0):
            return None
        address = socket_address(peer.decode())
        if address is None:
            return None
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connecting.setblocking(False)
            connecting.connect(address)
            if not _is_of_this_user(connecting):
                raise PermissionError("the receiver belongs to another user")
            ring = RingWriter(connecting)
        except OSError:
            connecting.close()
            return None
        self._refused_until_s.pop(peer, None)
        self._rings[peer] = ring
        self._network.watch(connecting.fileno())
        return ring

    def _disconnect(self, peer: Peer) -> None:
        ring = self._rings.pop(peer)
        self._network.unwatch(ring.socket.fileno())
        ring.socket.close()


class SharedMemoryListeningChannel:
    """A receiver's channel: the rings of senders on this machine, and a network."""

    def __init__(self, network: ListeningNetwork) -> None:
        self._network = network
        self._listener: socket.socket | None = None
        self._rings: dict[Peer, RingReader] = {}
        self._numbers = itertools.count(1)

    @property
    def endpoint(self) -> str:
        return self._network.endpoint

    def open(self) -> None:
        self._network.open()
        address = socket_address(self.endpoint)
        if address is None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            _log.warning("blocks are not received through shared memory", error=str(error))
            return
        self._listener = listener
        self._network.watch(listener.fileno())

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        ring = self._rings.get(peer)
        if ring is None:
            return self._network.send(peer, frames)
        return ring.answer(frames)

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        for ring in self._rings.values():
            ring.report()
        events: list[Received | PeerLost] = list(self._network.poll(timeout_s))
        self._accept()
        for peer, ring in tuple(self._rings.items()):
            events += ring.receive(peer)
            if ring.is_lost:
                events.append(PeerLost(peer))
                self._disconnect(peer)
        return events

    def wake(self) -> None:
        self._network.wake()

    def close(self) -> None:
        if self._listener is not None:
            self._stop_listening(self._listener)
        for peer in tuple(self._rings):
            self._disconnect(peer)
        self._network.close()

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # for example, no descriptor is left
                _log.warning("blocks of other senders are received over the network", error=str(error))
                self._stop_listening(self._listener)
                return
            if not _is_of_this_user(accepted):
                accepted.close()
                continue
            self._rings[b"ring/%d" % next(self._numbers)] = RingReader(accepted)
            self._network.watch(accepted.fileno())

    def _stop_listening(self, listener: socket.socket) -> None:
        self._network.unwatch(listener.fileno())
        listener.close()
        self._listener = None

    def _disconnect(self, peer: Peer) -> None:
        ring = self._rings.pop(peer)
        self._network.unwatch(ring.socket.fileno())
        ring.socket.close()


def socket_address(endpoint: str) -> str | None:
    """Return the abstract socket of the receiver at an endpoint, which only its network namespace has.

    An ipc endpoint is named by its file, because its path may mean different files in two containers.
    """
    if not IS_SUPPORTED:
        return None
    if endpoint.startswith("ipc://"):
        try:
            file = os.stat(endpoint.removeprefix("ipc://"))
        except (OSError, ValueError):
            return None
        endpoint = f"ipc {file.st_dev} {file.st_ino}"
    return (
        f"\0kvferry-blocks-{PACKETS_VERSION}-{hashlib.blake2b(endpoint.encode(), digest_size=16).hexdigest()}"
    )


def _is_of_this_user(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
