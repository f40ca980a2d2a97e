"""The fixtures of `kvtest.history`."""

from __future__ import annotations

from kvtest.history import make_worker as make_worker
