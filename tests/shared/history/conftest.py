"""The fixtures of `kvtest.history`."""

from __future__ import annotations

from kvtest.history import make_any_worker as make_any_worker
from kvtest.history import make_disk_worker as make_disk_worker
from kvtest.history import make_worker as make_worker
