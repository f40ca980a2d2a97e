"""A transfer's messages on their way: queued, in flight, and kept until the receiver has written them.

    push ──► queue ──next, sent──► kept ──► let go: written and room is wanted, or the transfer is over

Place in the request's path: `transfer.py` decides what is queued and when it is over; this counts. Every call
wants the send buffer's condition held. Does no I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvferry.shared.wire.buffer import SendBuffer
from kvferry.shared.wire.frames import HEADER_BYTES, FrameHeader, MessageType
from kvferry.shared.wire.messages import Section


@dataclass(frozen=True, slots=True)
class Queued:
    """A message that is to be sent."""

    header: FrameHeader
    payload: memoryview


class InFlight:
    """The messages of one transfer.

    In flight are the bytes sent less those that the receiver reported as written; never above the credit.

    Attributes:
        bytes_by_kind: sent so far; see `SendingTransfer.bytes_by_kind`.
    """

    def __init__(self, buffer: SendBuffer, *, credit_bytes: int) -> None:
        self.bytes_by_kind = {section.kind: 0 for section in Section}
        self._buffer = buffer
        self._credit_bytes = credit_bytes
        self._queue: deque[Queued] = deque()
        self._encoded: bytes | None = None
        self._kept: deque[Queued] = deque()
        self._held_bytes = 0
        self._sent_bytes = 0
        self._written_bytes = 0
        self._kept_from_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue

    @property
    def all_written(self) -> bool:
        """Whether nothing is queued, and the receiver has written all that was sent."""
        return not self._queue and self._sent_bytes == self._written_bytes

    @property
    def has_begun(self) -> bool:
        """Whether the receiver may know of the transfer: its manifest has gone, or is going."""
        return self.manifest_sent or self._encoded is not None

    @property
    def manifest_sent(self) -> bool:
        return self.bytes_by_kind["manifest"] > 0

    def hold(self, num_bytes: int) -> None:
        """Bytes of the buffer were reserved for a block that is queued next."""
        self._held_bytes += num_bytes

    def push(self, queued: Queued) -> None:
        self._queue.append(queued)

    def next(self) -> tuple[Queued, bytes | None] | None:
        """What to send next and its header as `set_encoded` has it; None where nothing is queued or the
        credit does not allow it. Stays next until `sent`."""
        if not self._queue:
            return None
        queued = self._queue[0]
        if queued.header.type is MessageType.BLOCK:
            in_flight_bytes = self._sent_bytes - self._written_bytes
            if in_flight_bytes + queued.payload.nbytes > self._credit_bytes:
                return None
        return queued, self._encoded

    def set_encoded(self, queued: Queued, encoded: bytes) -> bool:
        """Remember the header of the message that is next; False where another one is next by now."""
        if not self._queue or self._queue[0] is not queued:
            return False
        self._encoded = encoded
        return True

    def sent(self) -> MessageType | None:
        """The message that was next has gone; returns its type, None where it was dropped."""
        if self._encoded is None:
            return None
        self._encoded = None
        queued = self._queue.popleft()
        kind = queued.header.type
        if kind is MessageType.ABORT:
            return kind
        self.bytes_by_kind["manifest"] += HEADER_BYTES
        if kind is MessageType.BLOCK:
            self.bytes_by_kind[Section(queued.header.section).kind] += queued.payload.nbytes
            self._sent_bytes += queued.payload.nbytes
            self._kept.append(queued)
        else:
            self.bytes_by_kind["manifest"] += queued.payload.nbytes
        return kind

    def wrote(self, written_bytes: int) -> str | None:
        """The receiver reports bytes as written; returns what is wrong with that, None where nothing is."""
        if not self._written_bytes <= written_bytes <= self._sent_bytes:
            return (
                f"receiver reports {written_bytes} bytes written; {self._written_bytes} to"
                f" {self._sent_bytes} is possible"
            )
        self._written_bytes = written_bytes
        return None

    def release_written(self) -> None:
        """Let go of blocks that the receiver has written."""
        while self._kept and self._kept_from_bytes + self._kept[0].payload.nbytes <= self._written_bytes:
            num_bytes = self._kept.popleft().payload.nbytes
            self._kept_from_bytes += num_bytes
            self._held_bytes -= num_bytes
            self._buffer.release(num_bytes)

    def drop_queued(self) -> None:
        self._queue.clear()
        self._encoded = None

    def drop_all(self) -> None:
        """Nothing is sent or kept any more."""
        self.drop_queued()
        self._kept.clear()
        self._buffer.release(self._held_bytes)
        self._held_bytes = 0
