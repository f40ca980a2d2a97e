"""What first light's own stages share: their options, and a record that is written after every row."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from record import Record

KVFERRY = (sys.executable, "-c", "from kvferry.services.launcher.cli import main; main()")
"""The command, where it may not be installed."""
_MARGIN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options of a stage. Attributes: end_s: by `time.monotonic`, when it should have ended."""

    end_s: float
    is_tiny: bool
    is_long: bool

    @property
    def left_s(self) -> float:
        return max(self.end_s - time.monotonic(), 1.0)

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"


def run(stage: Callable[[Record, Given], None]) -> int:
    """Run a stage as a process does. Returns its status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    record = Record(given.output)
    end_s = time.monotonic() + given.limit_s - _MARGIN_S
    try:
        stage(record, Given(end_s=end_s, is_tiny=given.check, is_long=given.long))
    except Exception as error:  # what there is by then is kept, and the status says it
        record.fail(stage.__name__, error)
    record.save()
    return 1 if record.fields["failures"] else 0
