"""The ZeroMQ channels: DEALER sockets that connect, a ROUTER that binds; tcp:// and ipc:// endpoints.

Place in the request's path: between machines, under `shared_memory.py`, which processes of one machine use.
Payloads are not copied in Python.

With keys both ends use CURVE, libzmq's own (https://rfc.zeromq.org/spec/26): a sender knows the receiver by
its role's public key, and a receiver admits only the role that may send to it (ZAP,
https://rfc.zeromq.org/spec/27). All traffic is encrypted, each connection with its own keys.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence, Set
from typing import Any

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvferry.shared.errors import ConfigurationError, TransferFailed
from kvferry.shared.process.serving import HANDSHAKE_S
from kvferry.shared.trust.certs import BlockKeys
from kvferry.shared.wire.channel import Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.frames import HEADER_BYTES
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES

BLOCKS_HIGH_WATER_MARK = 64
ANSWERS_HIGH_WATER_MARK = 4096
MAX_ANSWER_BYTES = 64 << 10
HEARTBEAT_INTERVAL_MS = 3000
HEARTBEAT_TIMEOUT_MS = 10000
MAX_RECONNECT_INTERVAL_MS = 1000
IDLE_CONNECTION_S = 30.0
BATCH_MESSAGES = 32
_SCHEMES = ("tcp://", "ipc://")
_WILDCARDS = ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")
_FAILED_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LOST_EVENTS = zmq.EVENT_DISCONNECTED | _FAILED_EVENTS
_CURVE_BYTES = 64
"""More than CURVE adds to a frame."""
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_TELL_INTERVAL_S = 10.0
_Socket = zmq.Socket[bytes]

_log = structlog.get_logger(__name__)


class _ZmqChannel:
    """A context, a poller, and a socket pair by which any thread wakes the polling one: ZeroMQ's sockets may
    only be used by their own thread.

    Args: keys: this worker's; None: whoever reaches the other end is believed.

    Attributes: refused: connections that were ended during their handshake: the other end had no key known
        here, or took too long.
    """

    def __init__(self, keys: BlockKeys | None) -> None:
        self.refused = 0
        self._keys = keys
        self._told_at_s = float("-inf")
        self._poller = zmq.Poller()
        self._context: zmq.Context[_Socket] | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def open(self) -> None:
        self._context = zmq.Context()
        self._poller.register(self._wake_reader.fileno(), zmq.POLLIN)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # already woken, or closed
            self._wake_writer.send(b"\0")

    def watch(self, descriptor: int, *, for_room: bool = False) -> None:
        """Let `poll` return also when a descriptor can be read, or written to if `for_room`."""
        self._poller.register(descriptor, zmq.POLLIN | zmq.POLLOUT if for_room else zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    def close(self) -> None:
        if self._context is not None:
            self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def _wait(self, timeout_s: float) -> None:
        self._poller.poll(int(timeout_s * 1000))
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _socket(self, kind: int, *, send_messages: int, receive_messages: int, max_bytes: int) -> _Socket:
        assert self._context is not None
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, send_messages)
        made.setsockopt(zmq.RCVHWM, receive_messages)
        made.setsockopt(zmq.MAXMSGSIZE, max(max_bytes, HEADER_BYTES) + (_CURVE_BYTES if self._keys else 0))
        made.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        return made

    def _connection_lost(self, monitor: _Socket) -> bool:
        """Read a monitor's events; return whether the connection is lost."""
        lost = False
        while monitor.poll(0):
            event = recv_monitor_message(monitor)["event"]
            lost = bool(event & _LOST_EVENTS) or lost
            if event & _FAILED_EVENTS:
                self._tell_refused()
        return lost

    def _tell_refused(self) -> None:
        """Log refused connections, but rarely: strangers must not be able to fill the log."""
        self.refused += 1
        if time.monotonic() - self._told_at_s > _TELL_INTERVAL_S:
            self._told_at_s = time.monotonic()
            _log.warning("block connections are refused: no key that is known here", refused=self.refused)


