"""The ZeroMQ channels: DEALER sockets that connect, a ROUTER that binds; tcp:// and ipc:// endpoints.

Place in the request's path: between machines (tcp) or processes (ipc), under sender and server. Payloads are
not copied in Python. No authentication and no encryption: for private networks.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.shared.errors import ConfigurationError, TransferFailed
from kvferry.shared.wire.channel import Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.frames import HEADER_BYTES
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES

BLOCKS_HIGH_WATER_MARK = 64
ANSWERS_HIGH_WATER_MARK = 4096
MAX_ANSWER_BYTES = 64 << 10
HEARTBEAT_INTERVAL_MS = 3000
HEARTBEAT_TIMEOUT_MS = 10000
MAX_RECONNECT_INTERVAL_MS = 1000
BATCH_MESSAGES = 32
_LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_WILDCARDS = ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")


class Wakeup:
    """Lets any thread wake the one that polls the sockets: `fileno` is readable from `set` until `clear`. A
    socket pair, since ZeroMQ sockets may be used by their own thread only."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        """Any thread; no effect after `close`."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class ZmqConnectingChannel:
    """Implements `ConnectingChannel`: one DEALER and its monitor for each endpoint.

    The monitor reports a lost connection; the DEALER is then closed with everything queued on it, and the
    next `connect` makes a new one, so nothing of a failed transfer is ever delivered late.
    """

    def __init__(self) -> None:
        self._wakeup = Wakeup()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._poller = zmq.Poller()
        self._dealers: dict[Peer, zmq.Socket[bytes]] = {}
        self._monitors: dict[Peer, zmq.Socket[bytes]] = {}
        self._blocked: set[Peer] = set()

    def open(self) -> None:
        self._context = zmq.Context()
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)

    def connect(self, peer: Peer) -> None:
        endpoint = peer.decode()
        if not endpoint.startswith(("tcp://", "ipc://")):
            raise TransferFailed(
                f"endpoint is {endpoint!r}; tcp:// and ipc:// are allowed", reason="endpoint"
            )
        assert self._context is not None
        dealer = self._context.socket(zmq.DEALER)
        _set_options(
            dealer,
            send_messages=BLOCKS_HIGH_WATER_MARK,
            receive_messages=ANSWERS_HIGH_WATER_MARK,
            max_frame_bytes=MAX_ANSWER_BYTES,
        )
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_INTERVAL_MS)
        monitor = dealer.get_monitor_socket(_LOST_EVENTS)
        self._dealers[peer], self._monitors[peer] = dealer, monitor
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self.disconnect(peer)
            raise TransferFailed(
                f"endpoint {endpoint!r} is not usable: {error}", reason="endpoint"
            ) from error

    def disconnect(self, peer: Peer) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is None:
            return
        monitor = self._monitors.pop(peer)
        self._blocked.discard(peer)
        self._poller.unregister(dealer)
        self._poller.unregister(monitor)
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        dealer = self._dealers.get(peer)
        if dealer is None:
            return SendResult.LOST
        try:
            dealer.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        except zmq.Again:
            self._blocked.add(peer)
            self._poller.register(dealer, zmq.POLLIN | zmq.POLLOUT)
            return SendResult.BLOCKED
        return SendResult.SENT

    def poll(self, timeout_s: float) -> list[Received | PeerLost]:
        self._poller.poll(int(timeout_s * 1000))
        self._wakeup.clear()
        for peer in self._blocked:
            self._poller.register(self._dealers[peer], zmq.POLLIN)
        self._blocked.clear()
        events: list[Received | PeerLost] = []
        for peer, dealer in self._dealers.items():
            lost = _connection_lost(self._monitors[peer])
            while (frames := _receive(dealer)) is not None:
                events.append(Received(peer, frames))
            if lost:
                events.append(PeerLost(peer))
        return events

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        for peer in tuple(self._dealers):
            self.disconnect(peer)
        if self._context is not None:
            self._context.term()
        self._wakeup.close()


class ZmqListeningChannel:
    """Implements `ListeningChannel`: one ROUTER; each connection is a peer."""

    def __init__(self, bind: str, *, advertise: str = "") -> None:
        """
        Args:
            bind: `tcp://host:port` (port 0 picks a free one) or `ipc://path`.
            advertise: the address as peers reach it, needed where `bind` means every interface; as bound if
                empty.

        Raises:
            ConfigurationError: the address means every interface and none is advertised.
        """
        if bind.startswith(_WILDCARDS) and not advertise:
            raise ConfigurationError(
                f"block address {bind!r} means every interface; the address that peers reach must be"
                " advertised (tcp://host:port)"
            )
        self._bind = bind
        self._endpoint = advertise
        self._wakeup = Wakeup()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def open(self) -> None:
        if not self._bind.startswith(("tcp://", "ipc://")):
            self._wakeup.close()
            raise ConfigurationError(f"block address is {self._bind!r}; tcp:// and ipc:// are allowed")
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        _set_options(
            self._router,
            send_messages=ANSWERS_HIGH_WATER_MARK,
            receive_messages=BLOCKS_HIGH_WATER_MARK,
            max_frame_bytes=MAX_PAYLOAD_BYTES,
        )
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.bind(self._bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(f"cannot listen for blocks at {self._bind!r}: {error}") from error
        self._endpoint = self._endpoint or self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        assert self._router is not None
        try:
            self._router.send_multipart((peer, *frames), flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return SendResult.LOST
            raise
        return SendResult.SENT

    def poll(self, timeout_s: float) -> list[Received | PeerLost]:
        assert self._router is not None
        self._poller.poll(int(timeout_s * 1000))
        self._wakeup.clear()
        events: list[Received | PeerLost] = []
        while len(events) < BATCH_MESSAGES and (frames := _receive(self._router)) is not None:
            events.append(Received(bytes(frames[0]), frames[1:]))
        return events

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        if self._router is not None:
            self._router.close(linger=0)
        if self._context is not None:
            self._context.term()
        self._wakeup.close()


def _set_options(
    zmq_socket: zmq.Socket[Any], *, send_messages: int, receive_messages: int, max_frame_bytes: int
) -> None:
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.SNDHWM, send_messages)
    zmq_socket.setsockopt(zmq.RCVHWM, receive_messages)
    zmq_socket.setsockopt(zmq.MAXMSGSIZE, max(max_frame_bytes, HEADER_BYTES))
    zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def _receive(zmq_socket: zmq.Socket[Any]) -> list[memoryview] | None:
    try:
        frames = zmq_socket.recv_multipart(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None
    return [frame.buffer for frame in frames]


def _connection_lost(monitor: zmq.Socket[Any]) -> bool:
    lost = False
    while monitor.poll(0):
        lost = bool(recv_monitor_message(monitor)["event"] & _LOST_EVENTS) or lost
    return lost
