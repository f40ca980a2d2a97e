"""The channels between machines with keys: sealed TCP connections, also over ipc:// endpoints.

Place in the request's path: between machines, under `shared_memory.py`, which processes of one machine use.
Both ends prove that they have their role's key before anything is believed, and everything is encrypted.
Without keys `zmq.py` is in its place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from kvferry.shared.certs import BlockKeys
from kvferry.shared.errors import ConfigurationError, TransferFailed
from kvferry.shared.serving import HANDSHAKE_S, format_address, parse_address
from kvferry.shared.wire.channel import Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES
from kvferry.shared.wire.noise import Handshake, NotAuthentic
from kvferry.shared.wire.sealed_connection import ConnectionClosed, SealedConnection
from kvferry.shared.wire.zmq import (
    ANSWERS_HIGH_WATER_MARK,
    BATCH_MESSAGES,
    BLOCKS_HIGH_WATER_MARK,
    IDLE_CONNECTION_S,
    MAX_ANSWER_BYTES,
    MAX_RECONNECT_INTERVAL_MS,
    check_advertised,
)

MAX_UNPROVEN = 256
"""Connections at once whose other end has not proved its key; the oldest gives way."""
_CONNECT_S = 5.0
_FIRST_RECONNECT_S = 0.1
_BACKLOG = 256
_MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + (64 << 10)
_TELL_INTERVAL_S = 10.0
_ALLOWED = "tcp://host:port and ipc://path"

_log = structlog.get_logger(__name__)


class _SealedChannel:
    """Connections by peer, a poller, and a socket pair by which any thread wakes the one that polls."""

    def __init__(self, keys: BlockKeys) -> None:
        self._keys = keys
        self._poller = select.poll()
        self._connections: dict[Peer, SealedConnection] = {}
        self._cipher_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="block-cipher")
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def open(self) -> None:
        self._poller.register(self._wake_reader, select.POLLIN)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # already woken, or closed
            self._wake_writer.send(b"\0")

    def watch(self, descriptor: int, *, for_room: bool = False) -> None:
        """Let `poll` return also when a descriptor can be read, or written to if `for_room`."""
        self._poller.register(descriptor, select.POLLIN | select.POLLOUT if for_room else select.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    def close(self) -> None:
        for peer in tuple(self._connections):
            self._disconnect(peer)
        self._cipher_thread.shutdown(wait=False)
        self._wake_reader.close()
        self._wake_writer.close()

    def _wait(self, timeout_s: float) -> set[int]:
        ready = {descriptor for descriptor, _ in self._poller.poll(int(timeout_s * 1000))}
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        return ready

    def _add(self, peer: Peer, connected: socket.socket, *, initiates: bool, max_message_bytes: int) -> None:
        connection = self._connections[peer] = SealedConnection(
            connected,
            _handshake(self._keys, initiates=initiates),
            max_message_bytes=max_message_bytes,
            cipher_thread=self._cipher_thread,
        )
        self.watch(connection.socket.fileno(), for_room=connection.wants_room)

    def _disconnect(self, peer: Peer) -> None:
        connection = self._connections.pop(peer)
        self.unwatch(connection.socket.fileno())
        connection.socket.close()

    def _send(self, connection: SealedConnection, frames: Sequence[memoryview | bytes]) -> bool:
        """Whether the connection was still there. If not, `poll` returns what had come before and ends it."""
        try:
            connection.send(frames)
        except ConnectionClosed:
            return False
        if connection.wants_room:
            self.watch(connection.socket.fileno(), for_room=True)
        return True

    def _exchange(self, peer: Peer) -> list[Received | PeerLost]:
        """Send what waits and receive what has come, of one connection."""
        connection = self._connections[peer]
        events: list[Received | PeerLost] = []
        try:
            while len(events) < BATCH_MESSAGES and (frames := connection.receive()) is not None:
                events.append(Received(peer, frames))
                if connection.reuses_memory:
                    break
            if connection.wants_room:
                connection.flush()
            self.watch(connection.socket.fileno(), for_room=connection.wants_room)
        except TransferFailed as error:
            self._on_broken(connection, error)
            self._disconnect(peer)
            events.append(PeerLost(peer))
        return events

    def _on_broken(self, connection: SealedConnection, error: TransferFailed) -> None:
        if isinstance(error, NotAuthentic):
            _log.warning("a block connection is ended", error=error.message)


class SealedConnectingChannel(_SealedChannel):
    """A sender's channel: one connection for each endpoint.

        unknown ──dialled, in a thread──► greeting ──► ready ── lost, or idle ──► unknown
           ▲                 └── refused, no key ──┐
           └── after a while ──────────────────────┘

    What is queued on a lost connection is dropped. One over which nothing is sent for IDLE_CONNECTION_S is
    closed.
    """

    def __init__(self, keys: BlockKeys) -> None:
        """Args: keys: this worker's."""
        super().__init__(keys)
        self._dialling: set[Peer] = set()
        self._dialled: deque[tuple[Peer, socket.socket | None]] = deque()
        self._used_at_s: dict[Peer, float] = {}
        self._intervals_s: dict[Peer, float] = {}
        self._retry_at_s: dict[Peer, float] = {}
        self._is_closed = False

    @property
    def peers(self) -> Set[Peer]:
        """Those that are connected or being connected."""
        return self._connections.keys() | self._dialling

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        connection = self._connections.get(peer)
        if connection is None:
            self._dial(peer)
            return SendResult.BLOCKED
        if not connection.is_ready or connection.num_waiting >= BLOCKS_HIGH_WATER_MARK:
            return SendResult.BLOCKED
        self._used_at_s[peer] = time.monotonic()
        return SendResult.SENT if self._send(connection, frames) else SendResult.BLOCKED

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        ready = self._wait(timeout_s)
        self._take_dialled()
        events: list[Received | PeerLost] = []
        now_s = time.monotonic()
        for peer, connection in tuple(self._connections.items()):
            if connection.socket.fileno() in ready:
                events += self._exchange(peer)
                if connection.is_ready:
                    self._intervals_s.pop(peer, None)
            limit_s = IDLE_CONNECTION_S if connection.is_ready else HANDSHAKE_S
            if peer in self._connections and now_s - self._used_at_s[peer] > limit_s:
                self._disconnect(peer)
        return events

    def close(self) -> None:
        self._is_closed = True
        self._take_dialled()
        super().close()

    def _dial(self, peer: Peer) -> None:
        if peer in self._dialling or time.monotonic() < self._retry_at_s.get(peer, 0.0):
            return
        address = _address(peer.decode())
        if address is None:
            raise TransferFailed(f"endpoint is {peer.decode()!r}; {_ALLOWED} are allowed", reason="endpoint")
        self._dialling.add(peer)
        threading.Thread(target=self._connect, args=(peer, address), name="dial-blocks", daemon=True).start()

    def _connect(self, peer: Peer, address: tuple[str, int] | str) -> None:
        """A thread of its own, because a name is looked up."""
        connected: socket.socket | None = None
        try:
            if isinstance(address, str):
                connected = socket.socket(socket.AF_UNIX)
                connected.settimeout(_CONNECT_S)
                connected.connect(address)
            else:
                connected = socket.create_connection(address, timeout=_CONNECT_S)
        except OSError as error:
            _log.debug("a receiver of blocks is not reached", endpoint=peer.decode(), error=str(error))
            if connected is not None:
                connected.close()
                connected = None
        self._dialled.append((peer, connected))
        if self._is_closed and connected is not None:
            connected.close()
        self.wake()

    def _take_dialled(self) -> None:
        while self._dialled:
            peer, connected = self._dialled.popleft()
            self._dialling.discard(peer)
            interval_s = self._intervals_s.get(peer, _FIRST_RECONNECT_S)
            self._intervals_s[peer] = min(2 * interval_s, MAX_RECONNECT_INTERVAL_MS / 1000)
            self._retry_at_s[peer] = time.monotonic() + interval_s
            if connected is None:
                continue
            if self._is_closed:
                connected.close()
                continue
            self._used_at_s[peer] = time.monotonic()
            self._add(peer, connected, initiates=True, max_message_bytes=MAX_ANSWER_BYTES)


