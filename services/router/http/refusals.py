"""Requests of a caller that a full queue has just refused, refused again before they cost anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvferry.shared.errors import CapacityExceeded

REFUSED_S = 0.05
"""Much less than the second that a refused client is told to wait at least."""


class RecentRefusals:
    """A queue that is full for a caller (it refuses the caller with most waiting first) is full for the
    caller's next requests, too. Asking it again would take the router, which others use, the time to read,
    tokenize and place each of them.

    Args: clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[tuple[str, str], tuple[float, CapacityExceeded]] = {}
        """By caller and path: until when, and what is answered."""

    @contextmanager
    def around(self, owner: str, path: str) -> Iterator[None]:
        """Around a request of the caller.

        Raises: CapacityExceeded as the last one, if a queue refused that within `REFUSED_S`.
        """
        key = owner, path
        if (refused := self._refused.get(key)) is not None:
            until_s, last = refused
            if self._clock() < until_s:
                raise CapacityExceeded(last.message, reason=last.reason, retry_after_s=last.retry_after_s)
            del self._refused[key]
        try:
            yield
        except CapacityExceeded as error:
            if error.reason == "queue_full":
                self._refused[key] = self._clock() + REFUSED_S, error
            raise
