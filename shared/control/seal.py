"""Seals of control messages: a checksum that is bound to the call and to the message's place in it.

gRPC has none of its own. With it, a message that was changed, repeated, left out, moved, or delivered to
another call is not taken for what was sent. A client of ours says in its metadata that it seals; a server
neither expects nor sends seals to others.
"""

from __future__ import annotations

import struct

import xxhash

from kvferry.shared.errors import WorkerUnavailable

SEALED_KEY = "kvferry-sealed"
_TAG = b"\xf9\x7f"
"""Field 2047, fixed64, which protobuf does not know and skips."""
_CHECKSUM = struct.Struct("<Q")
_SEAL_BYTES = len(_TAG) + _CHECKSUM.size


class Seal:
    """One direction of one call. Its messages must be passed in order.

    Args: request_id: of the call; empty where calls have none.
    """

    def __init__(self, request_id: str) -> None:
        self._seed = xxhash.xxh3_64_intdigest(request_id.encode(errors="replace")) if request_id else 0

    def close(self, message: bytes) -> bytes:
        """The next message to send."""
        return message + _TAG + self._checksum(message)

    def open(self, sealed: bytes) -> bytes:
        """The next message that was received.

        Raises: WorkerUnavailable: it is not the one that was sent ("damaged").
        """
        message, seal = sealed[:-_SEAL_BYTES], sealed[-_SEAL_BYTES:]
        if seal != _TAG + self._checksum(message):
            raise WorkerUnavailable("a control message arrived damaged or out of order", reason="damaged")
        return message

    def _checksum(self, message: bytes) -> bytes:
        checksum = xxhash.xxh3_64_intdigest(message, self._seed)
        self._seed = (self._seed + 1) % (1 << 64)
        return _CHECKSUM.pack(checksum)
