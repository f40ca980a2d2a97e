"""The table and the plots of `links.py`: times by prompt length for each link. Plots need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHOWN = ("full", "fp8-like", "kivi", "snapkv", "exact-topk", "rocketkv", "compactor-kivi", "rdkv")
_DPI = 110


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write `last-token.png` and `second-token.png`."""
    from matplotlib.figure import Figure

    links = sorted({cell["gbits"] for cell in result["cells"]})
    for name, title in (("last_token_s", "last token"), ("second_token_s", "second token")):
        figure = Figure(figsize=(3.6 * len(links), 4.0), layout="constrained")
        for axes, gbits in zip(figure.subplots(1, len(links), squeeze=False)[0], links, strict=True):
            cells = [cell for cell in result["cells"] if cell["gbits"] == gbits]
            for method in SHOWN:
                axes.plot(
                    [cell["tokens"] / 1024 for cell in cells],
                    [cell["methods"][method][name] for cell in cells],
                    marker="o",
                    markersize=3,
                    label=method,
                )
            how = "/".join(dict.fromkeys(cell["how"] for cell in cells))
            axes.set(
                title=f"{gbits:g} Gbit/s ({how})", xlabel="prompt, Ki tokens", xscale="log", yscale="log"
            )
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel(f"time to the {title}, s")
        figure.axes[0].legend(fontsize=7)
        figure.savefig(folder / f"{title.replace(' ', '-')}.png", dpi=_DPI)


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """A row for each cell, in Markdown."""
    lines = [
        "| Gbit/s | tokens | transfers | first token | full, last token | fp8-like | best | last token | "
        "planned | slower than full |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        methods = cell["methods"]
        full_s = methods["full"]["last_token_s"]
        slower = [name for name, figures in methods.items() if figures["last_token_s"] > 1.02 * full_s]
        lines.append(
            f"| {cell['gbits']:g} | {cell['tokens']:,} | {cell['how']} | "
            f"{methods['full']['first_token_s']:.2f} s | {full_s:.2f} s | "
            f"{methods['fp8-like']['last_token_s']:.2f} s | {_code(cell['best'])} | "
            f"{methods[cell['best']]['last_token_s']:.2f} s | {_code(cell['planned'])} | "
            f"{', '.join(map(_code, slower)) or 'none'} |"
        )
    return "\n".join(lines) + "\n"


def _code(name: str) -> str:
    return f"`{name}`"
