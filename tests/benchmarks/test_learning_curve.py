"""The demo model's learning curve is drawn from the files that training wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "demo-model"
FILES = ("second/curve.jsonl", "third/curve.jsonl", "curve.jsonl")


def test_the_committed_curves_are_drawn_run_behind_run(tmp_path: Path) -> None:
    plot = tmp_path / "curve.png"
    script = f"""
import json, math, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from pathlib import Path
import learning_curve
files = [Path({str(FOLDER)!r}) / name for name in {FILES!r}]
lines, ends = learning_curve.read_lines(files)
sys.argv = ["learning_curve.py", *map(str, files), "--output", {str(plot)!r}]
learning_curve.main()
print(json.dumps({{"ends": ends, "last": [p for p in lines[512] if not math.isnan(p[1])][-1]}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    totals, accuracy = [], 0.0
    for name in FILES:
        last = json.loads((FOLDER / name).read_text(encoding="utf-8").splitlines()[-1])
        totals.append(last["total_tokens"])
        accuracy = last["by_length"]["512"]["answer_accuracy"]
    shown = json.loads(done.stdout)
    assert shown["ends"] == [totals[0] / 1e6, sum(totals[:2]) / 1e6]
    assert shown["last"] == [sum(totals) / 1e6, 100 * accuracy]
    assert plot.read_bytes().startswith(b"\x89PNG")
