"""The run's time limit: work is begun while there is time for it, and the run ends in time whatever hangs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

GRACE_S = 15.0
"""Left for writing results."""


class TimeLimit:
    """Args:
    limit_s: seconds from now in which the run ends.
    on_overrun: writes what there is when something has not come back in time; the process ends after it.
    """

    def __init__(self, limit_s: float, on_overrun: Callable[[], None]) -> None:
        self._end_s = time.monotonic() + limit_s - GRACE_S
        self._on_overrun = on_overrun
        # a kernel that hangs holds the main thread, not this one
        self._timer = threading.Timer(limit_s - GRACE_S / 2, self._overrun)
        self._timer.daemon = True
        self._timer.start()

    @property
    def left_s(self) -> float:
        return max(self._end_s - time.monotonic(), 0.0)

    def done(self) -> None:
        self._timer.cancel()

    def _overrun(self) -> None:
        sys.stderr.write(
            "the time limit has passed and a case has not returned; the results so far are saved\n"
        )
        self._on_overrun()
        sys.stderr.flush()
        os._exit(1)
