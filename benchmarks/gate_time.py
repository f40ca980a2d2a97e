"""How long the gate of a change takes: `.ci/run` in a fresh clone, with nothing installed in it.

    python benchmarks/gate_time.py [--output FILE]

Clones the commit that is checked out, runs its `.ci/run`, and writes the seconds of the whole and of each
stage, the tests' counts and skips, and the tests that took longest. The machine should be idle, and have the
packages in its caches. The exit code is that of `.ci/run`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "benchmarks" / "results" / "test-time" / "latest.json"
STAGES = {
    "environment": "",
    "checks": "/mypy ",
    "tests": "test session starts",
}
"""By what the first line of each has in it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-gate-", ignore_cleanup_errors=True) as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True, timeout=300)
        report = Path(folder) / "report.json"
        code, whole_s, begins_s = run_gate(clone, report)
        tests = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    stages = {
        name: round(end_s - begins_s[name], 1)
        for name, end_s in zip(begins_s, [*list(begins_s.values())[1:], whole_s], strict=True)
    }
    result = {
        "command": "benchmarks/gate_time.py",
        "exit_code": code,
        "seconds": round(whole_s, 1),
        "stages": stages,
        "tests": tests,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return code


def run_gate(clone: Path, report: Path) -> tuple[int, float, dict[str, float]]:
    """Run `.ci/run`.

    Returns: its exit code, its seconds, and when each stage began.
    """
    begin_s, waiting = time.monotonic(), list(STAGES)
    begins_s = {waiting.pop(0): 0.0}
    gate = subprocess.Popen(
        ["bash", ".ci/run", f"REPORT={report}"],
        cwd=clone, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert gate.stdout is not None
    for line in gate.stdout:
        sys.stderr.write(line)
        if waiting and STAGES[waiting[0]] in line:
            begins_s[waiting.pop(0)] = time.monotonic() - begin_s
    return gate.wait(), time.monotonic() - begin_s, begins_s


if __name__ == "__main__":
    sys.exit(main())
