"""Stage `doctor`: `kvferry doctor --json`, a row for each of its findings."""

from __future__ import annotations

import json
import subprocess
import sys

import script
from record import Record


def doctor(record: Record, given: script.Given) -> None:
    """Note what it found; what it calls wrong is a failure, and what it warns of is not."""
    done = subprocess.run(
        [*script.KVFERRY, "doctor", "--json", "--device", given.device], stdout=subprocess.PIPE, text=True,
        timeout=given.left_s, check=False,
    )  # fmt: skip
    record.add("findings", *json.loads(done.stdout)["findings"])
    for finding in record.table("findings"):
        if finding["verdict"] == "fail":
            record.fail(f"{finding['check']}: {finding['found']}")


if __name__ == "__main__":
    sys.exit(script.run(doctor))
