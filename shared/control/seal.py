"""Seals of control messages: a checksum that is bound to the call and to the message's place in it.

gRPC has none of its own. With seals, messages that were changed, repeated, lost, moved, or delivered to
another call are detected. A client of ours says in its metadata that it seals; a server neither expects nor
sends seals to others.

Workers are upgraded before routers, so a server also accepts the previous release's seals. A worker of the
previous release does not know these seals and answers without them; the client reports that.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable
from typing import Self

import xxhash

from kvferry.shared.errors import WorkerUnavailable

SEALED_KEY = "kvferry-call"
EARLIER_KEY = "kvferry-sealed"
"""What clients of the previous release send instead: their seals are bound to the request's id alone."""
_TAG = b"\xf9\x7f"
"""Field 2047, fixed64, which protobuf does not know and skips."""
_CHECKSUM = struct.Struct("<Q")
_SEAL_BYTES = len(_TAG) + _CHECKSUM.size


class Seal:
    """One direction of one call. Its messages must be passed in order.

    Args:
        path: the call's method. A damaged header can make a call look like one of another method.
        call_id: see `new_call_id`.
    """

    def __init__(self, path: str, call_id: str) -> None:
        self._seed = xxhash.xxh3_64_intdigest(f"{path} {call_id}".encode(errors="replace"))

    @classmethod
    def of_earlier(cls, request_id: str) -> Self:
        """Make a seal as clients of the previous release do.

        Args: request_id: of the call; empty where it has none.
        """
        seal = cls("", "")
        seal._seed = xxhash.xxh3_64_intdigest(request_id.encode(errors="replace")) if request_id else 0
        return seal

    def close(self, message: bytes) -> bytes:
        """Seal the next message to send."""
        return message + _TAG + self._checksum(message)

    def open(self, sealed: bytes) -> bytes:
        """Open the next message that was received.

        Raises: WorkerUnavailable: it is not the message that was sent ("damaged").
        """
        message, seal = sealed[:-_SEAL_BYTES], sealed[-_SEAL_BYTES:]
        if not is_sealed(sealed):
            raise WorkerUnavailable(
                "a control message arrived without its seal: it is damaged, or from a worker of an earlier "
                "release; workers are upgraded before routers",
                reason="damaged",
            )
        if seal != _TAG + self._checksum(message):
            raise WorkerUnavailable("a control message arrived damaged or out of order", reason="damaged")
        return message

    def of_status(self, code: str, details: str, fields: Iterable[tuple[str, str | bytes]]) -> str:
        """Return the seal of the status that ends the call. Args: fields: the error's metadata."""
        text = repr((code, details, sorted(fields)))
        return f"{xxhash.xxh3_64_intdigest(text.encode(errors='replace'), self._seed):016x}"

    def _checksum(self, message: bytes) -> bytes:
        checksum = xxhash.xxh3_64_intdigest(message, self._seed)
        self._seed = (self._seed + 1) % (1 << 64)
        return _CHECKSUM.pack(checksum)


def new_call_id() -> str:
    """Make an id that tells a call from all others. The client sends it under `SEALED_KEY`."""
    return secrets.token_hex(8)


def is_sealed(message: bytes) -> bool:
    """Return whether a message ends as sealed ones do, whatever the call's metadata says."""
    return message[-_SEAL_BYTES : -_CHECKSUM.size] == _TAG
