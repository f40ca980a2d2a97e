"""The two ends of a ring of shared memory between processes, and of the Unix socket beside it.

Place in the request's path: under the channels of `shared_memory.py`. The sender makes the ring, passes it
over the socket, copies large messages into it and sends their positions; the receiver reads them in place and
reports how far it has read. Each end is used by its I/O thread only.

    packet        from        bytes
    hello         sender      b"ring", with the memory's descriptor
    message       both        position u64, number of frames u32, their sizes u32; the frames if small
    report        receiver    position u64 up to which the ring is read; the first one answers hello
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence

import numpy as np
import structlog

from kvferry.shared.wire.channel import Peer, Received, SendResult
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES
from kvferry.shared.wire.zmq import BATCH_MESSAGES

PACKETS_VERSION = 1
RING_BYTES = 4 * MAX_PAYLOAD_BYTES
"""A sender's ring to one receiver; at least 8/3 of the largest message, see `Ring`."""
_IN_PACKET_BYTES = 8 << 10
"""Messages up to this size, and all answers, are in their packet."""
_IN_PACKET = 2**64 - 1
"""The position of such a message."""
_MAX_PACKET_BYTES = 16 << 10
_SOCKET_BUFFER_BYTES = 1 << 20
_HELLO = b"ring"
_HEAD = struct.Struct("=QI")
_REPORT = struct.Struct("=Q")
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

_log = structlog.get_logger(__name__)


class Ring:
    """Which bytes of a ring are in use. Positions count all bytes that ever went through it.

        ── free ── freed ══ in use ══ used ── free ──        (modulo the size)

    A message is contiguous: where the rest of the ring is too short, it begins at the start again. The
    receiver reports what it has read when that is a quarter of the ring. So a message of at most 3/8 of the
    ring, which may skip as much, has room once everything before it is read.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.freed = self.used = 0

    def place(self, num_bytes: int) -> int | None:
        """Find a message's position; None if there is no room. It is in use once `used` is set behind it."""
        start = self.used
        if start % self.size_bytes + num_bytes > self.size_bytes:
            start += self.size_bytes - start % self.size_bytes
        return start if start + num_bytes <= self.freed + self.size_bytes else None