class ZmqConnectingChannel(_ZmqChannel):
    """A sender's channel: one DEALER and its monitor for each endpoint.

    The monitor reports a lost connection; the DEALER is then closed with everything queued on it, and the
    next `send` makes a new one, so nothing of a failed transfer is ever delivered late. A connection over
    which nothing is sent for IDLE_CONNECTION_S is closed.
    """

    def __init__(self, keys: BlockKeys | None = None) -> None:
        super().__init__(keys)
        self._dealers: dict[Peer, _Socket] = {}
        self._monitors: dict[Peer, _Socket] = {}
        self._used_at_s: dict[Peer, float] = {}
        self._blocked: set[Peer] = set()

    @property
    def peers(self) -> Set[Peer]:
        return self._dealers.keys()

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        dealer = self._dealers.get(peer) or self._connect(peer)
        self._used_at_s[peer] = time.monotonic()
        try:
            dealer.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            self._blocked.add(peer)
            self._poller.register(dealer, zmq.POLLIN | zmq.POLLOUT)
            return SendResult.BLOCKED
        return SendResult.SENT

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        self._wait(timeout_s)
        for peer in self._blocked:
            self._poller.register(self._dealers[peer], zmq.POLLIN)
        self._blocked.clear()
        events: list[Received | PeerLost] = []
        now_s = time.monotonic()
        for peer, dealer in tuple(self._dealers.items()):
            lost = self._connection_lost(self._monitors[peer])
            while (frames := _receive(dealer)) is not None:
                events.append(Received(peer, frames))
            if lost:
                events.append(PeerLost(peer))
            if lost or now_s - self._used_at_s[peer] > IDLE_CONNECTION_S:
                self._disconnect(peer)
        return events

    def close(self) -> None:
        for peer in tuple(self._dealers):
            self._disconnect(peer)
        super().close()

    def _connect(self, peer: Peer) -> _Socket:
        endpoint = peer.decode()
        if not endpoint.startswith(_SCHEMES):
            raise TransferFailed(
                f"endpoint is {endpoint!r}; tcp:// and ipc:// are allowed", reason="endpoint"
            )
        dealer = self._socket(
            zmq.DEALER,
            send_messages=BLOCKS_HIGH_WATER_MARK,
            receive_messages=ANSWERS_HIGH_WATER_MARK,
            max_bytes=MAX_ANSWER_BYTES,
        )
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        if self._keys is not None:
            secret = z85.encode(self._keys.secret)
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.peer_public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_INTERVAL_MS)
        monitor = dealer.get_monitor_socket(_LOST_EVENTS)
        self._dealers[peer], self._monitors[peer] = dealer, monitor
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self._disconnect(peer)
            raise TransferFailed(
                f"endpoint {endpoint!r} is not usable: {error}", reason="endpoint"
            ) from error
        return dealer

    def _disconnect(self, peer: Peer) -> None:
        dealer, monitor = self._dealers.pop(peer), self._monitors.pop(peer)
        self._used_at_s.pop(peer, None)
        self._blocked.discard(peer)
        self._poller.unregister(dealer)
        self._poller.unregister(monitor)
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)


class ZmqListeningChannel(_ZmqChannel):
    """A receiver's channel: one ROUTER; each connection is a peer. One that does not get through its
    handshake within HANDSHAKE_S is closed."""

    def __init__(self, bind: str, *, advertise: str = "", keys: BlockKeys | None = None) -> None:
        """
        Args:
            bind: `tcp://host:port` (port 0 picks a free one) or `ipc://path`.
            advertise: the address as peers reach it, needed where `bind` means every interface; as bound if
                empty.
            keys: this worker's; only its peers' role may connect.

        Raises:
            ConfigurationError: the address means every interface and none is advertised.
        """
        if bind.startswith(_WILDCARDS) and not advertise:
            raise ConfigurationError(
                f"block address {bind!r} means every interface; the address that peers reach must be"
                " advertised (tcp://host:port)"
            )
        super().__init__(keys)
        self._bind = bind
        self.endpoint = advertise
        self._router: _Socket | None = None
        self._monitor: _Socket | None = None
        self._doorkeeper: _Socket | None = None

    def open(self) -> None:
        if not self._bind.startswith(_SCHEMES):
            self.close()
            raise ConfigurationError(f"block address is {self._bind!r}; tcp:// and ipc:// are allowed")
        super().open()
        self._router = self._socket(
            zmq.ROUTER,
            send_messages=ANSWERS_HIGH_WATER_MARK,
            receive_messages=BLOCKS_HIGH_WATER_MARK,
            max_bytes=MAX_PAYLOAD_BYTES,
        )
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._keys is not None:
            self._ask_for_keys(self._router, self._keys)
        try:
            self._router.bind(self._bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(f"cannot listen for blocks at {self._bind!r}: {error}") from error
        self.endpoint = self.endpoint or self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(self._router, zmq.POLLIN)

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        assert self._router is not None
        try:
            self._router.send_multipart((peer, *frames), flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return SendResult.LOST
            raise
        return SendResult.SENT

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        assert self._router is not None
        self._wait(timeout_s)
        if self._monitor is not None and self._doorkeeper is not None:
            self._connection_lost(self._monitor)
            self._let_in(self._doorkeeper)
        events: list[Received | PeerLost] = []
        while len(events) < BATCH_MESSAGES and (frames := _receive(self._router)) is not None:
            events.append(Received(bytes(frames[0]), frames[1:]))
        return events

    def close(self) -> None:
        if self._router is not None:
            self._router.disable_monitor()
        for made in (self._monitor, self._router, self._doorkeeper):
            if made is not None:
                made.close(linger=0)
        super().close()

    def _ask_for_keys(self, router: _Socket, keys: BlockKeys) -> None:
        assert self._context is not None
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        # without a ZAP handler, libzmq admits anybody who knows this worker's public key
        self._doorkeeper = self._context.socket(zmq.REP)
        self._doorkeeper.bind(_ZAP_ENDPOINT)
        self._monitor = router.get_monitor_socket(_FAILED_EVENTS)
        self._poller.register(self._doorkeeper, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _let_in(self, doorkeeper: _Socket) -> None:
        """Answer libzmq's requests whether the proven owner of a key may connect."""
        assert self._keys is not None, "there is a doorkeeper"
        while (frames := _receive(doorkeeper)) is not None:
            version, request, _domain, _address, _identity, *proof = map(bytes, frames)
            is_known = proof == [b"CURVE", self._keys.peer_public]
            status = (b"200", b"OK") if is_known else (b"400", b"no key of the role that may send blocks")
            doorkeeper.send_multipart((version, request, *status, b"", b""))


def _receive(zmq_socket: _Socket) -> list[memoryview] | None:
    try:
        frames: list[Any] = zmq_socket.recv_multipart(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None
    return [frame.buffer for frame in frames]
