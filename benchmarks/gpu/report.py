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
    "op_checks": ("shape", "op", "case", "problem", "launch_s", "check_s", "skipped"),
    "tokens": (
        "method", "prefill", "path", "same", "same_eagerly", "kept_elsewhere", "kept", "parted_at", "gap",
        "skipped",
    ),
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
    "peers": ("model", "way", "tokens", "ms_per_token", "first_tokens_s", "skipped"),
}  # fmt: skip
"""Of each table."""


def write_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Aligned columns on standard output."""
    sys.stdout.writelines(f"{line}\n" for line in table_lines(rows, columns))


def table_lines(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Aligned columns."""
    cells = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        yield "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()


def as_json(result: dict[str, Any]) -> str:
    """A row of a table is a line."""
    return _as_json(result, "") + "\n"


def _as_json(value: Any, indent: str) -> str:
    inner = f"{indent} "
    if isinstance(value, dict) and any(isinstance(entry, list | dict) for entry in value.values()):
        parts = [f"{inner}{json.dumps(name)}: {_as_json(entry, inner)}" for name, entry in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"{inner}{json.dumps(row)}" for row in value) + f"\n{indent}]"
    return json.dumps(value)


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
