"""Plots of a bench: how latencies are distributed, and how they changed in the course of a run.

matplotlib is an extra (`kvferry[eval]`); it is imported only when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.bench.sample import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120


def draw(samples: Mapping[str, Sequence[Sample]], config: BenchConfig, folder: Path) -> list[Path]:
    """Draw `latency.png` and `timeline.png`. Args: samples: of each server, of its runs together."""
    written = []
    for name, figure in (("latency", _latency(samples, config)), ("timeline", _timeline(samples))):
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=_DPI)
    return written


def _latency(samples: Mapping[str, Sequence[Sample]], config: BenchConfig) -> Figure:
    """Plot the share of requests within a latency: to the first token, per token, in total."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    parts = (
        ("first_token_s", "to the first token, s", config.first_token_bound_s),
        ("per_token_s", "per further token, s", config.per_token_bound_s),
        ("total_s", "in total, s", config.total_bound_s),
    )
    for panel, (name, title, bound_s) in zip(panels, parts, strict=True):
        for server, server_samples in samples.items():
            found = [getattr(sample, name) for sample in server_samples]
            values = sorted(value for value in found if value is not None)
            if values:
                panel.plot(values, [(i + 1) / len(values) for i in range(len(values))], label=server)
        if bound_s:
            panel.axvline(bound_s, color="black", linewidth=0.8, linestyle="--")
        panel.set_xlim(left=0)
        panel.set_xlabel(title)
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("share of requests within")
    panels[-1].legend(loc="lower right", fontsize="small")
    return figure


def _timeline(samples: Mapping[str, Sequence[Sample]]) -> Figure:
    """Plot the time to the first token by when a request was due, a panel a server; failures as crosses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.8 * len(samples)), layout="constrained")
    panels = figure.subplots(len(samples), 1, squeeze=False, sharex=True)[:, 0]
    for panel, (server, server_samples) in zip(panels, samples.items(), strict=True):
        for kind in sorted({sample.kind for sample in server_samples}):
            points = [
                (sample.due_s, sample.first_token_s)
                for sample in server_samples
                if sample.kind == kind and sample.first_token_s is not None
            ]
            if points:
                panel.scatter(*zip(*points, strict=True), s=12, label=kind)
        failed = [sample.due_s for sample in server_samples if sample.outcome == "failed"]
        panel.scatter(failed, [0.0] * len(failed), marker="x", color="red")
        panel.set_title(server, fontsize="small")
        panel.set_ylabel("to the first token, s")
        panel.grid(visible=True, alpha=0.3)
        panel.legend(title="PROMPT:ANSWER", fontsize="x-small", title_fontsize="x-small")
    panels[-1].set_xlabel("s from the run's beginning")
    return figure
