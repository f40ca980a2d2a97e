"""The sending side of the block wire: the thread that sends the messages of all transfers over a channel.

Place in the request's path: prefill shipping a prompt, or decode returning history, opens a transfer
(`outgoing.py`) with a ticket; the thread sends what it queues as credit allows. How frames travel is not
decided here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import ConfigurationError, TransferFailed
from kvferry.shared.wire.channel import Channel, PeerLost, Received, SendResult
from kvferry.shared.wire.frames import HEADER_BYTES, NO_PAYLOAD, decode_message, encode_header, peek_key
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES, FrameHeader, Manifest, MessageType, TransferKey
from kvferry.shared.wire.outgoing import OutgoingTransfer

KEEPALIVE_INTERVAL_S = 2.0
"""How often an open transfer that sends nothing else sends a keepalive."""
TICK_S = 0.25
_CLOSE_TIMEOUT_S = 10.0

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class SendBuffer:
    """Bounds the host memory of unacknowledged tensor bytes over all transfers of a sender.

    A message's bytes are reserved before it is queued. While there is room they stay reserved until their
    transfer is acknowledged. When there is no room, bytes that receivers have reported as written are
    released, so that a transfer larger than the bound, or several that fill it together, still progress.

    Attributes:
        peer_bytes: bound for the transfers to one receiver, so that one which stalls leaves room for others.
        wake: makes the sender's thread look at the transfers.
        condition: guards the buffer and every transfer that uses it.
        transfers: those that use it. Only its methods that need no lock in Python are called without it.
    """

    limit_bytes: int
    peer_bytes: int
    wake: Callable[[], None]
    used_bytes: int = 0
    condition: threading.Condition = field(default_factory=threading.Condition)
    transfers: dict[TransferKey, OutgoingTransfer] = field(default_factory=dict)

    def has_room(self, peer: bytes, num_bytes: int) -> bool:
        """Return whether this many more bytes for a receiver fit. The caller has locked the condition."""
        of_peer = sum([other.reserved_bytes for other in self.transfers.values() if other.peer == peer])
        return self.used_bytes + num_bytes <= self.limit_bytes and of_peer + num_bytes <= self.peer_bytes


class BlockSender:
    """Opens transfers to any endpoint of its channel's transport. Any thread may call its methods.

        open ──► registered ──► thread: round robin over transfers, 4 MiB each ──► over, removed
                                   ▲ CREDIT, ACK, NACK, connection lost, silence

    The thread owns the channel. Transfers and the buffer share one condition, which is not locked while a
    message is sent. A transfer survives a lost connection if another one is made within RESUME_S.

    Attributes: buffer: of all transfers.
    """

    def __init__(self, channel: Channel, *, buffer_bytes: int, peer_bytes: int = 0, timeout_s: float) -> None:
        """
        Args:
            buffer_bytes: bound on unacknowledged blocks over all transfers.
            peer_bytes: bound over the transfers to one receiver; 0: the whole buffer.
            timeout_s: how long a receiver that owes an answer may be silent.

        Raises:
            ConfigurationError: the buffer has no room for a byte.
        """
        if buffer_bytes < 1:
            raise ConfigurationError(f"send buffer is {buffer_bytes} bytes; at least 1 is needed")
        self._channel = channel
        self.buffer = SendBuffer(buffer_bytes, peer_bytes or buffer_bytes, channel.wake)
        self._timeout_s = timeout_s
        self._transfers = self.buffer.transfers
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvferry-block-sender", daemon=True)
        self._thread.start()

    def open(
        self, ticket: Ticket, manifest: Manifest, *, timeout_s: float, keeps_failed: bool = False
    ) -> OutgoingTransfer:
        """Begin a transfer; does not wait for the receiver.

        Args:
            timeout_s: how long one block may wait for room in the buffer.
            keeps_failed: if the receiver fails, keep what is in the buffer for `OutgoingTransfer.redirect`.

        Raises:
            TransferFailed: the sender is closed; the key is in use, or not the ticket's; no credit is given.
            ProtocolMismatch: the manifest is out of range.
        """
        key = TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation)
        if manifest.key != key:
            raise TransferFailed(f"manifest is of {manifest.key}; the ticket of {key}", reason="key")
        if ticket.credit_bytes < 1:
            raise TransferFailed(
                f"credit is {ticket.credit_bytes} bytes; at least 1 is needed", reason="credit"
            )
        transfer = OutgoingTransfer(
            ticket=ticket,
            manifest=manifest,
            buffer=self.buffer,
            timeout_s=timeout_s,
            keeps_failed=keeps_failed,
        )
        with self.buffer.condition:
            if self._closed:
                raise TransferFailed("block sender is closed", reason="closed")
            if key in self._transfers:
                raise TransferFailed(f"a transfer of {key} is already open", reason="key")
            self._transfers[key] = transfer
        self._channel.wake()
        return transfer

    def close(self) -> None:
        """Fail the transfers that are not over, and stop. Idempotent."""
        with self.buffer.condition:
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
            with self.buffer.condition:
                self._closed = True
            for transfer in tuple(self._transfers.values()):
                transfer.end(TransferFailed("block sender is closed", reason="closed"))

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
        for transfer in tuple(self._transfers.values()):
            transfer.end(TransferFailed("block sender is closed", reason="closed"), tell="closed")
        self._pump()

    def _pump(self) -> bool:
        """Send of each transfer what credit and channel allow, up to the size of a block; return whether
        anything was sent, so that more may follow at once."""
        more = False
        for transfer in tuple(self._transfers.values()):
            is_over, sent_bytes = transfer.is_over, 0
            while transfer.queue and sent_bytes < MAX_PAYLOAD_BYTES and (message := transfer.next()):
                if not message.frames:
                    message.frames = (encode_header(message.header, message.payload), *message.payload)
                if not self._send(transfer, message.frames):
                    break
                transfer.sent(message)
                sent_bytes += HEADER_BYTES + message.tensor_bytes
                more = True
            if is_over:  # a receiver that could not be told now aborts by its idle timeout or the lost peer
                with self.buffer.condition:
                    self._transfers.pop(transfer.key, None)
        return more

    def _send(self, transfer: OutgoingTransfer, frames: Sequence[memoryview | bytes]) -> bool:
        try:
            result = self._channel.send(transfer.peer, frames)
        except TransferFailed as error:
            transfer.fail(error)
            return False
        if result is SendResult.LOST:
            self._on_peer_lost(transfer.peer)
        return result is SendResult.SENT

    def _on_received(self, event: Received) -> None:
        try:
            header, payload = decode_message(event.frames)
        except TransferFailed as error:
            broken = peek_key(event.frames)
            for transfer in tuple(self._transfers.values()):
                if transfer.peer == event.peer and (transfer.key == broken or broken is None):
                    transfer.fail(error, tell=error.reason)
            return
        addressed = self._transfers.get(header.key)
        if addressed is not None and addressed.peer == event.peer:
            addressed.on_message(header, payload[0])

    def _on_peer_lost(self, peer: bytes) -> None:
        for transfer in tuple(self._transfers.values()):
            if transfer.peer == peer:
                transfer.interrupted()

    def _tick(self) -> None:
        """Fail transfers whose receiver is silent or was not reached again; keep quiet ones alive."""
        for transfer in tuple(self._transfers.values()):
            if transfer.tick(self._timeout_s, KEEPALIVE_INTERVAL_S):
                header = encode_header(FrameHeader(type=MessageType.KEEPALIVE, key=transfer.key))
                self._send(transfer, (header, *NO_PAYLOAD))
