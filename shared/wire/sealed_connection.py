"""One sealed TCP connection: its handshake, then messages in records that are encrypted and authenticated.

Place in the request's path: under the channels of `sealed.py`, whose I/O thread alone uses it. `noise.py` has
the handshake and the ciphers; when to connect and whom to accept is not decided here.

    initiator  48 bytes ──►          head ── body ── body ── head ── body ...   (each way)
               ◄── 48 bytes  responder

The initiator's 48 bytes prove nothing, because they may be a recording. Its first head proves that it has the
right key: what seals it depends also on what the responder has just chosen.

A message is a head, which says how many frames it has and how long they are, and the frames' bytes in records
of RECORD_BYTES, the last one shorter. Each is sealed, so no length is believed that the peer did not send.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.messages import MAX_LAYER_TENSORS
from kvferry.shared.wire.noise import HANDSHAKE_BYTES, TAG_BYTES, Cipher, Handshake

RECORD_BYTES = 1 << 20
"""Of plain bytes. Cipher and socket pass what a processor's cache holds, in few calls."""
MAX_FRAMES = 2 + MAX_LAYER_TENSORS
_SMALL_BYTES = 64 << 10
_HEAD = struct.Struct(f"<{1 + MAX_FRAMES}I")
_SEALED_HEAD_BYTES = _HEAD.size + TAG_BYTES
_UNACKNOWLEDGED_MS = 10_000
_PROBE_S = 3
_WINDOW_BYTES = 2 << 20
_UNSENT_BYTES = 1 << 20
_NO_BYTES = memoryview(b"")


