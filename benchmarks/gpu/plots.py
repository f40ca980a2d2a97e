"""Plots of a run: kernels against targets, milliseconds a token by context, throughput, prefill overhead.

Needs matplotlib, which is imported when a plot is drawn and never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DPI = 120


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write every plot that a run has rows for; returns the PNG files."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    timed = [row for row in result.get("kernels", []) if "bandwidth_fraction" in row]
    if timed:
        figures["kernels"] = _bars(
            [f"{row['kernel']} {row['shape']} {row['model']}" for row in timed],
            [max(row["bandwidth_fraction"], row["flops_fraction"]) for row in timed],
            "fraction of the copy bandwidth, or of the arithmetic peak; | marks the target",
            marks=[row["target"] for row in timed],
        )
    every = [row for row in result.get("decode", []) if "ms_per_token" in row]
    for model in dict.fromkeys(row["model"] for row in every):
        decoded = [row for row in every if row["model"] == model]
        slug = model.lower().replace(" ", "-")
        for batch in sorted({row["batch"] for row in decoded if not row["largest"]}):
            chosen = [row for row in decoded if row["batch"] == batch and not row["largest"]]
            title = f"{model}: ms a step, batch {batch}"
            figures[f"decode-{slug}-batch-{batch}"] = _lines(chosen, "ms_per_token", title)
        largest = [row for row in decoded if row["largest"]]
        if largest:
            title = f"{model}: tokens a second, largest batch"
            figures[f"decode-{slug}-largest"] = _lines(largest, "tokens_per_s", title)
    prefilled = [row for row in result.get("prefill", []) if "overhead_percent" in row]
    if prefilled:
        names = [f"{row['method']} {row['model']}" for row in prefilled]
        overheads = [row["overhead_percent"] for row in prefilled]
        figures["prefill-overhead"] = _bars(names, overheads, "% of a prompt's pass")
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=_DPI, bbox_inches="tight")
    return written


def _bars(names: Sequence[str], sizes: Sequence[float], label: str, *, marks: Sequence[Any] = ()) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.3 * len(names)))
    axes = figure.subplots()
    places = list(range(len(names)))
    axes.barh(places, list(sizes))
    for place, mark in zip(places, marks, strict=False):
        if mark is not None:
            axes.plot([mark, mark], [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(places, list(names), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return figure


def _lines(rows: Sequence[dict[str, Any]], key: str, title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["context"])
        axes.plot([row["context"] for row in own], [row[key] for row in own], marker="o", label=method)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of context")
    axes.set_title(title)
    axes.legend(fontsize=7)
    return figure
