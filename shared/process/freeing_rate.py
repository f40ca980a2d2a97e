"""How fast bytes or places become free, by which a refusal says when a retry may succeed (Retry-After)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LONGEST_S = 60.0
"""No refusal says more than this of a rate: it is a guess from what ended of late."""
_REMEMBERED = 64


class FreeingRate:
    """Amounts that were freed of late. The caller sees to it that one thread at a time uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._freed: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._since_s = clock()

    def add(self, amount: float) -> None:
        """Note that so much became free now."""
        if len(self._freed) == _REMEMBERED:
            self._since_s = self._freed[0][0]
        self._freed.append((self._clock(), amount))

    def wait_s(self, amount: float, *, unknown_s: float = 1.0) -> float:
        """Seconds until so much will have become free if it goes on as of late, from 1 to `LONGEST_S`.

        Args: unknown_s: what to say if nothing was freed yet.
        """
        freed = sum(its for _, its in self._freed)
        wait_s = amount * (self._clock() - self._since_s) / freed if freed > 0 else unknown_s
        return min(max(1.0, wait_s), LONGEST_S)