class ConnectionClosed(TransferFailed):
    """The other end has closed the connection, or the network has."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the connection is closed: {cause}", reason="peer_lost")


@dataclass(slots=True, eq=False)
class _Record:
    """What one record has of a message.

    Attributes: head: how the message is divided, sealed before its first record; else empty.
    """

    head: bytes
    size_bytes: int
    parts: Sequence[memoryview]


class SealedConnection:
    """A connected, non-blocking socket and the state of both directions.

        initiator  greeting ──answer──► ready ──────────────┐
                                                            ├─ closed, broken or not authentic ─► lost:
        responder  greeting ──► answered ──head──► ready ───┘                     the owner closes it

    While the socket takes or gives one full record, a thread of `cipher_thread` seals the next one or opens
    the one before.

    Attributes:
        is_ready: whether the other end has proved its key, so that messages may be sent. The buffers for
            records are made then, and none before.
        wants_room: whether something waits to be sent.
        socket: for the owner to poll and to close.
    """

    def __init__(
        self,
        connected: socket.socket,
        handshake: Handshake,
        *,
        max_message_bytes: int,
        cipher_thread: Executor,
    ) -> None:
        """
        Args:
            max_message_bytes: of one received message's frames together.
            cipher_thread: runs what it is given one after another.
        """
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            _set_options(connected)
        self.socket = connected
        self.is_ready = False
        self._handshake: Handshake | None = handshake  # until it is over
        self._max_message_bytes = max_message_bytes
        self._cipher_thread = cipher_thread
        self._outgoing: deque[_Record] = deque()
        self._sealing: Future[memoryview] | None = None
        self._sealed = _NO_BYTES
        self._scratch = [_NO_BYTES, _NO_BYTES]
        """What is sent, and what is sealed meanwhile."""
        self._incoming = [_NO_BYTES, _NO_BYTES]
        """The record that is received, and the one that is opened meanwhile."""
        self._opening: Future[None] | None = None
        self._head = memoryview(bytearray(_SEALED_HEAD_BYTES))
        self._sizes: list[int] | None = None
        self._large = _NO_BYTES
        self._body = _NO_BYTES
        self._begin = self._received = 0
        """Where the incoming record's plain bytes start in the body, and how much of the record has come."""
        self._seals: Cipher
        self._opens: Cipher
        if handshake.initiates:
            self._sealed = memoryview(handshake.write())

    @property
    def wants_room(self) -> bool:
        return bool(self._sealed or self._sealing or self._outgoing)

    @property
    def reuses_memory(self) -> bool:
        """Whether the next `receive` changes the frames of the last one."""
        return self._body is self._large

    @property
    def num_waiting(self) -> int:
        """Records that are not sealed."""
        return len(self._outgoing)

    def send(self, frames: Sequence[memoryview | bytes]) -> None:
        """Queue one message and send what the socket takes. The frames must not change until it is sent.

        Raises: ConnectionClosed
        """
        assert self.is_ready
        assert len(frames) <= MAX_FRAMES
        sizes = [len(frame) for frame in frames]
        head = _HEAD.pack(len(sizes), *sizes, *[0] * (MAX_FRAMES - len(sizes)))
        for record in _records([memoryview(frame) for frame in frames], head):
            self._outgoing.append(record)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes.

        Raises: ConnectionClosed
        """
        try:
            while True:
                while self._sealed:
                    self._sealed = self._sealed[self.socket.send(self._sealed) :]
                if self._sealing is not None:
                    self._sealed, self._sealing = self._sealing.result(), None
                elif self._outgoing:
                    self._sealed = self._seal(self._outgoing.popleft())
                else:
                    return
                if self._outgoing and self._outgoing[0].size_bytes > _SMALL_BYTES:
                    self._sealing = self._cipher_thread.submit(self._seal, self._outgoing.popleft())
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionClosed(str(error)) from error

    def receive(self) -> list[memoryview] | None:
        """The frames of the next message if it has come completely, else None. Frames of more than
        _SMALL_BYTES are valid until the next call only.

        Raises: ConnectionClosed, NotAuthentic; TransferFailed for a message that is too large.
        """
        if self._handshake is not None and not self._greet(self._handshake):
            return None
        while True:
            if self._sizes is None:
                if not self._fill(self._head):
                    return None
                self._sizes = self._open_head()
                self._begin = 0
                if not self.is_ready:
                    self._make_ready()
            total_bytes = sum(self._sizes)
            while self._begin < total_bytes:
                end = min(self._begin + RECORD_BYTES, total_bytes)
                record = self._incoming[0][: end - self._begin + TAG_BYTES]
                if not self._fill(record):
                    return None
                self._open(record, self._body[self._begin : end], is_last=end == total_bytes)
                self._begin = end
            frames, start = [], 0
            for size in self._sizes:
                frames.append(self._body[start : start + size])
                start += size
            self._sizes = None
            return frames

    def _greet(self, handshake: Handshake) -> bool:
        """Go on with the handshake; returns whether it is over."""
        message = self._head[:HANDSHAKE_BYTES]
        if not self._fill(message):
            return False
        handshake.read(bytes(message))
        if not handshake.initiates:
            self._sealed = memoryview(handshake.write())
            self.flush()
        self._seals, self._opens = handshake.split()
        self._handshake = None
        if handshake.initiates:
            self._make_ready()
        return True

    def _make_ready(self) -> None:
        record_bytes = _SEALED_HEAD_BYTES + RECORD_BYTES + TAG_BYTES
        self._scratch = [memoryview(bytearray(record_bytes)) for _ in self._scratch]
        self._incoming = [memoryview(bytearray(record_bytes)) for _ in self._incoming]
        self.is_ready = True

    def _fill(self, record: memoryview) -> bool:
        """Receive into the rest of a record; returns whether it is complete."""
        while self._received < len(record):
            try:
                received = self.socket.recv_into(record[self._received :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionClosed(str(error)) from error
            if received == 0:
                raise ConnectionClosed("by the other end")
            self._received += received
        self._received = 0
        return True

    def _open_head(self) -> list[int]:
        """The sizes of a message's frames, with the buffer for them made ready."""
        self._opens.open(self._head, self._head[: _HEAD.size])
        num_frames, *sizes = _HEAD.unpack(self._head[: _HEAD.size])
        if num_frames > MAX_FRAMES or (total_bytes := sum(sizes[:num_frames])) > self._max_message_bytes:
            raise TransferFailed(
                f"a message has {num_frames} frames of {sum(sizes)} bytes; {MAX_FRAMES} frames of"
                f" {self._max_message_bytes} bytes are allowed",
                reason="size",
            )
        if total_bytes <= _SMALL_BYTES:
            self._body = memoryview(bytearray(total_bytes))
        else:
            if len(self._large) < total_bytes:
                self._large = memoryview(bytearray(total_bytes))
            self._body = self._large
        return sizes[:num_frames]

    def _open(self, record: memoryview, plain: memoryview, *, is_last: bool) -> None:
        """Open a body's record, or let the cipher's thread do it while the next one is received."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            opening.result()
        if is_last:
            self._opens.open(record, plain)
        else:
            self._opening = self._cipher_thread.submit(self._opens.open, record, plain)
            self._incoming.reverse()

    def _seal(self, record: _Record) -> memoryview:
        """The record's sealed bytes, valid until the one after the next is sealed."""
        self._scratch.reverse()
        scratch = self._scratch[0]
        start = 0
        if record.head:
            start = _SEALED_HEAD_BYTES
            self._seals.seal(record.head, scratch[:start])
        if record.parts:
            sealed = scratch[start : start + record.size_bytes + TAG_BYTES]
            parts = record.parts
            plain = parts[0] if len(parts) == 1 else _joined(parts, sealed[: record.size_bytes])
            self._seals.seal(plain, sealed)
            start += len(sealed)
        return scratch[:start]


def _records(frames: Sequence[memoryview], head: bytes) -> Iterator[_Record]:
    """A message in records."""
    parts: list[memoryview] = []
    room = RECORD_BYTES
    for frame in frames:
        while len(frame):
            parts.append(frame[:room])
            taken = len(parts[-1])
            frame, room = frame[taken:], room - taken
            if room == 0:
                yield _Record(head, RECORD_BYTES, parts)
                parts, room, head = [], RECORD_BYTES, b""
    if parts or head:
        yield _Record(head, RECORD_BYTES - room, parts)


def _joined(parts: Sequence[memoryview], place: memoryview) -> memoryview:
    start = 0
    for part in parts:
        place[start : start + len(part)] = part
        start += len(part)
    return place


def _set_options(connected: socket.socket) -> None:
    """Let the system end a connection whose other end does not answer any more, and queue no more than is
    read again while it is in a processor's cache: that halves what receiving costs."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
        ("TCP_KEEPIDLE", _PROBE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", _UNACKNOWLEDGED_MS // (_PROBE_S * 1000)),
        ("TCP_WINDOW_CLAMP", _WINDOW_BYTES),
        ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),
    ):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