class _Connection:
    """A connected Unix socket, which transmits packets whole.

    Attributes:
        is_lost: whether the connection is lost, and everything received over it was returned.
        is_full: whether a packet did not fit into the socket's buffer.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self.socket = connected
        self.is_lost = self.is_full = False

    def send_packet(self, *parts: memoryview | bytes) -> bool:
        """Return whether the packet was sent. If the connection is lost, `receive` notices."""
        try:
            self.socket.sendmsg(parts)
        except BlockingIOError:
            self.is_full = True
            return False
        except OSError:
            return False
        return True

    def receive(self, peer: Peer) -> list[Received]:
        """Return the next messages that have arrived."""
        received: list[Received] = []
        while len(received) < BATCH_MESSAGES and not self.is_lost:
            try:
                packet = self.receive_packet()
                self.is_lost = not packet
                if packet and (frames := self.frames_of(packet)) is not None:
                    received.append(Received(peer, frames))
            except BlockingIOError:
                break
            except ConnectionResetError:
                pass  # occurs once if the peer closed before reading everything; what it sent comes next
            except (OSError, ValueError, struct.error) as error:
                _log.warning("a connection for blocks failed", error=str(error))
                self.is_lost = True
        return received

    def receive_packet(self) -> bytes:
        return self.socket.recv(_MAX_PACKET_BYTES)

    def frames_of(self, packet: bytes) -> list[memoryview] | None:
        """Return a packet's message; None if it has none. Raises ValueError, struct.error: it is
        malformed."""
        raise NotImplementedError


class RingWriter(_Connection):
    """A sender's connection. It makes the ring, and may be used once the receiver also has it."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.opened_s = self.used_s = time.monotonic()
        self.is_ready = False
        self._ring = Ring(RING_BYTES)
        descriptor = os.memfd_create("kvferry-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, RING_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._memory = np.frombuffer(mmap.mmap(descriptor, RING_BYTES), np.uint8)
            socket.send_fds(connected, [_HELLO], [descriptor])
        finally:
            os.close(descriptor)

    def send(self, frames: Sequence[memoryview | bytes]) -> SendResult:
        self.used_s = time.monotonic()
        sizes = tuple(map(len, frames))
        num_bytes = sum(sizes)
        if not self.is_ready:
            return SendResult.BLOCKED
        if num_bytes <= _IN_PACKET_BYTES:
            sent = self.send_packet(_head(_IN_PACKET, sizes), *frames)
            return SendResult.SENT if sent else SendResult.BLOCKED
        position = self._ring.place(num_bytes)
        if position is None:
            return SendResult.BLOCKED
        start = position % self._ring.size_bytes
        for frame, size in zip(frames, sizes, strict=True):
            # numpy lets other threads run meanwhile, unlike the copy of a memoryview.
            self._memory[start : start + size] = np.frombuffer(frame, np.uint8)
            start += size
        if not self.send_packet(_head(position, sizes)):
            return SendResult.BLOCKED
        self._ring.used = position + num_bytes
        return SendResult.SENT

    def frames_of(self, packet: bytes) -> list[memoryview] | None:
        if len(packet) != _REPORT.size:
            return _unpack(packet, memoryview(b""))[1]
        (self._ring.freed,) = _REPORT.unpack(packet)
        self.is_ready = True
        return None


class RingReader(_Connection):
    """A receiver's connection. The sender's first packet brings the ring."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self._memory = memoryview(b"")
        self._read = self._reported = 0

    def receive_packet(self) -> bytes:
        return super().receive_packet() if self._memory else self._receive_ring()

    def frames_of(self, packet: bytes) -> list[memoryview] | None:
        """Return views of the ring that are valid until `report`."""
        if packet == _HELLO:
            return None
        position, frames = _unpack(packet, self._memory)
        if position != _IN_PACKET:
            self._read = position + sum(map(len, frames))
        return frames

    def report(self) -> None:
        """Tell the sender what was read, from time to time."""
        if self._read - self._reported >= max(1, len(self._memory) // 4):
            self._reported = self._read
            self._send_or_end(_REPORT.pack(self._read))

    def answer(self, frames: Sequence[memoryview | bytes]) -> SendResult:
        return self._send_or_end(_head(_IN_PACKET, tuple(map(len, frames))), *frames)

    def _send_or_end(self, *parts: memoryview | bytes) -> SendResult:
        """Send a packet; end the connection if that is not possible at once."""
        if self.send_packet(*parts):
            return SendResult.SENT
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        return SendResult.LOST

    def _receive_ring(self) -> bytes:
        packet, descriptors, _, _ = socket.recv_fds(self.socket, _MAX_PACKET_BYTES, 1, _CLOSE_ON_EXEC)
        try:
            if packet and (packet != _HELLO or len(descriptors) != 1):
                raise ValueError("a sender's first packet has no ring")
            for descriptor in descriptors:
                # A file that its sender could shorten could end this process.
                if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise ValueError("a sender's ring is not sealed")
                self._memory = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
                self._send_or_end(_REPORT.pack(0))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return packet


def _head(position: int, sizes: Sequence[int]) -> bytes:
    return struct.pack(f"=QI{len(sizes)}I", position, len(sizes), *sizes)


def _unpack(packet: bytes, ring: memoryview) -> tuple[int, list[memoryview]]:
    """Return a message's position and its frames, in the packet or the ring."""
    position, count = _HEAD.unpack_from(packet)
    sizes = struct.unpack_from(f"={count}I", packet, _HEAD.size)
    if position == _IN_PACKET:
        data = memoryview(packet)[_HEAD.size + 4 * count :]
    else:
        start = position % max(1, len(ring))
        data = ring[start : start + sum(sizes)]
    ends = (0, *itertools.accumulate(sizes))
    if len(data) != ends[-1]:
        raise ValueError(f"a message of {sum(sizes)} bytes at {position} is not within its ring")
    return position, [data[start:end] for start, end in itertools.pairwise(ends)]
