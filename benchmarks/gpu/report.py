"""Tables of the benchmark's rows, for a terminal and for a README."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

COLUMNS = {
    "kernels": (
        "row", "kernel", "model", "shape", "error", "num_bytes", "time_us", "modelled_us",
        "bandwidth_fraction", "flops_fraction", "target", "target_us", "skipped",
    ),
    "tokens": ("method", "prefill", "path", "same", "kept_elsewhere", "kept", "parted_at", "gap", "skipped"),
    "decode": (
        "model", "context", "batch", "method", "path", "ms_per_token", "modelled_ms", "tokens_per_s",
        "speedup", "cache_bytes", "peak_bytes", "skipped",
    ),
    "steps": (
        "gpu", "batch", "context", "method", "moved_bytes", "launches", "modelled_ms", "modelled_speedup",
    ),
    "kernel_times": (
        "batch", "context", "method", "kernel", "launches", "moved_bytes", "H100-SXM_us", "H200_us",
        "A100-80GB_us", "L4_us", "RTX-4090_us",
    ),
    "prefill": (
        "model", "method", "tokens", "prefill_s", "with_method_s", "overhead_percent", "copied_bytes",
        "copies_alone_s", "copies_hidden", "skipped",
    ),
}  # fmt: skip
"""Of each table."""


def write_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Aligned columns on standard output."""
    cells = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        sys.stdout.write("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() + "\n")


def as_json(result: dict[str, Any]) -> str:
    """A row of a table is a line."""
    parts = []
    for name, value in result.items():
        if isinstance(value, list) and value:
            value = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        else:
            value = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {value}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def markdown(result: dict[str, Any]) -> str:
    """Every table of a run."""
    parts = [
        "\n".join(_markdown_lines(name, result[name], columns))
        for name, columns in COLUMNS.items()
        if result.get(name)
    ]
    return "\n\n".join(parts) + "\n"


def _markdown_lines(name: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    used = [column for column in columns if any(row.get(column) is not None for row in rows)]
    yield f"**{name}**"
    yield ""
    yield "| " + " | ".join(column.replace("_", " ") for column in used) + " |"
    yield "|" + "---|" * len(used)
    for row in rows:
        yield "| " + " | ".join(_cell(row.get(column)) for column in used) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
