"""Runs one benchmark in two checkouts by turns, and prints how their numbers compare.

    python benchmarks/compare.py --before DIR --after DIR [--repeats 3] [--output FILE] wire.py [OPTIONS ...]

Each checkout runs its own script with its own package, in this environment, so that both may use the
internals of their commit; a script that a checkout lacks is taken from this one. The checkouts alternate, so
that other work on the machine slows both. Of each number in the scripts' results the median of the repeats is
taken (of a list of numbers its median first), and printed with after / before. Judges nothing: some numbers
are better when they are larger, others when they are smaller.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent
TIMEOUT_S = 3600.0
PACKAGE_FOLDERS = ("kernels", "models", "proto", "services", "shared", "tools")


@contextlib.contextmanager
def package_path(checkout: Path) -> Iterator[Path]:
    """The folder that has a checkout's `kvferry`; made of links where the commit has no `src`."""
    if (checkout / "src" / "kvferry").is_dir():
        yield checkout / "src"
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-compare-") as folder:
        package = Path(folder) / "kvferry"
        package.mkdir()
        (package / "__init__.py").touch()
        for name in PACKAGE_FOLDERS:
            if (checkout / name).is_dir():
                (package / name).symlink_to(checkout / name)
        yield Path(folder)


def run(checkout: Path, path: Path, script: str, options: list[str]) -> dict[str, float]:
    """One run of a script. Returns: its numbers by name."""
    own = checkout / "benchmarks" / script
    with tempfile.TemporaryDirectory(prefix="kvferry-compare-") as folder:
        output = Path(folder) / "result.json"
        subprocess.run(
            [
                sys.executable,
                str(own if own.exists() else BENCHMARKS / script),
                *options,
                "--output",
                str(output),
            ],
            # PYTHONSAFEPATH: a checkout's top-level folders are not packages of their own.
            env={**os.environ, "PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"},
            cwd=checkout,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=TIMEOUT_S,
        )
        return dict(numbers(json.loads(output.read_text(encoding="utf-8"))))


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a result by their path in it; a list of numbers counts as its median."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{name}/{key}" if name else key)
    elif isinstance(value, list):
        if value and all(_is_number(item) for item in value):
            yield name, statistics.median(value)
            return
        for i, inner in enumerate(value):
            yield from numbers(inner, f"{name}/{i}")
    elif _is_number(value):
        yield name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the earlier commit")
    parser.add_argument("--after", type=Path, required=True, help="checkout of the later commit")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each checkout (default: 3)")
    parser.add_argument("--output", type=Path, help="also write the comparison to this JSON file")
    parser.add_argument("script", help="a file of benchmarks/, as wire.py")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="the script's own options")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in checkouts}
    with contextlib.ExitStack() as stack:
        paths = {side: stack.enter_context(package_path(folder)) for side, folder in checkouts.items()}
        for _ in range(options.repeats):
            for side, folder in checkouts.items():
                found[side].append(run(folder, paths[side], options.script, options.options))
    compared = {}
    for name in found["before"][0]:
        values = {side: [result[name] for result in found[side] if name in result] for side in checkouts}
        if not values["after"]:
            continue
        before, after = (statistics.median(values[side]) for side in ("before", "after"))
        ratio = after / before if before else None
        compared[name] = {"before": before, "after": after, "after_over_before": ratio, "runs": values}
        shown = f"{ratio:.3f}" if ratio is not None else "-"
        sys.stdout.write(f"{name}: {before:g} -> {after:g} ({shown})\n")
    if options.output:
        commits = {side: _commit(folder) for side, folder in checkouts.items()}
        command = ["benchmarks/compare.py", options.script, *options.options]
        result = {"command": command, "commits": commits, "repeats": options.repeats, "numbers": compared}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _commit(folder: Path) -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
