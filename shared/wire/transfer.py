"""One transfer being sent: what its caller queues, what has been sent of it, and how it ends.

Place in the request's path: prefill shipping a prompt, or decode returning history, calls `send_layer`,
`finish` and `wait`; the thread of `sender.py` takes its messages and calls `on_message`, `fail` and `lost`.
Does no I/O.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from threading import Condition

import torch
from torch import Tensor

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import Cancelled, KvferryError, ProtocolMismatch, TransferFailed
from kvferry.shared.wire.frames import (
    HEADER_BYTES,
    decode_nack,
    encode_abort,
    encode_end,
    encode_layer,
    encode_manifest,
)
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    TENSOR_DTYPE_BYTES,
    TENSOR_KINDS,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    MessageType,
    NamedTensor,
    TensorHeader,
    TransferCursor,
    TransferKey,
)

_DTYPE_NAMES = {getattr(torch, name): name for name in TENSOR_DTYPE_BYTES}


class SendBuffer:
    """Bounds the host memory of unacknowledged tensor bytes over all transfers of a sender.

    A message's bytes are reserved before it is queued. While there is room they stay reserved until their
    transfer is acknowledged. When there is no room, bytes that receivers have reported as written are
    released, so that a transfer larger than the bound, or several that fill it together, still progress.

    Attributes:
        condition: guards the buffer and every transfer that uses it.
        users: the transfers that are not over.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.condition = Condition()
        self.users: set[OutgoingTransfer] = set()

    def wait_for_room(self, num_bytes: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until `num_bytes` fit. The caller has locked the condition, which is unlocked while waiting.

        Args:
            num_bytes: at most `limit_bytes`.
            check: raises if there is no reason to wait any longer.

        Raises:
            TransferFailed: no room was free in time ("buffer_full").
        """
        assert num_bytes <= self.limit_bytes, (num_bytes, self.limit_bytes)
        deadline = time.monotonic() + timeout_s
        while True:
            check()
            for user in self.users:
                user.release_written()
            if self.used_bytes + num_bytes <= self.limit_bytes:
                return
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TransferFailed(
                    f"no room for a block of {num_bytes} bytes within {timeout_s} s; send buffer holds"
                    f" {self.used_bytes} of at most {self.limit_bytes}",
                    reason="buffer_full",
                )
            self.condition.wait(remaining_s)


@dataclass(slots=True, eq=False)
class Message:
    """A message to send.

    Attributes:
        payload: its frames, each with the kind under which it is counted.
        tensor_bytes: how much of the payload credit and buffer count.
        frames: what is sent; made by the sender's thread, which alone uses it.
    """

    header: FrameHeader
    payload: list[tuple[str, memoryview]]
    tensor_bytes: int = 0
    frames: tuple[memoryview | bytes, ...] = ()


class _State(enum.Enum):
    OPEN = "open"
    FINISHING = "finishing"
    ACKNOWLEDGED = "acknowledged"
    ABORTED = "aborted"
    FAILED = "failed"


class OutgoingTransfer:
    """A transfer being sent. Its methods may be called from any thread.

        OPEN ──finish()──► FINISHING ──ACK──► ACKNOWLEDGED
          │                    │
          ├───── abort() ──────┴──► ABORTED   (the receiver is told)
          └── NACK, silence, connection lost, sender closed, misuse ──► FAILED
                                              (the receiver is told unless it said so)

        queued ──take, sent──► unacknowledged ──► released: the receiver has written it and the buffer needs
                                                  room, or the transfer is over

    The memory of what is sent is the caller's tensor (CPU, contiguous), else a host copy of its part. The
    caller must not change a tensor that it has passed to `send_layer` until it is released. In flight are the
    tensor bytes sent less those that the receiver reported as written; never above the credit.

    Attributes:
        is_over: whether nothing is sent any more but the message that tells the receiver.
    """

    def __init__(
        self,
        *,
        ticket: Ticket,
        manifest: Manifest,
        buffer: SendBuffer,
        timeout_s: float,
        wake: Callable[[], None],
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
        self._message_bytes = min(MAX_PAYLOAD_BYTES, ticket.credit_bytes, buffer.limit_bytes)
        self._buffer = buffer
        self._condition = buffer.condition
        self._timeout_s = timeout_s
        self._wake = wake
        self._state = _State.OPEN
        self.is_over = False
        self._error: KvferryError | None = None
        self._cursor = TransferCursor(manifest.num_layers)
        manifest_header = FrameHeader(type=MessageType.MANIFEST, key=self.key)
        payload = [("manifest", memoryview(encode_manifest(manifest)))]
        self._queue = deque([Message(manifest_header, payload)])
        self._sending: list[Message] = []  # the first ones of the queue, taken by the sender's thread
        self._unacknowledged: deque[Message] = deque()
        self._reserved_bytes = self._sent_bytes = self._written_bytes = self._released_bytes = 0
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
            layer: 0, 1, 2, ... in turn.
            tensors: contiguous, on any device; what is on other devices is copied to the host part by part.

        Raises:
            TransferFailed: the peer refused, vanished or was silent past the timeout; the buffer had no room
                in time; or a misuse.
            Cancelled: `abort` was called.
        """
        cursor = self._cursor
        try:
            record = LayerHeader(layer=layer, tensors=tuple(map(_tensor_header, tensors)))
            for number, (num_bytes, parts) in enumerate(_cut(tensors, self._message_bytes)):
                with self._condition:
                    self._check_open()
                    sequence, offset = cursor.sequence, cursor.offset
                    payload = []
                    if number == 0:
                        header = FrameHeader(type=MessageType.LAYER, key=self.key, sequence=sequence)
                        cursor.pass_layer(sequence, record, num_bytes)
                        payload = [("manifest", memoryview(encode_layer(record)))]
                    else:
                        header = FrameHeader(
                            type=MessageType.BLOCK,
                            key=self.key,
                            sequence=sequence,
                            layer=layer,
                            total_bytes=cursor.layer_bytes,
                            offset=offset,
                        )
                        cursor.pass_block(header, num_bytes)
                    buffer = self._buffer
                    if buffer.used_bytes + num_bytes > buffer.limit_bytes:
                        buffer.wait_for_room(num_bytes, timeout_s=self._timeout_s, check=self._check_open)
                    buffer.used_bytes += num_bytes
                    self._reserved_bytes += num_bytes
                for kind, part in parts:
                    payload.append((kind, part.cpu().numpy().data))
                self._push(Message(header, payload, num_bytes))
        except TransferFailed as error:
            self.fail(error)
            raise

    def finish(self, end: EndRecord) -> None:
        """Queue the end record; the transfer fills in its key and totals. Raises as `send_layer`."""
        with self._condition:
            self._check_open()
            if self._state is not _State.OPEN:
                raise TransferFailed(f"transfer {self.key} is already finished", reason="order")
            try:
                self._cursor.check_complete()
                num_blocks, payload_bytes = self._cursor.num_blocks, self._cursor.payload_bytes
                end = replace(end, key=self.key, num_blocks=num_blocks, payload_bytes=payload_bytes)
                payload = [("manifest", memoryview(encode_end(end)))]
            except TransferFailed as error:
                self.fail(error)
                raise
            self._push(Message(FrameHeader(type=MessageType.END, key=self.key), payload))
            self._state = _State.FINISHING

    def wait(self, timeout_s: float) -> float:
        """Wait for the acknowledgement; returns the seconds to it from the first tensor bytes. If none
        comes in time the transfer fails. Raises as `send_layer`."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._state is not _State.ACKNOWLEDGED:
                self._check_open()
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    error = TransferFailed(
                        f"transfer was not acknowledged within {timeout_s} s", reason="timeout"
                    )
                    self.fail(error)
                    raise error
                self._condition.wait(remaining_s)
            return 0.0 if self._first_sent_s is None else self._acknowledged_s - self._first_sent_s

    def abort(self, reason: str) -> None:
        """Abort: the receiver is told and the buffer is freed. Idempotent; no effect once acknowledged."""
        self._end(_State.ABORTED, Cancelled(f"transfer was aborted: {reason}", reason="aborted"), tell=reason)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes sent so far. A tensor's bytes count under its kind; all the rest is "manifest": the manifest,
        layer headers and end record, and the header frames of these and of blocks."""
        with self._condition:
            return dict(self._bytes_by_kind)

    def _push(self, message: Message) -> None:
        """Queue a message. The thread is woken unless it is about to look at the queue anyway."""
        with self._condition:
            self._check_open()
            if not self._queue and self._sent_bytes == self._written_bytes:
                self._waiting_since_s = time.monotonic()
            if not self._queue or self._sending:
                self._wake()
            self._queue.append(message)

    def _check_open(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message, reason=self._error.reason)
        if self._state is _State.ACKNOWLEDGED:
            raise TransferFailed(f"transfer {self.key} is already acknowledged", reason="order")

    # ---- the sender thread's side ------------------------------------------------------------------------

    def take(self, limit_bytes: int) -> list[Message]:
        """The messages to send next: as many as the credit allows, until they exceed the limit. They stay in
        the queue until `sent`."""
        with self._condition:
            self._sending, batch_bytes = [], 0
            in_flight_bytes = self._sent_bytes - self._written_bytes
            for message in self._queue:
                in_flight_bytes += message.tensor_bytes
                if batch_bytes >= limit_bytes or (
                    message.tensor_bytes and in_flight_bytes > self._credit_bytes
                ):
                    break
                self._sending.append(message)
                batch_bytes += HEADER_BYTES + message.tensor_bytes
            return self._sending

    def sent(self, count: int) -> None:
        """The first ones that `take` returned were sent; the others were not."""
        with self._condition:
            messages, self._sending = self._sending, []
            for message in islice(messages, count):
                self._queue.popleft()
                self._last_sent_s = time.monotonic()
                if message.header.type is MessageType.ABORT:
                    return
                self._bytes_by_kind["manifest"] += HEADER_BYTES
                for kind, frame in message.payload:
                    self._bytes_by_kind[kind] += frame.nbytes
                if message.tensor_bytes:
                    self._sent_bytes += message.tensor_bytes
                    self._unacknowledged.append(message)
                if self._first_sent_s is None and (
                    message.tensor_bytes or message.header.type is MessageType.END
                ):
                    self._first_sent_s = self._last_sent_s

    def on_message(self, header: FrameHeader, payload: memoryview | bytes) -> None:
        """A message of the receiver about this transfer."""
        with self._condition:
            if self.is_over:
                return
            self._waiting_since_s = time.monotonic()
            if header.type is MessageType.CREDIT:
                written_bytes = header.total_bytes
                if self._written_bytes <= written_bytes <= self._sent_bytes:
                    self._written_bytes = written_bytes
                    self._condition.notify_all()
                else:
                    message = (
                        f"receiver reports {written_bytes} bytes written; {self._written_bytes} to"
                        f" {self._sent_bytes} is possible"
                    )
                    self.fail(ProtocolMismatch(message, reason="malformed"))
            elif header.type is MessageType.ACK:
                if self._state is _State.FINISHING and not self._queue:
                    self._acknowledged_s = self._waiting_since_s
                    self._end(_State.ACKNOWLEDGED, None, tell=None)
                else:
                    self.fail(ProtocolMismatch("receiver acknowledged before the end", reason="malformed"))
            elif header.type is MessageType.NACK:
                try:
                    error = decode_nack(payload)
                except TransferFailed as malformed:
                    error = malformed
                self._end(_State.FAILED, error, tell=None)
            else:
                self.fail(ProtocolMismatch(f"receiver sent {header.type.name}", reason="malformed"))

    def fail(self, error: TransferFailed) -> None:
        """Fail the transfer from this side; the receiver is told. No effect once it is over."""
        self._end(_State.FAILED, error, tell=error.reason)

    def lost(self, error: TransferFailed) -> None:
        """Fail the transfer without telling the receiver, because it cannot or need not be told. If the
        transfer is over already, the message that tells the receiver is dropped."""
        with self._condition:
            self._end(_State.FAILED, error, tell=None)
            self._queue.clear()
            self._sending = []

    def silent_s(self, now_s: float) -> float:
        """Seconds since the receiver's last message, while it owes an answer; else 0."""
        with self._condition:
            owed_nothing = not self._queue and self._sent_bytes == self._written_bytes
            if self.is_over or (owed_nothing and self._state is not _State.FINISHING):
                return 0.0
            return now_s - self._waiting_since_s

    def quiet_s(self, now_s: float) -> float:
        """Seconds since something was last sent, while the transfer is open and its manifest was sent."""
        with self._condition:
            is_open = self._bytes_by_kind["manifest"] > 0 and not self.is_over
            return now_s - self._last_sent_s if is_open else 0.0

    def keepalive_sent(self) -> None:
        """A keepalive was sent."""
        with self._condition:
            self._last_sent_s = time.monotonic()

    def release_written(self) -> None:
        """Release what the receiver has written. The caller has locked the condition."""
        messages = self._unacknowledged
        while messages and self._released_bytes + messages[0].tensor_bytes <= self._written_bytes:
            num_bytes = messages.popleft().tensor_bytes
            self._released_bytes += num_bytes
            self._reserved_bytes -= num_bytes
            self._buffer.used_bytes -= num_bytes
            self._condition.notify_all()

    def _end(self, state: _State, error: KvferryError | None, *, tell: str | None) -> None:
        with self._condition:
            if self.is_over:
                return
            self._state, self.is_over = state, True
            self._error = error
            receiver_may_know = self._bytes_by_kind["manifest"] > 0 or self._sending
            self._queue.clear()
            self._sending = []
            self._unacknowledged.clear()
            self._buffer.used_bytes -= self._reserved_bytes
            self._reserved_bytes = 0
            self._buffer.users.discard(self)
            if tell is not None and receiver_may_know:
                payload = [("manifest", memoryview(encode_abort(tell)))]
                self._queue.append(Message(FrameHeader(type=MessageType.ABORT, key=self.key), payload))
            self._condition.notify_all()
        self._wake()


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


def _cut(tensors: Sequence[NamedTensor], limit_bytes: int) -> Iterator[tuple[int, list[tuple[str, Tensor]]]]:
    """What each message carries of the tensors: how many bytes, and the parts with their kinds. The first one
    may carry nothing."""
    parts: list[tuple[str, Tensor]] = []
    room = limit_bytes
    for named in tensors:
        flat = named.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while flat.numel():
            if room == 0:
                yield limit_bytes, parts
                parts, room = [], limit_bytes
            parts.append((named.kind, flat[:room]))
            flat, room = flat[room:], max(0, room - flat.numel())
    yield limit_bytes - room, parts
