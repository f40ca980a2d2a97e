"""The sending side of the block wire: one I/O thread that sends every transfer's messages over a channel.

Place in the request's path: prefill shipping a prompt, or decode returning history, opens a transfer with a
ticket; this thread sends its messages as credit allows and gives it the receiver's answers. What tensors mean
and how frames travel is not decided here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import structlog

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import ConfigurationError, TransferFailed
from kvferry.shared.wire.channel import ConnectingChannel, Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.frames import NO_PAYLOAD, decode_message, encode_header, peek_key
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES, FrameHeader, Manifest, MessageType, TransferKey
from kvferry.shared.wire.transfer import OutgoingTransfer, SendBuffer

KEEPALIVE_INTERVAL_S = 2.0
IDLE_CONNECTION_S = 30.0
TICK_S = 0.25
_CLOSE_TIMEOUT_S = 10.0

_log = structlog.get_logger(__name__)


class BlockSender:
    """Opens transfers to any endpoint of its channel's transport. Any thread may call its methods.

        open ──► registered ──► thread: round robin over transfers, 4 MiB each ──► over, removed
                                   ▲ CREDIT, ACK, NACK, connection lost, silence

    The thread owns the channel. Transfers and the buffer share one condition, which is not locked while a
    message is sent. A connection stays open while a transfer uses it and IDLE_CONNECTION_S longer; losing it
    fails its transfers.
    """

    def __init__(
        self,
        channel: ConnectingChannel,
        *,
        buffer_bytes: int,
        timeout_s: float,
        keepalive_interval_s: float = KEEPALIVE_INTERVAL_S,
    ) -> None:
        """
        Args:
            buffer_bytes: bound on unacknowledged blocks over all transfers.
            timeout_s: how long a receiver that owes an answer may be silent.
            keepalive_interval_s: how often an open transfer that sends nothing else sends a keepalive.

        Raises:
            ConfigurationError: the buffer has no room for a byte.
        """
        if buffer_bytes < 1:
            raise ConfigurationError(f"send buffer is {buffer_bytes} bytes; at least 1 is needed")
        self._channel = channel
        self._buffer = SendBuffer(buffer_bytes)
        self._timeout_s = timeout_s
        self._keepalive_interval_s = keepalive_interval_s
        self._lock = threading.Lock()
        self._transfers: dict[TransferKey, OutgoingTransfer] = {}
        self._used_at_s: dict[Peer, float] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvferry-block-sender", daemon=True)
        self._thread.start()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of unacknowledged blocks over all transfers."""
        with self._buffer.condition:
            return self._buffer.used_bytes

    def open(self, ticket: Ticket, manifest: Manifest, *, timeout_s: float) -> OutgoingTransfer:
        """Begin a transfer; does not wait for the receiver.

        Args:
            timeout_s: how long one block may wait for room in the buffer.

        Raises:
            TransferFailed: the sender is closed, or the key is in use.
            ProtocolMismatch: the manifest is out of range.
        """
        transfer = OutgoingTransfer(
            ticket=ticket,
            manifest=manifest,
            buffer=self._buffer,
            timeout_s=timeout_s,
            wake=self._channel.wake,
        )
        with self._lock:
            if self._closed:
                raise TransferFailed("block sender is closed", reason="closed")
            if transfer.key in self._transfers:
                raise TransferFailed(f"a transfer of {transfer.key} is already open", reason="key")
            with self._buffer.condition:
                self._buffer.users.add(transfer)
            self._transfers[transfer.key] = transfer
        self._channel.wake()
        return transfer

    def close(self) -> None:
        """Fail the transfers that are not over, and stop. Idempotent."""
        with self._lock:
            self._closed = True
        self._channel.wake()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._channel.open()
            with contextlib.closing(self._channel):
                self._serve()
        except Exception:
            _log.exception("block sender stopped")
        finally:
            with self._lock:
                self._closed = True
            for transfer in self._snapshot():
                transfer.lost(TransferFailed("block sender is closed", reason="closed"))

    def _serve(self) -> None:
        next_tick_s = 0.0
        while not self._closed:
            more = self._pump()
            for event in self._channel.poll(0.0 if more else TICK_S):
                if isinstance(event, PeerLost):
                    self._on_peer_lost(event.peer)
                else:
                    self._on_received(event)
            if time.monotonic() >= next_tick_s:
                self._tick()
                next_tick_s = time.monotonic() + TICK_S
        for transfer in self._snapshot():
            transfer.fail(TransferFailed("block sender is closed", reason="closed"))
        self._pump()

    def _snapshot(self) -> list[OutgoingTransfer]:
        with self._lock:
            return list(self._transfers.values())

    def _pump(self) -> bool:
        """Send of each transfer what credit and channel allow, up to the size of a block; returns whether
        anything was sent, so that more may follow at once."""
        more = False
        with self._lock:
            transfers = tuple(self._transfers.values())
        for transfer in transfers:
            is_over = transfer.is_over
            count = 0
            messages = transfer.take(MAX_PAYLOAD_BYTES)
            for message in messages:
                if not message.frames:
                    payload = [frame for _, frame in message.payload]
                    message.frames = (encode_header(message.header, payload), *payload)
                if not self._send(transfer, message.frames):
                    break
                count += 1
            if messages:
                transfer.sent(count)
            more = more or count > 0
            if is_over:  # a receiver that could not be told now aborts by its idle timeout or the lost peer
                with self._lock:
                    del self._transfers[transfer.key]
        return more

    def _send(self, transfer: OutgoingTransfer, frames: Sequence[memoryview | bytes]) -> bool:
        peer = transfer.peer
        try:
            if peer not in self._used_at_s:
                self._channel.connect(peer)
            self._used_at_s[peer] = time.monotonic()
            result = self._channel.send(peer, frames)
        except TransferFailed as error:
            transfer.lost(error)
            return False
        if result is SendResult.LOST:
            self._on_peer_lost(peer)
        return result is SendResult.SENT

    def _on_received(self, event: Received) -> None:
        try:
            header, payload = decode_message(event.frames)
        except TransferFailed as error:
            broken = peek_key(event.frames)
            for transfer in self._snapshot():
                if transfer.peer == event.peer and (transfer.key == broken or broken is None):
                    transfer.fail(error)
            return
        with self._lock:
            addressed = self._transfers.get(header.key)
        if addressed is not None and addressed.peer == event.peer:
            addressed.on_message(header, payload[0])

    def _on_peer_lost(self, peer: Peer) -> None:
        if self._used_at_s.pop(peer, None) is not None:
            self._channel.disconnect(peer)
        for transfer in self._snapshot():
            if transfer.peer == peer:
                message = f"connection to {peer.decode()} was lost"
                transfer.lost(TransferFailed(message, reason="peer_lost"))

    def _tick(self) -> None:
        """Fail transfers whose receiver is silent, keep quiet ones alive, drop idle connections."""
        now_s = time.monotonic()
        busy = set()
        for transfer in self._snapshot():
            busy.add(transfer.peer)
            if transfer.silent_s(now_s) > self._timeout_s:
                message = f"{transfer.peer.decode()} was silent for more than {self._timeout_s} s"
                transfer.fail(TransferFailed(message, reason="timeout"))
            elif transfer.quiet_s(now_s) > self._keepalive_interval_s:
                header = encode_header(FrameHeader(type=MessageType.KEEPALIVE, key=transfer.key))
                if self._send(transfer, (header, *NO_PAYLOAD)):
                    transfer.keepalive_sent()
        for peer, used_at_s in tuple(self._used_at_s.items()):
            if peer not in busy and now_s - used_at_s > IDLE_CONNECTION_S:
                del self._used_at_s[peer]
                self._channel.disconnect(peer)
