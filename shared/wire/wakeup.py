"""A way for any thread to wake one that polls sockets.

Place in the request's path: beside the ZeroMQ channels, whose sockets belong to their I/O thread alone. An
operating system socket pair, since those may be written to from any thread.
"""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """Level-triggered: `fileno` is readable from `set` until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        """Any thread; no effect after `close`."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
