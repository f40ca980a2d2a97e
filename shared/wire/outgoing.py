"""A transfer being sent: messages that wait for credit and room, and how it ends.

Place in the request's path: prefill shipping a prompt, or decode returning history, queues its layers and
waits for the acknowledgement; the thread of `sender.py` sends as credit allows. Tensors' meaning is not known
here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import (
    Cancelled,
    KvferryError,
    LeaseExpired,
    MalformedMessage,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.wire.frames import (
    HEADER_BYTES,
    TransferCursor,
    cut,
    decode_nack,
    encode_abort,
    encode_end,
    encode_layer,
    encode_manifest,
    tensor_header,
)
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    RESEND_S,
    RESUME_S,
    TENSOR_KINDS,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    Message,
    MessageType,
    NamedTensor,
    TransferKey,
)

if TYPE_CHECKING:
    from kvferry.shared.wire.sender import SendBuffer


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
        reserved_bytes: of the buffer.
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
        """Begin. Args: ticket: of the manifest's key, and with credit."""
        self.key, self.peer = manifest.key, ticket.endpoint.encode()
        self._credit_bytes = ticket.credit_bytes
        self._message_bytes = min(MAX_PAYLOAD_BYTES, ticket.credit_bytes, buffer.peer_bytes)
        self._buffer, self._condition = buffer, buffer.condition
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
        self._is_accepted = False  # whether the receiver has answered the manifest with credit
        self._receiver_may_know = False  # whether the thread has begun to send
        self._unacknowledged: deque[Message] = deque()
        self.reserved_bytes = self.resent_bytes = 0
        self._sent_bytes = self._written_bytes = self._next_sequence = 0
        self._bytes_by_kind = dict.fromkeys(TENSOR_KINDS, 0)
        self._first_sent_s: float | None = None  # of tensor bytes, or of the end where there are none
        self._acknowledged_s = 0.0
        self._last_sent_s = self._waiting_since_s = time.monotonic()

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
        cursor = self._cursor
        try:
            record = LayerHeader(layer=layer, tensors=tuple(map(tensor_header, tensors)))
            for number, (num_bytes, parts, kinds) in enumerate(cut(tensors, self._message_bytes)):
                self._reserve(num_bytes)
                # copied without the lock, because the thread sends meanwhile
                payload = [part.cpu().numpy().data for part in parts]
                with self._condition:
                    header = FrameHeader(type=MessageType.LAYER, key=self.key, sequence=cursor.sequence)
                    if number == 0:
                        cursor.pass_layer(cursor.sequence, record, num_bytes)
                        payload.insert(0, memoryview(encode_layer(record)))
                        kinds.insert(0, "manifest")
                    else:
                        header = replace(
                            header,
                            type=MessageType.BLOCK,
                            layer=layer,
                            total_bytes=cursor.layer_bytes,
                            offset=cursor.offset,
                        )
                        cursor.pass_block(header, num_bytes)
                    self._push(Message(header, payload, kinds, num_bytes))
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
                self._cursor.check_complete()
                num_blocks, payload_bytes = self._cursor.num_blocks, self._cursor.payload_bytes
                end = replace(end, key=self.key, num_blocks=num_blocks, payload_bytes=payload_bytes)
                self._push(self._record(MessageType.END, encode_end(end)))
                self._end = end
            except TransferFailed as error:
                self.end(error, tell=error.reason)
                raise

    def wait(self, timeout_s: float) -> float:
        """Wait for the acknowledgement; return the seconds to it from the first tensor bytes. If none comes
        in time, the transfer fails. Raises as `send_layer`."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.is_over, timeout_s):
                message = f"transfer was not acknowledged within {timeout_s} s"
                self.end(TransferFailed(message, reason="timeout"), tell="timeout")
            if self._error is not None:
                self._check_open()
            return 0.0 if self._first_sent_s is None else self._acknowledged_s - self._first_sent_s

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition on one sender's transfers is true, or until the timeout."""
        with self._condition:
            self._condition.wait_for(condition, timeout_s)

    @property
    def has_failed(self) -> bool:
        """Return whether the transfer is over, and not acknowledged."""
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
        """Count the bytes sent so far. A tensor's bytes count under its kind; all the rest is "manifest": the
        manifest, layer headers and end record, and the header frames of these and of blocks."""
        with self._condition:
            return dict(self._bytes_by_kind)

    def _reserve(self, num_bytes: int) -> None:
        """Wait until the bytes fit into the buffer."""
        buffer = self._buffer

        def fits() -> bool:
            if self.is_over:
                self._check_open()
            if buffer.has_room(self.peer, num_bytes):
                return True
            for transfer in buffer.transfers.values():
                transfer.release_written()
            return buffer.has_room(self.peer, num_bytes)

        with self._condition:
            if not self._condition.wait_for(fits, self._timeout_s):
                raise TransferFailed(
                    f"no room for a block of {num_bytes} bytes within {self._timeout_s} s; send buffer holds"
                    f" {buffer.used_bytes} of at most {buffer.limit_bytes}",
                    reason="buffer_full",
                )
            buffer.used_bytes += num_bytes
            self.reserved_bytes += num_bytes

    def _record(self, kind: MessageType, record: bytes) -> Message:
        return Message(FrameHeader(type=kind, key=self.key), [memoryview(record)], ["manifest"])

    def _push(self, message: Message) -> None:
        """Queue a message. The caller has locked the condition."""
        if self.is_over:
            self._check_open()
        was_empty = not self.queue
        if was_empty and self._sent_bytes == self._written_bytes:
            self._waiting_since_s = time.monotonic()
        self.queue.append(message)
        if was_empty:  # the thread reads the queue without the lock, so wake it only now
            self._buffer.wake()

    def _check_open(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message, reason=self._error.reason)
        if self.is_over:
            raise TransferFailed(f"transfer {self.key} is already acknowledged", reason="order")

    def next(self) -> Message | None:
        """Return the next message to send, if any and if credit allows it. It stays in the queue until
        `sent`."""
        with self._condition:
            message = self.queue[0] if self.queue else None
            if self._failure or (self._lost_at_s is not None and message is not self._manifest):
                return None
            free_bytes = self._credit_bytes - (self._sent_bytes - self._written_bytes)
            if message is not None and message.tensor_bytes and message.tensor_bytes > free_bytes:
                return None
            self._receiver_may_know = True
            return message

    def sent(self, message: Message) -> None:
        """Note that `next`'s message was sent. If the transfer has ended since, it does not count."""
        with self._condition:
            if not self.queue or self.queue[0] is not message:
                return
            self.queue.popleft()
            self._last_sent_s = time.monotonic()
            kind = message.header.type
            if kind is MessageType.ABORT:
                return
            self._bytes_by_kind["manifest"] += HEADER_BYTES
            for counted, frame in zip(message.kinds, message.payload, strict=True):
                self._bytes_by_kind[counted] += frame.nbytes
            if message is not self._manifest:
                self._sent_bytes += message.tensor_bytes
                self._unacknowledged.append(message)
                if message.was_sent:
                    self.resent_bytes += message.tensor_bytes
            if self._first_sent_s is None and (message.tensor_bytes or kind is MessageType.END):
                self._first_sent_s = self._last_sent_s

    def on_message(self, header: FrameHeader, payload: memoryview | bytes) -> None:
        """Take a message of the receiver about this transfer."""
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
        """Handle a lost connection. Over a new one the manifest asks the receiver how far it has come."""
        with self._condition:
            if self.is_over:
                self.queue.clear()  # the receiver cannot be told
            elif self._failure is None:
                self._lost_at_s = self._lost_at_s or time.monotonic()
                self._rewind()

    def _rewind(self) -> None:
        """Queue everything that is not released again, after the manifest."""
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
            tell: the reason that the receiver is told; "" where it knows, or cannot be reached. In that case
                an earlier message that was to tell it is also dropped.
        """
        with self._condition:
            if not tell or not self.is_over:
                self.queue.clear()
            if self.is_over:
                return
            self.is_over, self._error = True, error
            self._unacknowledged.clear()
            self._buffer.used_bytes -= self.reserved_bytes
            self.reserved_bytes = 0
            if tell and self._receiver_may_know:
                self.queue.append(self._record(MessageType.ABORT, encode_abort(tell)))
            self._condition.notify_all()
        self._buffer.wake()

    def release_written(self) -> None:
        """Release what the receiver has written. The caller has locked the condition."""
        while self._unacknowledged and self._is_received(self._unacknowledged[0]):
            num_bytes = self._unacknowledged.popleft().tensor_bytes
            self.reserved_bytes -= num_bytes
            self._buffer.used_bytes -= num_bytes
            self._keeps_failed = False
            self._condition.notify_all()

    def tick(self, timeout_s: float, keepalive_interval_s: float) -> bool:
        """Fail the transfer if there was no connection for RESUME_S, or no message for `timeout_s` from a
        receiver that owes an answer. A transfer that failed before ends if nobody has redirected it in time.

        Returns: whether a keepalive is due: nothing was sent for an interval.
        """
        with self._condition:
            now_s, peer = time.monotonic(), self.peer.decode()
            owes = self.queue or self._end is not None or self._sent_bytes > self._written_bytes
            if self.is_over or self._failure is not None:
                if self._failure is not None and now_s - self._failure[1] > RESEND_S:
                    self.end(self._failure[0])
            elif self._lost_at_s is not None and now_s - self._lost_at_s > RESUME_S:
                message = f"connection to {peer} was lost for more than {RESUME_S} s"
                self.fail(TransferFailed(message, reason="peer_lost"))
            elif owes and now_s - self._waiting_since_s > timeout_s:
                message = f"{peer} was silent for more than {timeout_s} s"
                self.fail(TransferFailed(message, reason="timeout"), tell="timeout")
            elif self._receiver_may_know and now_s - self._last_sent_s > keepalive_interval_s:
                self._last_sent_s = now_s
                return True
            return False
