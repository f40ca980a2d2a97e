"""A circuit breaker: after several failures in a row, calls fail at once for a while instead of each waiting.

It guards every operation on Redis, so that a dead Redis delays one turn for a bounded time and the next ones
not at all. It does not retry.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kvferry.shared.errors import StoreUnavailable


class CircuitBreaker:
    """Thread-safe.

        CLOSED ──max_failures calls in a row fail──► OPEN ──open_s pass──► one trial ──succeeds──► CLOSED
                                                      ▲                        │
                                                      └── fails, or never ends ┘

    Another trial is allowed `open_s` after the last one, even if that never reported its end.
    """

    def __init__(
        self,
        *,
        max_failures: int,
        open_s: float,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Args: open_s: how long it stays open, times 0.75 to 1.25 at random, so that workers do not return
        together; clock: monotonic seconds."""
        self._max_failures = max_failures
        self._open_s = open_s
        self._clock = clock
        self._uniform = uniform
        self._lock = threading.Lock()
        self._num_failures = 0
        self._retry_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last calls failed. A call may still be allowed, as a trial."""
        with self._lock:
            return self._num_failures >= self._max_failures

    def enter(self) -> None:
        """Call this before a call. Raises StoreUnavailable, reason "breaker_open", if the call should not be
        made."""
        with self._lock:
            if self._num_failures < self._max_failures:
                return
            wait_s = self._retry_at_s - self._clock()
            if wait_s > 0:
                raise StoreUnavailable(
                    f"Redis did not answer recently; the next attempt is in {wait_s:.1f} s",
                    reason="breaker_open",
                    retry_after_s=wait_s,
                )
            self._postpone()

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures = 0

    def failed(self) -> None:
        with self._lock:
            self._num_failures += 1
            self._postpone()

    def _postpone(self) -> None:
        self._retry_at_s = self._clock() + self._open_s * self._uniform(0.75, 1.25)
