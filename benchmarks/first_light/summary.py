"""First light's summary: a heading, tables and failures of each stage, in few and short lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stages import GPU

sys.path.append(str(GPU))

from report import table_lines

SINGLE = ("copy_bytes_per_s", "bf16_flops_per_s", "smallest_launch_us", "ready_s")
COLUMNS = {
    "machine": ("name", "value"),
    "op_checks": ("shape", "cases", "wrong", "skipped", "launch_s", "slowest_check_s"),
    "kernels": (
        "kernel", "shape", "error", "tolerance", "time_us", "modelled_us", "bandwidth_fraction", "target",
        "target_us", "skipped",
    ),
    "tokens": ("method", "prefill", "path", "same", "gap", "same_eagerly", "skipped"),
    "findings": ("check", "verdict", "found", "advice"),
    "startup": ("service", "phase", "seconds"),
    "calls": (
        "method", "content", "seconds", "reused_tokens", "prefill_ms", "transfer_ms", "shipped_bytes",
        "full_bytes",
    ),
    "prompts": ("method", "tokens", "ttft_ms", "prefill_ms", "transfer_ms", "shipped_bytes", "full_bytes"),
    "bench": (
        "complete", "requests_per_s", "output_tokens_per_s", "first_token_ms_p50", "first_token_ms_p90",
        "per_token_ms_p50", "per_token_ms_p90",
    ),
    "steps_by_path": ("path", "reason", "steps"),
    "decode": (
        "context", "batch", "method", "path", "ms_per_token", "modelled_ms", "speedup", "peak_bytes",
        "skipped",
    ),
    "prefill": ("method", "prefill_s", "overhead_percent", "copied_bytes", "copies_hidden", "skipped"),
    "peers": ("way", "ms_per_token", "first_tokens_s", "skipped"),
}  # fmt: skip
WIDTH = 90
"""Of a cell."""
MAX_FAILURES = 12
"""Of a stage."""


def summary(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the summary of stages' results: first of all the first failure, with its traceback."""
    traced = [f"{name}: {one['first_failure']}" for name, one in stages.items() if "first_failure" in one]
    lines = [line for name, one in stages.items() for line in _of_stage(name, one)]
    failed = [name for name, one in stages.items() if one["failures"]]
    end = f"FAILED: {', '.join(failed)}" if failed else "nothing failed"
    return "\n".join([*traced[:1], *lines, "", end]) + "\n"


def _of_stage(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"==== {name} {result.get('end', 'did not end')}"
    for single in SINGLE:
        if single in result:
            yield f"{single} {result[single]:.4g}"
    for table, columns in COLUMNS.items():
        if table in result:
            rows = _by_shape(result[table]) if table == "op_checks" else result[table]
            used = [key for key in columns if any(row.get(key) not in (None, "") for row in rows)]
            yield from table_lines([{key: _cut(row.get(key)) for key in used} for row in rows], used)
    for failure in result["failures"][:MAX_FAILURES]:
        yield f"FAILED {failure[:200]}"
    if (more := len(result["failures"]) - MAX_FAILURES) > 0:
        yield f"FAILED {more} more, see results.json"


def _cut(value: Any) -> Any:
    return value[:WIDTH] if isinstance(value, str) else value


def _by_shape(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for all cases of a shape."""
    found = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        ran = [row for row in rows if row["shape"] == shape and "skipped" not in row]
        found.append(
            {
                "shape": shape, "cases": len(ran), "wrong": sum(bool(row["problem"]) for row in ran),
                "skipped": sum(row["shape"] == shape for row in rows) - len(ran),
                "launch_s": sum(row["launch_s"] for row in ran),
                "slowest_check_s": max((row["check_s"] for row in ran), default=0.0),
            }
        )  # fmt: skip
    return found
