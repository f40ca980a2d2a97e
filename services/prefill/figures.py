"""Figures that a worker measures of itself and forgets: a median of the last few, by name and size.

Asked by `history_cost.py`. Knows nothing of what is measured.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

_NUM_KEPT = 5
"""Measurements at about one size; the median of so many bears two that a busy machine has spoilt."""
_MIN_WEIGHT = 2.1
"""Three fresh measurements make a figure. Once they have decayed below it, one fresh one brings it back."""


class DecayingFigures:
    """Measurements, each half as heavy every half-life. Thread-safe.

    A figure depends on sizes. Measurements are kept by each size's power of two, so their number is bounded;
    those at the sizes asked for and at the powers of two next to them answer together.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, half_life_s: float, clock: Callable[[], float]) -> None:
        self._half_life_s = half_life_s
        self._clock = clock
        self._lock = threading.Lock()
        self._measured: dict[tuple[str, tuple[int, ...]], deque[tuple[float, float]]] = {}

    def add(self, name: str, value: float, *sizes: int) -> None:
        """Note a measurement."""
        key = (name, tuple(size.bit_length() for size in sizes))
        with self._lock:
            self._measured.setdefault(key, deque(maxlen=_NUM_KEPT)).append((self._clock(), value))

    def get(self, name: str, *sizes: int) -> float | None:
        """The weighted median, or None where too little was measured lately."""
        powers = [size.bit_length() for size in sizes]
        nearby = itertools.product(*(range(power - 1, power + 2) for power in powers))
        with self._lock:
            now_s = self._clock()
            weighted = sorted(
                (value, 0.5 ** ((now_s - at_s) / self._half_life_s))
                for near in nearby
                for at_s, value in self._measured.get((name, near), ())
            )
        total = sum(weight for _, weight in weighted)
        if total < _MIN_WEIGHT:
            return None
        below = 0.0
        for value, weight in weighted:
            below += weight
            if below >= total / 2:
                return value
        raise AssertionError("the weights add up to less than half of their sum")
