"""What the rows of `benchmarks/gpu` must be, on a GPU and in small in Triton's interpreter alike."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
CAPTURED = ("full", "snapkv", "rocketkv", "rdkv", "compactor", "snapkv-kivi", "compactor-kivi")
"""Methods whose steps are CUDA graphs; a benchmark that knows fewer of them is wrong, too."""
_CASES = f"""
import json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, {str(FOLDER)!r})
import torch
from cases import tiny_cases
from decode_cases import EAGER
from same_tokens import METHODS, PREFILLS
rows = sorted({{case.row for case in tiny_cases(torch.device("cpu"), 1)}})
print(json.dumps({{"rows": rows, "methods": METHODS, "prefills": PREFILLS, "eager": EAGER}}))
"""


@cache
def cases() -> dict[str, list[Any]]:
    """Return the benchmark's own lists; in a process of its own, whose modules' names are common ones."""
    done = subprocess.run(
        [sys.executable, "-c", _CASES], capture_output=True, text=True, timeout=300, check=True
    )
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def check_tokens(rows: list[dict[str, Any]]) -> None:
    """Every method is compared from both prompts, in a dtype of kernels, and captured if it can be."""
    known = cases()
    assert [(row["method"], row["prefill"]) for row in rows] == list(
        itertools.product(known["methods"], known["prefills"])
    )
    assert {row["dtype"] for row in rows} == {"float16"}
    eager = {method for method in known["methods"] if method in known["eager"]}
    assert eager.isdisjoint(CAPTURED)
    assert {row["method"]: row["path"] for row in rows} == {
        method: "eager" if method in eager else "graph" for method in known["methods"]
    }
    assert all(row["same_eagerly"] for row in rows if row["path"] == "graph")
    # ties among rows that next to nothing attends to
    assert all(row.get("kept_elsewhere", 0) <= 0.02 * row.get("kept", 0) for row in rows)


def check_kernels(rows: list[dict[str, Any]]) -> None:
    """Every row of the table of targets is checked against its reference, and timed."""
    assert {row["row"] for row in rows} == set(cases()["rows"])
    assert all(0 <= row["error"] <= row["tolerance"] for row in rows)
    # what the kernels were compared on was neither empty nor the answer itself
    assert any(row["error"] > 0 for row in rows)
    assert all(row["time_us"] > 0 for row in rows)
