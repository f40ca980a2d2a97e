"""One transfer being sent: what its caller queues, and how it ends.

Place in the request's path: prefill shipping a prompt, or decode returning history, calls `send_layer`,
`finish` and `wait`; the thread of `sender.py` takes its messages and calls `on_message`, `fail` and `lost`.
Does no I/O.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import Cancelled, KvferryError, ProtocolMismatch, TransferFailed
from kvferry.shared.wire.cursor import TransferCursor
from kvferry.shared.wire.frames import FrameHeader, MessageType
from kvferry.shared.wire.in_flight import InFlight, Queued, SendBuffer
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    TENSOR_DTYPE_BYTES,
    TENSOR_KINDS,
    EndRecord,
    LayerHeader,
    Manifest,
    NamedTensor,
    TensorHeader,
    TransferKey,
)
from kvferry.shared.wire.records import decode_nack, encode_abort, encode_end, encode_layer, encode_manifest

_DTYPE_NAMES = {getattr(torch, name): name for name in TENSOR_DTYPE_BYTES}


class _State(enum.Enum):
    OPEN = "open"
    FINISHING = "finishing"
    ACKNOWLEDGED = "acknowledged"
    ABORTED = "aborted"
    FAILED = "failed"


_OVER = (_State.ACKNOWLEDGED, _State.ABORTED, _State.FAILED)


class OutgoingTransfer:
    """A transfer being sent. Its methods may be called from any thread.

        OPEN ──finish()──► FINISHING ──ACK──► ACKNOWLEDGED
          │                    │
          ├───── abort() ──────┴──► ABORTED   (the receiver is told)
          └── NACK, silence, connection lost, sender closed, misuse ──► FAILED
                                              (the receiver is told unless it said so)

    A block's memory is the caller's tensor (CPU, contiguous), else a host copy of the block. It is used until
    the transfer is over, or until the receiver has written the block and the buffer needs room. The caller
    must not change a tensor that it has passed to `send_layer` until then.

    Attributes:
        messages: what the sender's thread takes and sends.
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
        self._block_bytes = min(MAX_PAYLOAD_BYTES, ticket.credit_bytes, buffer.limit_bytes)
        self._buffer = buffer
        self._condition = buffer.condition
        self._timeout_s = timeout_s
        self._wake = wake
        self._state = _State.OPEN
        self._error: KvferryError | None = None
        self._cursor = TransferCursor(manifest.num_layers)
        self._acknowledged_s = 0.0
        self._waiting_since_s = time.monotonic()
        self.messages = InFlight(buffer, credit_bytes=ticket.credit_bytes)
        payload = memoryview(encode_manifest(manifest))
        self.messages.push(Queued(FrameHeader(type=MessageType.MANIFEST, key=self.key), payload))

    # ---- the caller's side -------------------------------------------------------------------------------

    def send_layer(self, layer: int, tensors: Sequence[NamedTensor]) -> None:
        """Queue a layer: its header, then each tensor in blocks. Waits while the receiver's credit is used up
        and the buffer is full. A misuse (order, dtype, name) fails the transfer.

        Args:
            layer: 0, 1, 2, ... in turn.
            tensors: contiguous, on any device; blocks of other devices are copied to the host.

        Raises:
            TransferFailed: the peer refused, vanished or was silent past the timeout; the buffer had no room
                in time; or a misuse.
            Cancelled: `abort` was called.
        """
        try:
            header = LayerHeader(layer=layer, tensors=tuple(map(_tensor_header, tensors)))
            with self._condition:
                self._check_open()
                sequence = self._cursor.sequence
                self._cursor.pass_layer(sequence, header)
                payload = memoryview(encode_layer(header))
                frame = FrameHeader(type=MessageType.LAYER, key=self.key, sequence=sequence)
                self._push(Queued(frame, payload))
            for index, named in enumerate(tensors):
                flat = named.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                for offset in range(0, flat.numel(), self._block_bytes):
                    self._send_block(layer, index, named.kind, flat, offset)
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
                payload = memoryview(encode_end(end))
            except TransferFailed as error:
                self.fail(error)
                raise
            self._push(Queued(FrameHeader(type=MessageType.END, key=self.key), payload))
            self._state = _State.FINISHING

    def wait(self, timeout_s: float) -> float:
        """Wait for the acknowledgement; returns the seconds from sending the first block to it. If none comes
        in time the transfer fails. Raises as `send_layer`."""
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
            first_s = self.messages.first_sent_s
            return 0.0 if first_s is None else self._acknowledged_s - first_s

    def abort(self, reason: str) -> None:
        """Give up: the receiver is told, the buffer freed. Idempotent; no effect once acknowledged."""
        self._end(_State.ABORTED, Cancelled(f"transfer was aborted: {reason}", reason="aborted"), tell=reason)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes sent so far. The payloads of blocks count under their tensor's kind; all the rest is
        "manifest": the payloads of manifest, layer headers and end record, and the header frames of these
        and of blocks."""
        with self._condition:
            return dict(self.messages.bytes_by_kind)

    def _send_block(self, layer: int, tensor: int, kind: str, flat: Tensor, offset: int) -> None:
        num_bytes = min(self._block_bytes, flat.numel() - offset)
        with self._condition:
            self._check_open()
            header = FrameHeader(
                type=MessageType.BLOCK,
                key=self.key,
                sequence=self._cursor.sequence,
                layer=layer,
                tensor=tensor,
                tensor_bytes=flat.numel(),
                offset=offset,
            )
            self._cursor.pass_block(header, num_bytes)
            self.messages.reserve(num_bytes, timeout_s=self._timeout_s, check=self._check_open)
        payload = flat[offset : offset + num_bytes].cpu().numpy().data
        with self._condition:
            self._check_open()
            self._push(Queued(header, payload, kind))

    def _push(self, queued: Queued) -> None:
        """Condition held. The thread is woken unless it already has something to send."""
        if self.messages.is_empty:
            if self._owed_nothing():
                self._waiting_since_s = time.monotonic()
            self._wake()
        self.messages.push(queued)

    def _check_open(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message, reason=self._error.reason)
        if self._state is _State.ACKNOWLEDGED:
            raise TransferFailed(f"transfer {self.key} is already acknowledged", reason="order")

    # ---- the sender thread's side ------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Over, with nothing left to tell the receiver."""
        with self._condition:
            return self._state in _OVER and self.messages.is_empty

    def on_message(self, header: FrameHeader, payload: memoryview) -> None:
        """A message of the receiver about this transfer."""
        with self._condition:
            if self._state in _OVER:
                return
            self._waiting_since_s = time.monotonic()
            if header.type is MessageType.CREDIT:
                if problem := self.messages.wrote(header.tensor_bytes):
                    self.fail(ProtocolMismatch(problem, reason="malformed"))
                else:
                    self._condition.notify_all()
            elif header.type is MessageType.ACK:
                self._on_ack()
            elif header.type is MessageType.NACK:
                try:
                    error = decode_nack(payload)
                except TransferFailed as malformed:
                    error = malformed
                self._end(_State.FAILED, error, tell=None)
            else:
                self.fail(ProtocolMismatch(f"receiver sent {header.type.name}", reason="malformed"))

    def fail(self, error: TransferFailed) -> None:
        """End it from this side; the receiver is told. No effect once it is over."""
        self._end(_State.FAILED, error, tell=error.reason)

    def lost(self, error: TransferFailed) -> None:
        """End it; the receiver cannot be told, or need not be. No effect once it is over."""
        self._end(_State.FAILED, error, tell=None)

    def give_up_telling(self) -> None:
        """The receiver cannot be reached: where the transfer is over, drop the message that says so."""
        with self._condition:
            if self._state in _OVER:
                self.messages.drop_queued()

    def silent_s(self, now_s: float) -> float:
        """Seconds since the receiver's last message, while it owes an answer; else 0."""
        with self._condition:
            if self._state in _OVER or self._owed_nothing():
                return 0.0
            return now_s - self._waiting_since_s

    def quiet_s(self, now_s: float) -> float:
        """Seconds since something was last sent, while the transfer is open and its manifest was sent."""
        with self._condition:
            is_open = self.messages.manifest_sent and self._state not in _OVER
            return now_s - self.messages.last_sent_s if is_open else 0.0

    def keepalive_sent(self) -> None:
        """A keepalive was sent."""
        with self._condition:
            self.messages.last_sent_s = time.monotonic()

    def _owed_nothing(self) -> bool:
        return self.messages.all_written and self._state is not _State.FINISHING

    def _on_ack(self) -> None:
        if self._state is not _State.FINISHING or not self.messages.is_empty:
            self.fail(ProtocolMismatch("receiver acknowledged before the end", reason="malformed"))
            return
        self._acknowledged_s = time.monotonic()
        self._end(_State.ACKNOWLEDGED, None, tell=None)

    def _end(self, state: _State, error: KvferryError | None, *, tell: str | None) -> None:
        with self._condition:
            if self._state in _OVER:
                return
            self._state = state
            self._error = error
            receiver_may_know = self.messages.has_begun
            self.messages.drop_all()
            self._buffer.remove(self.messages)
            if tell is not None and receiver_may_know:
                payload = memoryview(encode_abort(tell))
                self.messages.push(Queued(FrameHeader(type=MessageType.ABORT, key=self.key), payload))
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
