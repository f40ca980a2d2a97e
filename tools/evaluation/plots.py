"""Plots of an evaluation: accuracy against bytes, and needle heat maps. Needs matplotlib.

matplotlib is an extra (`kvferry[eval]`); it is imported only when a plot is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.evaluation.budgets import Match
from kvferry.tools.evaluation.experiment import describe_length, describe_task
from kvferry.tools.evaluation.summary import Cell, Scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120
STYLES = {
    "full": ("black", "*"),
    "snapkv": ("tab:blue", "o"),
    "snapkv-think": ("tab:blue", "s"),
    "snapkv-kivi": ("tab:blue", "^"),
    "rocketkv": ("tab:orange", "o"),
    "rocketkv-d2o": ("tab:orange", "s"),
    "rocketkv-kivi": ("tab:orange", "^"),
    "compactor": ("tab:green", "o"),
    "compactor-hsa": ("tab:green", "s"),
    "compactor-kivi": ("tab:green", "^"),
    "compactor-rdkv": ("tab:green", "D"),
    "kvzip": ("tab:purple", "^"),
    "kvzip-rdkv": ("tab:purple", "D"),
    "keydiff": ("tab:brown", "^"),
    "keydiff-rdkv": ("tab:brown", "D"),
    "rdkv": ("tab:red", "o"),
    "rdkv-hsa": ("tab:red", "s"),
    "rdkv-union": ("tab:red", "D"),
    "rdkv-draft": ("tab:red", "^"),
    "pyramidkv": ("tab:purple", "o"),
    "adakv": ("tab:purple", "s"),
    "h2o": ("tab:brown", "o"),
    "d2o": ("tab:brown", "s"),
    "streamingllm": ("tab:pink", "o"),
    "exact-topk": ("tab:olive", "o"),
    "quest": ("tab:olive", "s"),
    "sparq": ("tab:olive", "^"),
    "think": ("tab:cyan", "o"),
    "kivi": ("tab:cyan", "s"),
    "random": ("tab:gray", "x"),
}
"""Colour and marker of each method, the same in every plot."""
_COLOURS = ("navy", "darkgoldenrod", "darkgreen", "maroon", "indigo", "teal", "deeppink", "slategray")
_MARKERS = ("D", "v", "P", "X", "<", ">", "h")
"""Of methods with changed parameters and of those of other packages."""


def style(method: str) -> tuple[str, str]:
    """Return a method's colour and marker; for a name outside the table they follow from the name alone."""
    if method in STYLES:
        return STYLES[method]
    number = int.from_bytes(hashlib.blake2b(method.encode(), digest_size=4).digest(), "big")
    return _COLOURS[number % len(_COLOURS)], _MARKERS[number // len(_COLOURS) % len(_MARKERS)]


def check_available() -> None:
    """Check for matplotlib, before anything is measured. Raises: ConfigurationError: it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "--plots needs matplotlib, which is not installed; pip install 'kvferry[eval]'"
        ) from error


def draw(cells: Sequence[Cell], folder: Path, *, match: Match) -> list[Path]:
    """Draw every plot for which there are cells.

    Args: match: "read" draws accuracy over bytes read per step, the others over bytes retained.
    Returns: the PNG files, `accuracy-SETTING-LENGTH.png` and `needle-TASK-SETTING.png`.
    """
    written = []
    scattered = [c for c in cells if c.depth is None]
    for setting, num_tokens in dict.fromkeys((c.setting, c.num_tokens) for c in scattered):
        chosen = [c for c in scattered if (c.setting, c.num_tokens) == (setting, num_tokens)]
        path = folder / f"accuracy-{setting}-{num_tokens}.png"
        accuracy_figure(chosen, f"{describe_length(num_tokens)}, {setting}", match).savefig(path, dpi=_DPI)
        written.append(path)
    grids = [c for c in cells if c.depth is not None]
    for task, setting in dict.fromkeys((c.task, c.setting) for c in grids):
        chosen = [c for c in grids if (c.task, c.setting) == (task, setting)]
        path = folder / f"needle-{task}-{setting}.png"
        _needle_figure(chosen, f"{describe_task(task)}, {setting}").savefig(path, dpi=_DPI)
        written.append(path)
    return written


def accuracy_figure(cells: Sequence[Cell], title: str, match: Match) -> Figure:
    """Draw a panel for each task; a line for each method, a point for each budget; the legend outside."""
    from matplotlib.figure import Figure

    def share(scores: Scores) -> float:
        return scores.read_share if match == "read" else scores.kept_share

    label = f"bytes {'read per step' if match == 'read' else 'retained'}, % of the full KV"
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    figure = Figure(figsize=(4.2 * len(tasks) + 1.6, 3.8), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    lines: dict[str, Any] = {}
    for panel, task in zip(panels, tasks, strict=True):
        for method in dict.fromkeys(cell.method for cell in cells):
            scores = [
                c.scores for c in cells if (c.task, c.method) == (task, method) and c.scores is not None
            ]
            points = sorted((100 * share(s), 100 * s.accuracy, 100 * s.half_width) for s in scores)
            if points:
                shares, accuracy, half_widths = zip(*points, strict=True)
                colour, marker = style(method)
                below = [min(half, value) for value, half in zip(accuracy, half_widths, strict=True)]
                above = [min(half, 100 - value) for value, half in zip(accuracy, half_widths, strict=True)]
                lines[method] = panel.errorbar(
                    shares, accuracy, yerr=(below, above), color=colour, marker=marker, capsize=2
                )
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_title(describe_task(task))
        panel.set_xlabel(label)
        panel.set_ylim(-3, 106)
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("exact match, %")
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="small")
    return figure


def _needle_figure(cells: Sequence[Cell], title: str) -> Figure:
    """Draw a panel for each method and budget; depth down, length across, accuracy as colour."""
    from matplotlib.figure import Figure

    contenders = list(dict.fromkeys((cell.method, cell.budget) for cell in cells))
    lengths = sorted({cell.num_tokens for cell in cells})
    depths = sorted({cell.depth for cell in cells if cell.depth is not None})
    num_columns = min(4, len(contenders))
    num_rows = -(-len(contenders) // num_columns)
    figure = Figure(figsize=(3.4 * num_columns + 1, 2.8 * num_rows), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    image: Any = None
    for panel, contender in zip(panels, contenders, strict=False):
        found = {
            (c.depth, c.num_tokens): c.scores for c in cells if (c.method, c.budget) == contender and c.scores
        }
        values = [
            [100 * found[d, t].accuracy if (d, t) in found else float("nan") for t in lengths] for d in depths
        ]
        image = panel.imshow(values, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        panel.set_title(f"{contender[0]} at {contender[1]}", fontsize="small")
        panel.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        panel.set_xlabel("tokens")
        panel.set_ylabel("depth")
    for panel in panels[len(contenders) :]:
        panel.set_visible(False)
    figure.colorbar(image, ax=panels.tolist(), label="exact match, %")
    return figure
