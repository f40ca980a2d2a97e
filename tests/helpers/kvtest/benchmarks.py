"""Runs a benchmark as a person does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 800.0


def run_benchmark(script: str, *options: str | Path) -> str:
    """Run `benchmarks/SCRIPT` from the repository's root; returns what it printed. It must succeed."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *map(str, options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
