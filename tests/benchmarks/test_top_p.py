"""The benchmark of drawing runs, and no draw puts a large vocabulary in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_no_draw_puts_the_vocabulary_in_order(tmp_path: Path) -> None:
    output = tmp_path / "top_p.json"
    done = subprocess.run(
        [
            sys.executable, "benchmarks/top_p.py", "--vocabularies", "20000", "--repeats", "1",
            "--output", str(output),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())
    assert len(rows) == 16
    assert all(row["ordered"] <= 1024 and row["draw_ms"] > 0 for row in rows.values())
    assert rows["20000 flat batch 8 top_p 0.95"]["ordered"] == 1024
    # as many as putting all in order would take, if the largest 1,024 are enough
    assert rows["20000 peaked batch 8 top_p 0.95"]["operators"] < 100
