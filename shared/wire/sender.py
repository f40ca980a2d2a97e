"""The sending side of the block wire: transfers, and the I/O thread that sends their messages over a channel.

Place in the request's path: prefill shipping a prompt, or decode returning history, opens a transfer with a
ticket, queues its layers and waits for the acknowledgement; the thread sends as credit allows. What tensors
mean and how frames travel is not decided here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import structlog
import torch
from torch import Tensor

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import (
    Cancelled,
    ConfigurationError,
    KvferryError,
    LeaseExpired,
    MalformedMessage,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.wire.channel import Channel, PeerLost, Received, SendResult
from kvferry.shared.wire.frames import (
    HEADER_BYTES,
    NO_PAYLOAD,
    TransferCursor,
    decode_message,
    decode_nack,
    encode_abort,
    encode_end,
    encode_header,
    encode_layer,
    encode_manifest,
    peek_key,
)
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    RESEND_S,
    RESUME_S,
    TENSOR_DTYPE_BYTES,
    TENSOR_KINDS,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    MessageType,
    NamedTensor,
    TensorHeader,
    TransferKey,
)

KEEPALIVE_INTERVAL_S = 2.0
TICK_S = 0.25
_CLOSE_TIMEOUT_S = 10.0
_DTYPE_NAMES = {getattr(torch, name): name for name in TENSOR_DTYPE_BYTES}

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Message:
    """A message to send.

    Attributes:
        payload, kinds: its payload's frames, and the kind under which each is counted.
        tensor_bytes: how much of the payload credit and buffer count.
        frames: what is sent; made by the sender's thread, which alone uses it.
        was_sent: whether it was sent over a connection that was lost.
    """

    header: FrameHeader
    payload: list[memoryview]
    kinds: list[str]
    tensor_bytes: int = 0
    frames: tuple[memoryview | bytes, ...] = ()
    was_sent: bool = False


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


class OutgoingTransfer:
    """A transfer being sent. Its methods may be called from any thread.

        open ──finish()──► finished ──ACK──► over, acknowledged
          │                    │
          ├───── abort() ──────┴──► over, Cancelled        (the receiver is told)
          └── NACK, silence, connection not replaced, sender closed, misuse ──► over, another error
                                                           (the receiver is told unless it said so)

        queued ──next, sent──► unacknowledged ──► released: the receiver has written it and the buffer needs
          ▲                        │              room, or the transfer is over
          ├── connection lost ─────┤ over a new one the manifest is sent again; CREDIT says where to go on
          └── failed ──redirect()──┘ all of it is sent to another receiver, if nothing was released and
                                     `keeps_failed`; over where nobody redirects it within RESEND_S

    The memory of what is sent is the caller's tensor (CPU, contiguous), else a host copy of its part. The
    caller must not change a tensor that it has passed to `send_layer` until it is released. In flight are the
    tensor bytes sent less those that the receiver reported as written; never above the credit.

    Attributes:
        is_over: whether nothing is sent any more but the message that tells the receiver.
        queue: messages to send; the thread may look whether there are any without the lock.
        resent_bytes: tensor bytes that were sent more than once.
    """

    def __init__(
        self,
        *,
        ticket: Ticket,
        manifest: Manifest,
        buffer: SendBuffer,
        timeout_s: float,
        keeps_failed: bool = False,
    ) -> None:
        self.key = TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation)
        self.peer = ticket.endpoint.encode()
        if manifest.key != self.key:
            raise TransferFailed(f"manifest is of {manifest.key}; the ticket of {self.key}", reason="key")
        if ticket.credit_bytes < 1:
            raise TransferFailed(
                f"credit is {ticket.credit_bytes} bytes; at least 1 is needed", reason="credit"
            )
        self._credit_bytes = ticket.credit_bytes
        self._message_bytes = min(MAX_PAYLOAD_BYTES, ticket.credit_bytes, buffer.peer_bytes)
        self._buffer = buffer
        self._condition = buffer.condition
        self._timeout_s = timeout_s
        self.is_over = False
        self._end: EndRecord | None = None
        self._error: KvferryError | None = None
        self._cursor = TransferCursor(manifest.num_layers)
        self._manifest = self._record(MessageType.MANIFEST, encode_manifest(manifest))
        self._plain_manifest = manifest
        self.queue = deque([self._manifest])
        self._lost_at_s: float | None = None  # while the receiver has not answered over a new connection
        self._keeps_failed = keeps_failed  # while no message is released
        self._failure: tuple[TransferFailed, float] | None = None  # while it waits for another receiver
        self.resent_bytes = 0
        self._is_accepted = False  # whether the receiver has answered the manifest with credit
        self._receiver_may_know = False  # whether the thread has begun to send
        self._unacknowledged: deque[Message] = deque()
        self._reserved_bytes = self._sent_bytes = self._written_bytes = self._next_sequence = 0
        self._bytes_by_kind = dict.fromkeys((*TENSOR_KINDS, "manifest"), 0)
        self._first_sent_s: float | None = None  # of tensor bytes, or of the end where there are none
        self._acknowledged_s = 0.0
        self._last_sent_s = self._waiting_since_s = time.monotonic()

    # ---- the caller's side -------------------------------------------------------------------------------

    def send_layer(self, layer: int, tensors: Sequence[NamedTensor]) -> None:
        """Queue a layer: its header with as many bytes of its tensors as one message carries, the rest in
        blocks. Waits while the receiver's credit is used up and the buffer is full. A misuse (order, dtype,
        name) fails the transfer.

        Args:
            layer: 0, 1, 2, ... one after another.
            tensors: contiguous, on any device; what is on other devices is copied to the host part by part.

        Raises:
            TransferFailed: the peer refused, was lost or was silent past the timeout; the buffer had no room
                in time; or a misuse.
            Cancelled: `abort` was called.
        """
        try:
            record = LayerHeader(layer=layer, tensors=tuple(map(_tensor_header, tensors)))
            for number, (num_bytes, parts, kinds) in enumerate(_cut(tensors, self._message_bytes)):
                with self._condition:
                    self._reserve(num_bytes)
                    header = self._advance(record, num_bytes, is_first=number == 0)
                    encoded = [] if number else [memoryview(encode_layer(record))]
                payload = encoded + [part.cpu().numpy().data for part in parts]
                self._push(Message(header, payload, ["manifest"] * len(encoded) + kinds, num_bytes))
        except TransferFailed as error:
            self.end(error, tell=error.reason)
            raise

    def finish(self, end: EndRecord) -> None:
        """Queue the end record; the transfer fills in its key and totals. Raises as `send_layer`."""
        with self._condition:
            self._check_open()
            if self._end is not None:
                raise TransferFailed(f"transfer {self.key} is already finished", reason="order")
            try:
                cursor = self._cursor
                cursor.check_complete()
                num_blocks, payload_bytes = cursor.num_blocks, cursor.payload_bytes
                end = replace(end, key=self.key, num_blocks=num_blocks, payload_bytes=payload_bytes)
                self._push(self._record(MessageType.END, encode_end(end)))
                self._end = end
            except TransferFailed as error:
                self.end(error, tell=error.reason)
                raise

    def wait(self, timeout_s: float) -> float:
        """Wait for the acknowledgement; returns the seconds to it from the first tensor bytes. If none
        comes in time the transfer fails. Raises as `send_layer`."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.is_over, timeout_s):
                message = f"transfer was not acknowledged within {timeout_s} s"
                self.end(TransferFailed(message, reason="timeout"), tell="timeout")
            if self._error is not None:
                self._check_open()
            return 0.0 if self._first_sent_s is None else self._acknowledged_s - self._first_sent_s

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is so of transfers of one sender, or for so long."""
        with self._condition:
            self._condition.wait_for(condition, timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether it is over, and not acknowledged."""
        return self._error is not None

    def abort(self, reason: str) -> None:
        """Abort: the receiver is told and the buffer is freed. Idempotent; no effect once acknowledged."""
        if not self.is_over:
            self.end(Cancelled(f"transfer was aborted: {reason}", reason="aborted"), tell=reason)

    def redirect(self, ticket: Ticket) -> None:
        """Send everything again to another receiver, and go on there.

        Args: ticket: its reservation, for what the manifest says.

        Raises:
            TransferFailed: a part is no longer in the buffer, or the transfer is over ("resend").
        """
        with self._condition:
            key = TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation)
            if self.is_over or not self._keeps_failed or ticket.credit_bytes < self._message_bytes:
                raise TransferFailed(
                    f"transfer {self.key} cannot be sent again with {ticket.credit_bytes} bytes of credit;"
                    f" all of it must be in the buffer, and the credit at least {self._message_bytes}",
                    reason="resend",
                )
            self._rewind()
            del self._buffer.transfers[self.key]
            self.key, self.peer, self._credit_bytes = key, ticket.endpoint.encode(), ticket.credit_bytes
            self._plain_manifest = replace(self._plain_manifest, key=key)
            self._manifest = self._record(MessageType.MANIFEST, encode_manifest(self._plain_manifest))
            # New messages, because the thread may be sending one of the old ones.
            queue = [replace(old, header=replace(old.header, key=key), frames=()) for old in self.queue]
            self.queue.clear()
            self.queue.extend((self._manifest, *queue[1:]))
            if self._end is not None:
                self._end = replace(self._end, key=key)
                self.queue[-1] = self._record(MessageType.END, encode_end(self._end))
            self._written_bytes = self._next_sequence = 0
            self._lost_at_s = self._failure = None
            self._is_accepted = False
            self._waiting_since_s = time.monotonic()
            self._buffer.transfers[key] = self
            self._buffer.wake()

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes sent so far. A tensor's bytes count under its kind; all the rest is "manifest": the manifest,
        layer headers and end record, and the header frames of these and of blocks."""
        with self._condition:
            return dict(self._bytes_by_kind)

    def _advance(self, layer: LayerHeader, num_bytes: int, *, is_first: bool) -> FrameHeader:
        """The header of the layer's next message, once the cursor has passed it."""
        cursor, sequence = self._cursor, self._cursor.sequence
        if is_first:
            cursor.pass_layer(sequence, layer, num_bytes)
            return FrameHeader(type=MessageType.LAYER, key=self.key, sequence=sequence)
        header = FrameHeader(
            type=MessageType.BLOCK,
            key=self.key,
            sequence=sequence,
            layer=layer.layer,
            total_bytes=cursor.layer_bytes,
            offset=cursor.offset,
        )
        cursor.pass_block(header, num_bytes)
        return header

    def _reserve(self, num_bytes: int) -> None:
        """Wait until the bytes fit into the buffer. The caller has locked the condition."""
        buffer = self._buffer

        def has_room() -> bool:
            if buffer.used_bytes + num_bytes > buffer.limit_bytes:
                return False
            if buffer.peer_bytes == buffer.limit_bytes:
                return True
            others = tuple(buffer.transfers.values())
            mine_bytes = sum([its._reserved_bytes for its in others if its.peer == self.peer])
            return mine_bytes + num_bytes <= buffer.peer_bytes

        def fits() -> bool:
            if has_room():
                return True
            self._check_open()
            for transfer in tuple(buffer.transfers.values()):
                transfer.release_written()
            return has_room()

        if not has_room() and not self._condition.wait_for(fits, self._timeout_s):
            raise TransferFailed(
                f"no room for a block of {num_bytes} bytes within {self._timeout_s} s; send buffer holds"
                f" {buffer.used_bytes} of at most {buffer.limit_bytes}",
                reason="buffer_full",
            )
        if self._error is not None or self.is_over:
            self._check_open()
        buffer.used_bytes += num_bytes
        self._reserved_bytes += num_bytes

    def _record(self, kind: MessageType, record: bytes) -> Message:
        return Message(FrameHeader(type=kind, key=self.key), [memoryview(record)], ["manifest"])

    def _push(self, message: Message) -> None:
        with self._condition:
            if self._error is not None or self.is_over:
                self._check_open()
            if message.header.key != self.key:  # redirected since the header was made
                message.header = replace(message.header, key=self.key)
            was_empty = not self.queue
            if was_empty and self._sent_bytes == self._written_bytes:
                self._waiting_since_s = time.monotonic()
            self.queue.append(message)
        if was_empty:  # the thread looks at the queue without the lock, so only once the message is in it
            self._buffer.wake()

    def _check_open(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message, reason=self._error.reason)
        if self.is_over:
            raise TransferFailed(f"transfer {self.key} is already acknowledged", reason="order")

    # ---- the sender thread's side ------------------------------------------------------------------------

    def next(self) -> Message | None:
        """The message to send next, if there is one and the credit allows it. It stays in the queue until
        `sent`."""
        with self._condition:
            message = self.queue[0] if self.queue else None
            if self._failure or (self._lost_at_s is not None and message is not self._manifest):
                return None
            if message is not None and message.tensor_bytes:
                in_flight_bytes = self._sent_bytes - self._written_bytes + message.tensor_bytes
                if in_flight_bytes > self._credit_bytes:
                    return None
            self._receiver_may_know = True
            return message

    def sent(self, message: Message) -> None:
        """The message that `next` returned was sent. If the transfer has ended since, it does not count."""
        with self._condition:
            if not self.queue or self.queue[0] is not message:
                return
            self.queue.popleft()
            self._last_sent_s = time.monotonic()
            if message.header.type is MessageType.ABORT:
                return
            self._bytes_by_kind["manifest"] += HEADER_BYTES
            for kind, frame in zip(message.kinds, message.payload, strict=True):
                self._bytes_by_kind[kind] += frame.nbytes
            if message is not self._manifest:
                self._sent_bytes += message.tensor_bytes
                self._unacknowledged.append(message)
                if message.was_sent:
                    self.resent_bytes += message.tensor_bytes
            if self._first_sent_s is None and (
                message.tensor_bytes or message.header.type is MessageType.END
            ):
                self._first_sent_s = self._last_sent_s

    def on_message(self, header: FrameHeader, payload: memoryview | bytes) -> None:
        """A message of the receiver about this transfer."""
        with self._condition:
            if self.is_over or self._failure:
                return
            self._waiting_since_s = time.monotonic()
            try:
                if header.type is MessageType.CREDIT:
                    self._on_credit(header)
                elif header.type is MessageType.ACK:
                    if self._end is None or (self.queue and self._lost_at_s is None):
                        raise MalformedMessage("receiver acknowledged before the end", reason="malformed")
                    self._acknowledged_s = self._waiting_since_s
                    self.end(None)
                elif header.type is MessageType.NACK:
                    self.fail(decode_nack(payload))
                else:
                    raise MalformedMessage(f"receiver sent {header.type.name}", reason="malformed")
            except TransferFailed as error:
                self.fail(error, tell=error.reason)

    def _on_credit(self, header: FrameHeader) -> None:
        written_bytes, self._next_sequence = header.total_bytes, header.sequence
        self._is_accepted = True
        if self._lost_at_s is not None and self.queue and self.queue[0] is not self._manifest:
            self._lost_at_s = None
            while self.queue and self._is_received(self.queue[0]):
                message = self.queue.popleft()
                self._sent_bytes += message.tensor_bytes
                self._unacknowledged.append(message)
        if not self._written_bytes <= written_bytes <= self._sent_bytes:
            raise MalformedMessage(
                f"receiver reports {written_bytes} bytes written; {self._written_bytes} to"
                f" {self._sent_bytes} is possible",
                reason="malformed",
            )
        self._written_bytes = written_bytes
        self._condition.notify_all()

    def _is_received(self, message: Message) -> bool:
        is_numbered = message.header.type in (MessageType.LAYER, MessageType.BLOCK)
        return is_numbered and message.header.sequence < self._next_sequence

    def interrupted(self) -> None:
        """The connection is lost. Over a new one the manifest asks the receiver how far it has come."""
        with self._condition:
            if self.is_over:
                self.queue.clear()  # the receiver cannot be told
            elif self._failure is None:
                self._lost_at_s = self._lost_at_s or time.monotonic()
                self._rewind()

    def _rewind(self) -> None:
        """Queue everything again that is not released, after the manifest."""
        for message in self._unacknowledged:
            message.was_sent = True
            self._sent_bytes -= message.tensor_bytes
        self.queue.extendleft(reversed(self._unacknowledged))
        self._unacknowledged.clear()
        if not self.queue or self.queue[0] is not self._manifest:
            self.queue.appendleft(self._manifest)

    def fail(self, error: TransferFailed, *, tell: str = "") -> None:
        """End the transfer as `end`, or keep it for another receiver unless this one never accepted it."""
        with self._condition:
            if self.is_over or self._failure is not None:
                return
            refused = isinstance(error, LeaseExpired) and not self._is_accepted
            if not self._keeps_failed or refused or isinstance(error, ProtocolMismatch):
                self.end(error, tell=tell)
                return
            self._failure = error, time.monotonic()
            self._rewind()

    def end(self, error: KvferryError | None, *, tell: str = "") -> None:
        """End the transfer; no effect once it is over.

        Args:
            error: why it failed; None: it is acknowledged.
            tell: the reason that the receiver is told; "" where it knows, or cannot be reached. Then also the
                message is dropped that was to tell it why a transfer had ended before.
        """
        with self._condition:
            if not tell or not self.is_over:
                self.queue.clear()
            if self.is_over:
                return
            self.is_over, self._error = True, error
            self._unacknowledged.clear()
            self._buffer.used_bytes -= self._reserved_bytes
            self._reserved_bytes = 0
            if tell and self._receiver_may_know:
                self.queue.append(self._record(MessageType.ABORT, encode_abort(tell)))
            self._condition.notify_all()
        self._buffer.wake()

    def overdue(self, now_s: float, timeout_s: float) -> TransferFailed | None:
        """Why to fail: no connection for RESUME_S, or no message for `timeout_s` from a receiver that owes
        an answer. A transfer that failed before ends here, if nobody has redirected it in time."""
        with self._condition:
            if self._failure is not None:
                error, failed_at_s = self._failure
                if now_s - failed_at_s > RESEND_S:
                    self.end(error)
                return None
            peer = self.peer.decode()
            if self._lost_at_s is not None and now_s - self._lost_at_s > RESUME_S:
                message = f"connection to {peer} was lost for more than {RESUME_S} s"
                return TransferFailed(message, reason="peer_lost")
            owes = self.queue or self._end is not None or self._sent_bytes > self._written_bytes
            if owes and not self.is_over and now_s - self._waiting_since_s > timeout_s:
                message = f"{peer} was silent for more than {timeout_s} s"
                return TransferFailed(message, reason="timeout")
            return None

    def keepalive_due(self, now_s: float, interval_s: float) -> bool:
        """Whether nothing was sent for an interval, though the transfer is open and its manifest was sent."""
        with self._condition:
            is_quiet = now_s - self._last_sent_s > interval_s and self._receiver_may_know
            due = is_quiet and not self.is_over and self._failure is None
            if due:
                self._last_sent_s = now_s
            return due

    def release_written(self) -> None:
        """Release what the receiver has written. The caller has locked the condition."""
        while self._unacknowledged and self._is_received(self._unacknowledged[0]):
            num_bytes = self._unacknowledged.popleft().tensor_bytes
            self._reserved_bytes -= num_bytes
            self._buffer.used_bytes -= num_bytes
            self._keeps_failed = False
            self._condition.notify_all()


