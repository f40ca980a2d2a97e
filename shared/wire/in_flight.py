"""The messages of outgoing transfers, and the bound on the host memory that their blocks occupy.

    push ──► queued ──next, sent──► unacknowledged ──► released: the receiver has written it and the room is
                                                       needed, or the transfer is over

Place in the request's path: `transfer.py` decides what is queued and when a transfer is over; the sender's
thread takes messages from here as credit allows. Does no I/O.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.frames import HEADER_BYTES, FrameHeader, MessageType, encode_header
from kvferry.shared.wire.messages import TENSOR_KINDS


class SendBuffer:
    """A bound on the bytes of unacknowledged blocks over all transfers of a sender.

    Each block's bytes are reserved before it is queued. Blocks stay until their transfer is acknowledged
    while there is room; when there is none, those that receivers have reported as written are released, so
    that a transfer larger than the bound, or several that fill it together, still make progress.

    Attributes:
        condition: guards the buffer and every transfer that uses it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.condition = threading.Condition()
        self._users: set[InFlight] = set()

    def add(self, user: InFlight) -> None:
        """Register a transfer's messages. Condition held."""
        self._users.add(user)

    def remove(self, user: InFlight) -> None:
        """Condition held."""
        self._users.discard(user)

    def reserve(self, num_bytes: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Take room, waiting for it. Condition held; it is released while waiting.

        Args:
            num_bytes: at most `limit_bytes`.
            check: raises if there is no reason to wait any longer.

        Raises:
            TransferFailed: no room was free in time ("buffer_full").
        """
        assert num_bytes <= self.limit_bytes, (num_bytes, self.limit_bytes)
        if self.used_bytes + num_bytes > self.limit_bytes:
            self._wait_for_room(num_bytes, timeout_s, check)
        self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give room back. Condition held."""
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, self.used_bytes
        self.condition.notify_all()

    def _wait_for_room(self, num_bytes: int, timeout_s: float, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            check()
            for user in tuple(self._users):
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
class Queued:
    """A message to send.

    Attributes:
        kind: under which its payload is counted.
        encoded: the header frame; made by the sender's thread, which alone uses it.
    """

    header: FrameHeader
    payload: memoryview
    kind: str = "manifest"
    encoded: bytes = b""


class InFlight:
    """The messages of one transfer. Every method but `next` and `sent` wants the buffer's condition held.

    In flight are the bytes sent less those that the receiver reported as written; never above the credit.

    Attributes:
        bytes_by_kind: sent so far; see `OutgoingTransfer.bytes_by_kind`.
        first_sent_s: when the first block (or the end record, if there is none) was sent; None before that.
        last_sent_s: when anything was last sent.
    """

    def __init__(self, buffer: SendBuffer, *, credit_bytes: int) -> None:
        self.bytes_by_kind = dict.fromkeys((*TENSOR_KINDS, "manifest"), 0)
        self.first_sent_s: float | None = None
        self.last_sent_s = time.monotonic()
        self._buffer = buffer
        self._credit_bytes = credit_bytes
        self._queue: deque[Queued] = deque()
        self._sending: Queued | None = None
        self._unacknowledged: deque[Queued] = deque()
        self._reserved_bytes = 0
        self._sent_bytes = 0
        self._written_bytes = 0
        self._released_bytes = 0

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
        """Whether the receiver may know of the transfer: its manifest was sent, or is being sent."""
        return self.manifest_sent or self._sending is not None

    @property
    def manifest_sent(self) -> bool:
        return self.bytes_by_kind["manifest"] > 0

    def reserve(self, num_bytes: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Reserve buffer bytes for a block that is pushed next. See `SendBuffer.reserve`."""
        self._buffer.reserve(num_bytes, timeout_s=timeout_s, check=check)
        self._reserved_bytes += num_bytes

    def push(self, queued: Queued) -> None:
        self._queue.append(queued)

    def next(self) -> Queued | None:
        """The message to send next, encoded; None where nothing is queued or the credit does not allow it. It
        stays the next one until `sent`. Called by the sender's thread alone."""
        with self._buffer.condition:
            if not self._queue:
                return None
            queued = self._queue[0]
            if queued.header.type is MessageType.BLOCK:
                in_flight_bytes = self._sent_bytes - self._written_bytes
                if in_flight_bytes + queued.payload.nbytes > self._credit_bytes:
                    return None
            self._sending = queued
        if not queued.encoded:
            queued.encoded = encode_header(queued.header, queued.payload)
        return queued

    def sent(self) -> None:
        """The message that `next` returned was sent. Called by the sender's thread alone."""
        with self._buffer.condition:
            queued, self._sending = self._sending, None
            if queued is None:
                return  # dropped meanwhile
            self._queue.popleft()
            self.last_sent_s = time.monotonic()
            message_type = queued.header.type
            if message_type is MessageType.ABORT:
                return
            self.bytes_by_kind["manifest"] += HEADER_BYTES
            self.bytes_by_kind[queued.kind] += queued.payload.nbytes
            if message_type is MessageType.BLOCK:
                self._sent_bytes += queued.payload.nbytes
                self._unacknowledged.append(queued)
            if self.first_sent_s is None and message_type in (MessageType.BLOCK, MessageType.END):
                self.first_sent_s = self.last_sent_s

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
        """Release the blocks that the receiver has written."""
        blocks = self._unacknowledged
        while blocks and self._released_bytes + blocks[0].payload.nbytes <= self._written_bytes:
            num_bytes = blocks.popleft().payload.nbytes
            self._released_bytes += num_bytes
            self._reserved_bytes -= num_bytes
            self._buffer.release(num_bytes)

    def drop_queued(self) -> None:
        """Nothing that is queued is sent any more."""
        self._queue.clear()
        self._sending = None

    def drop_all(self) -> None:
        """Drop what is queued, and release every block."""
        self.drop_queued()
        self._unacknowledged.clear()
        self._buffer.release(self._reserved_bytes)
        self._reserved_bytes = 0
