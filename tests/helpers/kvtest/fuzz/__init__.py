"""Structure-aware fuzzing of everything that reads bytes from outside: cases that are nearly right.

`mutate.py` spoils bytes and trees, `targets.py` and `files.py` have the readers, `requests.py` the HTTP API,
`run.py` counts and measures. A case follows from a target's name, a seed and a number.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtest.fuzz.files import disk_target, sessions_target, stored_target
from kvtest.fuzz.run import Target
from kvtest.fuzz.targets import control_target, frames_target, records_target

TARGETS: dict[str, Callable[[], Target]] = {
    "frames": frames_target,
    "records": records_target,
    "control": control_target,
    "sessions": sessions_target,
    "stored": stored_target,
    "disk": disk_target,
}
"""All but HTTP."""