class BlockSender:
    """Opens transfers to any endpoint of its channel's transport. Any thread may call its methods.

        open ──► registered ──► thread: round robin over transfers, 4 MiB each ──► over, removed
                                   ▲ CREDIT, ACK, NACK, connection lost, silence

    The thread owns the channel. Transfers and the buffer share one condition, which is not locked while a
    message is sent. A transfer survives a lost connection if another one is made within RESUME_S.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        buffer_bytes: int,
        peer_bytes: int = 0,
        timeout_s: float,
        keepalive_interval_s: float = KEEPALIVE_INTERVAL_S,
    ) -> None:
        """
        Args:
            buffer_bytes: bound on unacknowledged blocks over all transfers.
            peer_bytes: bound over the transfers to one receiver; 0: the whole buffer.
            timeout_s: how long a receiver that owes an answer may be silent.
            keepalive_interval_s: how often an open transfer that sends nothing else sends a keepalive.

        Raises:
            ConfigurationError: the buffer has no room for a byte.
        """
        if buffer_bytes < 1:
            raise ConfigurationError(f"send buffer is {buffer_bytes} bytes; at least 1 is needed")
        self._channel = channel
        self._buffer = SendBuffer(buffer_bytes, peer_bytes or buffer_bytes, channel.wake)
        self._timeout_s = timeout_s
        self._keepalive_interval_s = keepalive_interval_s
        self._transfers = self._buffer.transfers
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvferry-block-sender", daemon=True)
        self._thread.start()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of unacknowledged blocks over all transfers."""
        with self._buffer.condition:
            return self._buffer.used_bytes

    def open(
        self, ticket: Ticket, manifest: Manifest, *, timeout_s: float, keeps_failed: bool = False
    ) -> OutgoingTransfer:
        """Begin a transfer; does not wait for the receiver.

        Args:
            timeout_s: how long one block may wait for room in the buffer.
            keeps_failed: if the receiver fails, keep what is in the buffer for `OutgoingTransfer.redirect`.

        Raises:
            TransferFailed: the sender is closed, or the key is in use.
            ProtocolMismatch: the manifest is out of range.
        """
        transfer = OutgoingTransfer(
            ticket=ticket,
            manifest=manifest,
            buffer=self._buffer,
            timeout_s=timeout_s,
            keeps_failed=keeps_failed,
        )
        with self._buffer.condition:
            if self._closed:
                raise TransferFailed("block sender is closed", reason="closed")
            if transfer.key in self._transfers:
                raise TransferFailed(f"a transfer of {transfer.key} is already open", reason="key")
            self._transfers[transfer.key] = transfer
        self._channel.wake()
        return transfer

    def close(self) -> None:
        """Fail the transfers that are not over, and stop. Idempotent."""
        with self._buffer.condition:
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
            with self._buffer.condition:
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
        """Send of each transfer what credit and channel allow, up to the size of a block; returns whether
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
                with self._buffer.condition:
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
        """Fail transfers whose receiver is silent or not reached again, keep quiet ones alive."""
        now_s = time.monotonic()
        for transfer in tuple(self._transfers.values()):
            if (error := transfer.overdue(now_s, self._timeout_s)) is not None:
                transfer.fail(error, tell=error.reason if error.reason == "timeout" else "")
            elif transfer.keepalive_due(now_s, self._keepalive_interval_s):
                header = encode_header(FrameHeader(type=MessageType.KEEPALIVE, key=transfer.key))
                self._send(transfer, (header, *NO_PAYLOAD))


def _tensor_header(named: NamedTensor) -> TensorHeader:
    dtype = _DTYPE_NAMES.get(named.tensor.dtype)
    if dtype is None:
        raise TransferFailed(
            f"{named.name} is {named.tensor.dtype}; {', '.join(TENSOR_DTYPE_BYTES)} are allowed",
            reason="dtype",
        )
    if named.kind not in TENSOR_KINDS:
        raise TransferFailed(
            f"{named.name} is counted as {named.kind!r}; {', '.join(TENSOR_KINDS)} are allowed", reason="kind"
        )
    return TensorHeader(name=named.name, dtype=dtype, shape=tuple(named.tensor.shape))


def _cut(tensors: Sequence[NamedTensor], limit_bytes: int) -> Iterator[tuple[int, list[Tensor], list[str]]]:
    """What each message carries of the tensors: how many bytes, the parts and their kinds. The first one may
    carry nothing."""
    parts: list[Tensor] = []
    kinds: list[str] = []
    room = limit_bytes
    for named in tensors:
        flat = named.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while flat.numel():
            if room == 0:
                yield limit_bytes, parts, kinds
                parts, kinds, room = [], [], limit_bytes
            parts.append(flat[:room])
            kinds.append(named.kind)
            flat, room = flat[room:], max(0, room - flat.numel())
    yield limit_bytes - room, parts, kinds
