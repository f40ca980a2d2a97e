"""How fast bytes or places become free: tells a refusal when a retry may succeed (Retry-After)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LONGEST_S = 60.0
"""No refusal names a longer wait: a rate is a guess from what ended recently."""
_REMEMBERED = 64


class FreeingRate:
    """Amounts that were freed recently. The caller ensures that one thread at a time uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._freed: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._since_s = clock()

    def add(self, amount: float) -> None:
        """Note that this amount became free now."""
        if len(self._freed) == _REMEMBERED:
            self._since_s = self._freed[0][0]
        self._freed.append((self._clock(), amount))

    def wait_s(self, amount: float, *, unknown_s: float = 1.0) -> float:
        """Estimate the seconds until this amount is free at the recent rate, from 1 to `LONGEST_S`.

        Args: unknown_s: the answer if nothing was freed yet.
        """
        freed = sum(part for _, part in self._freed)
        wait_s = amount * (self._clock() - self._since_s) / freed if freed > 0 else unknown_s
        return min(max(1.0, wait_s), LONGEST_S)
