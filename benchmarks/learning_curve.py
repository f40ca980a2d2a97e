"""Draws the learning curve of `kvferry train-demo`: accuracy of answers' tokens by length of the rows.

    python benchmarks/learning_curve.py CURVE.jsonl [...] --output FILE.png

Curves of several runs, each from the one before it, are drawn one behind another. Running averages over
training's own rows, as the trainer wrote them; a length's line has points where rows of it were drawn. Needs
matplotlib; measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Line = list[tuple[float, float]]


def read_lines(paths: Sequence[Path]) -> tuple[dict[int, Line], list[float]]:
    """Points (million tokens, % right) by length, and where each file but the last ends."""
    lines: dict[int, Line] = defaultdict(list)
    ends, before = [], 0
    for path in paths:
        points = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        former: dict[str, object] = {}
        for point in points:
            for length, values in point["by_length"].items():
                if values != former.get(length):
                    at = (before + point["total_tokens"]) / 1e6
                    lines[int(length)].append((at, 100 * values["answer_accuracy"]))
            former = point["by_length"]
        before += points[-1]["total_tokens"]
        for line in lines.values():
            line.append((before / 1e6, math.nan))  # a run's points are not joined to the next one's
        ends.append(before / 1e6)
    return dict(sorted(lines.items())), ends[:-1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("curves", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    lines, ends = read_lines(args.curves)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for length, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker=".", markersize=4, label=f"{length}")
    for end in ends:
        axes.axvline(end, color="grey", linestyle=":")
    axes.set(xlabel="million tokens", ylabel="answer tokens right, %")
    axes.legend(title="tokens a row", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.grid(alpha=0.3)
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