class SealedListeningChannel(_SealedChannel):
    """A receiver's channel; each connection is a peer, once it has proved its key.

    One that has not gets an answer only to the handshake's first 48 bytes, which may be a recording, has no
    large buffers, and is closed after HANDSHAKE_S.
    """

    def __init__(self, bind: str, *, advertise: str = "", keys: BlockKeys) -> None:
        """
        Args:
            bind: `tcp://host:port` (port 0 picks a free one) or `ipc://path`.
            advertise: the address as peers reach it, needed where `bind` means every interface; as bound if
                empty.
            keys: this worker's; only its peers' role may connect.

        Raises:
            ConfigurationError: the address means every interface and none is advertised.
        """
        check_advertised(bind, advertise)
        super().__init__(keys)
        self._bind = bind
        self.endpoint = advertise
        self._listener: socket.socket | None = None
        self._accepts_from_s: float | None = None
        self._unproven: dict[Peer, float] = {}
        self._numbers = itertools.count(1)
        self.refused = 0  # connections whose other end had no key, or sent what was not authentic
        self._told_at_s = 0.0

    def open(self) -> None:
        address = _address(self._bind)
        if address is None:
            self.close()
            raise ConfigurationError(f"block address is {self._bind!r}; {_ALLOWED} are allowed")
        try:
            self._listener = listener = _listen(address)
        except OSError as error:
            self.close()
            raise ConfigurationError(f"cannot listen for blocks at {self._bind!r}: {error}") from error
        super().open()
        listener.setblocking(False)
        self.watch(listener.fileno())
        if not self.endpoint:
            bound = listener.getsockname()
            self.endpoint = (
                f"ipc://{bound}" if isinstance(address, str) else f"tcp://{format_address(*bound[:2])}"
            )

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        connection = self._connections.get(peer)
        if connection is None or not connection.is_ready:
            return SendResult.LOST
        if connection.num_waiting >= ANSWERS_HIGH_WATER_MARK or not self._send(connection, frames):
            return SendResult.LOST
        return SendResult.SENT

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        ready = self._wait(timeout_s)
        self._accept()
        events: list[Received | PeerLost] = []
        for peer, connection in tuple(self._connections.items()):
            if connection.socket.fileno() in ready:
                events += self._exchange(peer)
                if connection.is_ready:
                    self._unproven.pop(peer, None)
        self._drop_unproven()
        return events

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        super().close()

    def _accept(self) -> None:
        assert self._listener is not None
        if self._accepts_from_s is not None:
            if time.monotonic() < self._accepts_from_s:
                return
            self._accepts_from_s = None
            self.watch(self._listener.fileno())
        for _ in range(_BACKLOG):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left, for example
                _log.warning("block connections are not accepted for a second", error=str(error))
                self._accepts_from_s = time.monotonic() + 1.0
                self.unwatch(self._listener.fileno())
                return
            peer = b"sealed/%d" % next(self._numbers)
            self._unproven[peer] = time.monotonic() + HANDSHAKE_S
            self._add(peer, accepted, initiates=False, max_message_bytes=_MAX_MESSAGE_BYTES)

    def _drop_unproven(self) -> None:
        """Close connections that took too long to prove their key, and the oldest where they are too many."""
        now_s = time.monotonic()
        while self._unproven:
            peer, until_s = next(iter(self._unproven.items()))
            if peer in self._connections:
                if until_s > now_s and len(self._unproven) <= MAX_UNPROVEN:
                    return
                self._disconnect(peer)
                self._on_refused("it proved no key in time")
            del self._unproven[peer]

    def _on_broken(self, connection: SealedConnection, error: TransferFailed) -> None:
        if not connection.is_ready:
            self._on_refused("it proved no key of the role that may send blocks")
        elif not isinstance(error, ConnectionClosed):
            self._on_refused(error.message)

    def _on_refused(self, why: str) -> None:
        """Count it; strangers must not be able to fill the log."""
        self.refused += 1
        if time.monotonic() - self._told_at_s > _TELL_INTERVAL_S:
            self._told_at_s = time.monotonic()
            _log.warning("a block connection is ended", reason=why, ended=self.refused)


def _handshake(keys: BlockKeys, *, initiates: bool) -> Handshake:
    sender, receiver = (keys.role, keys.peer_role) if initiates else (keys.peer_role, keys.role)
    prologue = f"kvferry blocks 1 {sender} {receiver}".encode()
    return Handshake(initiates=initiates, own=keys.secret, peer=keys.peer_public, prologue=prologue)


def _address(endpoint: str) -> tuple[str, int] | str | None:
    """Host and port, or a path; None if it is neither."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return rest
    try:
        return parse_address("endpoint", rest) if scheme == "tcp" else None
    except ConfigurationError:
        return None


def _listen(address: tuple[str, int] | str) -> socket.socket:
    if isinstance(address, str):
        if Path(address).is_socket():  # of a process that has ended
            os.unlink(address)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen(_BACKLOG)
            stack.pop_all()
        return listener
    host, port = address
    host = "0.0.0.0" if host == "*" else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
