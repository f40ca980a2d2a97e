"""One transfer being sent: what its caller queues, what the sender's thread takes, how it ends.

Place in the request's path: the shipper calls `send`, `finish` and `wait`; `sender.py`'s thread calls
`next_message`, `sent` and the `on_...` methods. Does no I/O.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import Cancelled, KvferryError, ProtocolMismatch, TransferFailed
from kvferry.shared.wire.buffer import SendBuffer
from kvferry.shared.wire.frames import FrameHeader, MessageType, encode_header
from kvferry.shared.wire.in_flight import InFlight, Queued
from kvferry.shared.wire.layout import SIZING_SECTIONS, SectionCursor, section_bytes
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES, EndRecord, Manifest, Section, TransferKey
from kvferry.shared.wire.packed_sections import KIND_SECTIONS
from kvferry.shared.wire.records import decode_nack, encode_abort, encode_end, encode_manifest


class _State(enum.Enum):
    OPEN = "open"
    FINISHING = "finishing"
    ACKNOWLEDGED = "acknowledged"
    ABORTED = "aborted"
    FAILED = "failed"


_OVER = (_State.ACKNOWLEDGED, _State.ABORTED, _State.FAILED)

_DTYPES = {
    Section.INDEX: "int32",
    Section.LAYOUT: "int32",
    Section.STATE: "float32",
    Section.HEAD_ROWS: "int32",
    Section.CHANNELS: "int16",
    Section.NEW_ROWS: "int32",
    **dict.fromkeys(KIND_SECTIONS, "uint8"),
}


class SendingTransfer:
    """Implements `OutgoingTransfer`.

        OPEN ──finish()──► FINISHING ──ACK──► ACKNOWLEDGED
          │                    │
          ├───── abort() ──────┴──► ABORTED   (the receiver is told)
          └── NACK, silence, connection lost, sender closed, misuse ──► FAILED
                                              (the receiver is told unless it said so)

    A block's memory: the caller's tensor (CPU, contiguous: as it is; else a host copy of the block), queued
    and kept (`in_flight.py`) until any end, or until the receiver has written it and the buffer needs room.
    The caller must not change a tensor that it has passed to `send` until then.
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
        self._manifest = manifest
        self._block_bytes = min(MAX_PAYLOAD_BYTES, ticket.credit_bytes, buffer.limit_bytes)
        self._buffer = buffer
        self._condition = buffer.condition
        self._timeout_s = timeout_s
        self._wake = wake
        self._state = _State.OPEN
        self._error: KvferryError | None = None
        self._cursor = SectionCursor(manifest)
        payload = memoryview(encode_manifest(manifest))
        self._messages = InFlight(buffer, credit_bytes=ticket.credit_bytes)
        self._messages.push(Queued(FrameHeader(type=MessageType.MANIFEST, key=self.key), payload))
        self._num_blocks = 0
        self._queued_bytes = 0
        self._first_sent_s: float | None = None
        self._acknowledged_s = 0.0
        now = time.monotonic()
        self._last_sent_s = now
        self._waiting_since_s = now

    # ---- the caller's side -------------------------------------------------------------------------------

    def send(self, *, layer: int, section: Section, tensor: Tensor) -> None:
        """See `OutgoingTransfer.send`. A misuse (order, size, dtype) fails the transfer."""
        try:
            flat = self._checked_bytes(layer, section, tensor)
            for offset in range(0, flat.numel(), self._block_bytes):
                self._send_block(layer, section, flat, offset)
        except TransferFailed as error:
            self.fail(error)
            raise

    def finish(self, end: EndRecord) -> None:
        """See `OutgoingTransfer.finish`."""
        with self._condition:
            self._check_open()
            if self._state is not _State.OPEN:
                raise TransferFailed(f"transfer {self.key} is already finished", reason="order")
            try:
                if not self._cursor.complete:
                    raise TransferFailed(
                        f"transfer ends where {self._cursor.describe()} is expected", reason="incomplete"
                    )
                end = replace(
                    end, key=self.key, num_blocks=self._num_blocks, payload_bytes=self._queued_bytes
                )
                payload = memoryview(encode_end(end))
            except TransferFailed as error:
                self.fail(error)
                raise
            self._messages.push(Queued(FrameHeader(type=MessageType.END, key=self.key), payload))
            self._state = _State.FINISHING
        self._wake()

    def wait(self, timeout_s: float) -> float:
        """See `OutgoingTransfer.wait`. Waiting in vain fails the transfer."""
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
            first_s = self._acknowledged_s if self._first_sent_s is None else self._first_sent_s
            return self._acknowledged_s - first_s

    def abort(self, reason: str) -> None:
        """See `OutgoingTransfer.abort`."""
        self._end(_State.ABORTED, Cancelled(f"transfer was aborted: {reason}", reason="aborted"), tell=reason)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes sent so far: "codes", "scales", "rows", "index" and "state" are block payloads; "manifest" is
        all the rest that the transfer needs: manifest, layout and end payloads, and the header frames of
        manifest, blocks and end."""
        with self._condition:
            return dict(self._messages.bytes_by_kind)

    def _checked_bytes(self, layer: int, section: Section, tensor: Tensor) -> Tensor:
        dtype = _DTYPES.get(section, self._manifest.dtype)
        if str(tensor.dtype) != f"torch.{dtype}":
            raise TransferFailed(
                f"{section.name} is {tensor.dtype}; torch.{dtype} is expected", reason="dtype"
            )
        if not 0 <= layer < len(self._manifest.layer_rows):
            raise TransferFailed(
                f"layer is {layer}; 0 to {len(self._manifest.layer_rows) - 1} is allowed", reason="order"
            )
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        manifest = self._manifest
        if section in KIND_SECTIONS or manifest.announced(layer) or manifest.is_delta:  # the cursor knows
            return flat
        expected_bytes = section_bytes(self._manifest, layer, section)
        if flat.numel() != expected_bytes:
            raise TransferFailed(
                f"layer {layer} {section.name} is {flat.numel()} bytes;"
                f" the manifest implies {expected_bytes}",
                reason="size",
            )
        return flat

    def _send_block(self, layer: int, section: Section, flat: Tensor, offset: int) -> None:
        num_bytes = min(self._block_bytes, flat.numel() - offset)
        is_sizing = section in SIZING_SECTIONS
        layout = flat[offset : offset + num_bytes].cpu().numpy().data if is_sizing else b""
        with self._condition:
            self._check_open()
            self._cursor.advance(
                layer=layer,
                section=section,
                total_bytes=flat.numel(),
                offset=offset,
                num_bytes=num_bytes,
                layout=layout,
            )
            self._buffer.reserve(num_bytes, timeout_s=self._timeout_s, check=self._check_open)
            self._messages.hold(num_bytes)
        payload = flat[offset : offset + num_bytes].cpu().numpy().data
        with self._condition:
            self._check_open()
            header = FrameHeader(
                type=MessageType.BLOCK,
                key=self.key,
                sequence=self._num_blocks,
                layer=layer,
                section=section,
                section_bytes=flat.numel(),
                offset=offset,
            )
            if self._owed_nothing():
                self._waiting_since_s = time.monotonic()
            self._messages.push(Queued(header, payload))
            self._num_blocks += 1
            self._queued_bytes += num_bytes
        self._wake()

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
            return self._state in _OVER and self._messages.is_empty

    @property
    def over(self) -> bool:
        """Acknowledged, aborted or failed."""
        with self._condition:
            return self._state in _OVER

    def next_message(self) -> tuple[bytes, memoryview] | None:
        """The message to send next, if there is one and the credit allows it. Stays next until `sent`."""
        with self._condition:
            found = self._messages.next()
        if found is None:
            return None
        queued, encoded = found
        if encoded is None:
            encoded = encode_header(queued.header, queued.payload)
            with self._condition:
                if not self._messages.set_encoded(queued, encoded):
                    return None
        return encoded, queued.payload

    def sent(self) -> None:
        """The message that `next_message` returned has gone."""
        with self._condition:
            kind = self._messages.sent()
            if kind is None:
                return
            self._last_sent_s = time.monotonic()
            if self._first_sent_s is None and kind in (MessageType.BLOCK, MessageType.END):
                self._first_sent_s = self._last_sent_s

    def on_message(self, header: FrameHeader, payload: memoryview) -> None:
        """The receiver said something about this transfer."""
        with self._condition:
            if self._state in _OVER:
                return
            self._waiting_since_s = time.monotonic()
            if header.type is MessageType.CREDIT:
                if problem := self._messages.wrote(header.section_bytes):
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
        """End it; there is no one to tell. No effect once it is over."""
        self._end(_State.FAILED, error, tell=None)

    def give_up_telling(self) -> None:
        """It is over and the receiver cannot be reached."""
        with self._condition:
            if self._state in _OVER:
                self._messages.drop_queued()

    def silent_s(self, now_s: float) -> float:
        """Seconds since the receiver was last heard of, while it owes an answer; else 0."""
        with self._condition:
            if self._state in _OVER or self._owed_nothing():
                return 0.0
            return now_s - self._waiting_since_s

    def quiet_s(self, now_s: float) -> float:
        """Seconds since something was last sent, while the transfer is open and its manifest gone."""
        with self._condition:
            is_open = self._messages.manifest_sent and self._state not in _OVER
            return now_s - self._last_sent_s if is_open else 0.0

    def kept_alive(self) -> None:
        """A keepalive was sent."""
        with self._condition:
            self._last_sent_s = time.monotonic()

    def release_written(self) -> None:
        """See `Holder`."""
        self._messages.release_written()

    def _owed_nothing(self) -> bool:
        return self._messages.all_written and self._state is not _State.FINISHING

    def _on_ack(self) -> None:
        if self._state is not _State.FINISHING or not self._messages.is_empty:
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
            receiver_may_know = self._messages.has_begun
            self._messages.drop_all()
            self._buffer.remove(self)
            if tell is not None and receiver_may_know:
                payload = memoryview(encode_abort(tell))
                self._messages.push(Queued(FrameHeader(type=MessageType.ABORT, key=self.key), payload))
            self._condition.notify_all()
        self._wake()
