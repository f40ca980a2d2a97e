"""Tells whether a worker's engine is wedged: its thread makes no progress, does not compute, and waits for
nothing that would end by itself.

Written by the engine's thread, read by its service, which then gives up the engine's requests. A busy engine
is never wedged, however long one operation takes: the thread's processor time tells the two apart. On a GPU
it does not, because the thread sleeps while the device computes; there the limit is longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STALL_S = 4.0
"""How long an engine's thread may neither make progress nor compute."""
GPU_STALL_S = 30.0
"""The same where a device computes."""
FRESH_S = 0.25
"""An engine whose progress is this recent is not examined further."""
_COMPUTES_S = 0.001
_LEAST_LOOKS = 3
"""If the whole process stood still, its engine gets time to go on: a long time between two checks says
nothing about one thread."""


class Heartbeat:
    """One engine's signs of life.

    Attributes:
        last_s: when the engine last made progress; the engine assigns it.
        waits: whether the engine waits for work, or for something that has a time limit of its own, and no
            device computes for it; the engine assigns it.
    """

    def __init__(self, clock: Callable[[], float], device_type: str) -> None:
        self.last_s = clock()
        self.waits = True
        self._clock = clock
        self._device_type = device_type
        self._mark: tuple[float, float, float] | None = None
        """The last progress and the thread's processor time when it was first seen without either, and when
        that was."""
        self._num_looks = 0

    def is_wedged(self, thread: threading.Thread, *, may_rest: bool = False) -> bool:
        """Return whether the engine is wedged; called a few times a second.

        Args: thread: the engine's; may_rest: it need not make progress now.
        """
        now_s = self._clock()
        if may_rest or now_s - self.last_s < FRESH_S or thread.ident is None or not thread.is_alive():
            self._mark = None
            return False
        used_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        if (
            self._mark is None
            or self._mark[0] != self.last_s
            or (self._device_type == "cpu" and used_s - self._mark[1] > _COMPUTES_S)
        ):
            self._mark, self._num_looks = (self.last_s, used_s, now_s), 0
            return False
        self._num_looks += 1
        limit_s = STALL_S if self._device_type == "cpu" or self.waits else GPU_STALL_S
        return now_s - self._mark[2] >= limit_s and self._num_looks >= _LEAST_LOOKS
