"""The bound on what a sender keeps in host memory, over all its transfers.

Place in the request's path: a transfer reserves each block's bytes before it is queued and gives them back
when the transfer is over. Counts bytes; the blocks themselves stay with their transfers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvferry.shared.errors import TransferFailed


class Holder(Protocol):
    """A transfer that holds bytes of the buffer."""

    def release_written(self) -> None:
        """Let go of blocks that the receiver has written. Called with the buffer's condition held."""
        ...


class SendBuffer:
    """Byte count with a bound, and the one condition that a sender's threads wait on.

        reserve ──► held by a transfer ──► release      (acknowledged, aborted or failed)
                            └──► release                (written by the receiver, if another block needs room)

    Blocks are kept until their transfer is acknowledged as long as there is room. When there is none, those
    that receivers have already confirmed are let go, so transfers larger than the bound, or several that
    together fill it, still make progress.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.condition = threading.Condition()
        self._holders: set[Holder] = set()

    def add(self, holder: Holder) -> None:
        """Condition held."""
        self._holders.add(holder)

    def remove(self, holder: Holder) -> None:
        """Condition held."""
        self._holders.discard(holder)

    def reserve(self, num_bytes: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Take room, waiting for it. Condition held; it is let go while waiting.

        Args:
            num_bytes: at most `limit_bytes`.
            check: raises if there is no reason to wait any longer.

        Raises:
            TransferFailed: no room came free in time ("buffer_full").
        """
        assert num_bytes <= self.limit_bytes, (num_bytes, self.limit_bytes)
        deadline = time.monotonic() + timeout_s
        while True:
            check()
            if not self._fits(num_bytes):
                for holder in tuple(self._holders):
                    holder.release_written()
            if self._fits(num_bytes):
                self.used_bytes += num_bytes
                return
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TransferFailed(
                    f"no room for a block of {num_bytes} bytes within {timeout_s} s; send buffer holds"
                    f" {self.used_bytes} of at most {self.limit_bytes}",
                    reason="buffer_full",
                )
            self.condition.wait(remaining_s)

    def release(self, num_bytes: int) -> None:
        """Give room back. Condition held."""
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, self.used_bytes
        self.condition.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.limit_bytes
