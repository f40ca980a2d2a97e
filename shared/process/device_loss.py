"""Ends a worker whose device no longer works in its process, or one of whose ranks is lost, so that whatever
supervises it starts another.

After an illegal address, a kernel that does not end or a fault of the hardware every later call on the device
fails; a worker that stayed would never be ready again. Its requests get an error first that lets the router
replay them elsewhere.
"""

from __future__ import annotations

import os
import threading

import structlog

_log = structlog.get_logger(__name__)

EXIT_LOST = 70
GRACE_S = 2.0
"""Time for the requests' errors to reach the router."""


def end_process(error: BaseException) -> None:
    """End this process with `EXIT_LOST`, soon. Nothing is closed: that would wait for the device."""
    _log.critical("the device or a rank is lost; the worker ends", error=f"{type(error).__name__}: {error}")
    timer = threading.Timer(GRACE_S, os._exit, (EXIT_LOST,))
    timer.daemon = True
    timer.start()
