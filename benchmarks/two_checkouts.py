"""What a change costs: two checkouts beside one another, in one run.

    python benchmarks/two_checkouts.py BEFORE [--rounds 5] [--requests 30] [--output FILE.json]

BEFORE is the folder of another checkout; the other one is this repository. Each round runs `wire.py`
and `cpu_decode.py` of both, and of BEFORE once more. Then both serve the demo model, and prompts of one
length are asked of both, and of BEFORE again. Prints this checkout's median over the other's, and that
of BEFORE's second runs over its first: what the machine alone makes of the same code. Both use this
interpreter's packages.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("full", "rocketkv", "rdkv")
TRANSPORTS = ("tcp", "ipc", "shm")
WORDS = ("the", "old", "sailor", "painted", "quiet", "bridge", "a", "small", "green", "bird", "sang", "over")
PROMPT_WORDS, ANSWER_TOKENS, START_S = 1500, 24, 120.0

Figures = dict[str, list[float]]


class Checkout:
    """A source tree whose modules and entry points processes use in place of the installed ones."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        about = scratch / f"{project['name']}-{project['version']}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = {"console_scripts": project["scripts"], **project.get("entry-points", {})}
        lines = [
            f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in of.items()) for group, of in groups.items()
        ]
        (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
        self._scratch = scratch
        self.environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{scratch}"}

    def commit(self) -> str:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    def measure(self, script: str, *arguments: str) -> dict:  # type: ignore[type-arg]
        """Run one of its benchmarks. Returns: what it writes."""
        output = self._scratch / "result.json"
        command = [sys.executable, f"benchmarks/{script}", *arguments, "--output", str(output)]
        subprocess.run(command, cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL, check=True)
        return json.loads(output.read_text())  # type: ignore[no-any-return]

    @contextmanager
    def serving(self) -> Iterator[str]:
        """`kvferry serve` with the demo model. Yields: its address."""
        ready = self._scratch / "ready.json"
        script = "import sys; from kvferry.services.launcher.cli import main; main()"
        options = ("serve", "--listen", "127.0.0.1:0", "--ready-file", str(ready))
        command = [sys.executable, "-c", script, *options]
        server = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline_s = time.monotonic() + START_S
            while not ready.exists():
                assert server.poll() is None, f"{self.folder} does not serve: exit code {server.returncode}"
                assert time.monotonic() < deadline_s, f"{self.folder} does not serve after {START_S:g} s"
                time.sleep(0.1)
            yield f"http://{json.loads(ready.read_text())['address']}"
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def add_round(checkout: Checkout, figures: Figures) -> None:
    """Run its benchmarks; for each figure, less is better."""
    wire = checkout.measure("wire.py", "--megabytes", "128", "--repeats", "3")["results"]
    for name in TRANSPORTS:
        medians = wire[name]["medians"]
        figures.setdefault(f"{name}: s/GB", []).append(1 / medians["gb_s"])
        figures.setdefault(f"{name}: CPU s/GB", []).append(medians["cpu_s_per_gb"])
    options = ("--models", "demo", "--contexts", "4096", "--clock", "cpu")
    for cell in checkout.measure("cpu_decode.py", *options)["cells"]:
        for method in METHODS:
            name = f"decode step of {cell['batch_size']}, {method}: CPU ms"
            figures.setdefault(name, []).append(cell["step_ms"][method])


def ask(client: httpx.Client, url: str, method: str, prompt: str) -> tuple[float, float]:
    """Seconds to the first token, and to the end."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "kv_compression": {"method": method},
        **{"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True},
    }
    begin_s, first_s = time.perf_counter(), 0.0
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if (
                not first_s
                and line.startswith("data: {")
                and json.loads(line[6:])["choices"][0]["delta"].get("content")
            ):
                first_s = time.perf_counter() - begin_s
    assert first_s, "an answer without a token"
    return first_s, time.perf_counter() - begin_s


def add_answers(checkouts: list[Checkout], figures: list[Figures], num_requests: int) -> None:
    rng = random.Random(1)
    with ExitStack() as stack, httpx.Client(timeout=60) as client:
        urls = [stack.enter_context(checkout.serving()) for checkout in checkouts]
        for number in range(num_requests):
            for method in METHODS:
                for which in (0, 1, 2):
                    # each a prompt of its own: what was asked before is not computed again
                    prompt = " ".join(rng.choice(WORDS) for _ in range(PROMPT_WORDS))
                    first_s, all_s = ask(client, urls[which % 2], method, prompt)
                    if number:  # the first one also warms up
                        figures[which].setdefault(f"first token, {method}: s", []).append(first_s)
                        figures[which].setdefault(f"answer, {method}: s", []).append(all_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=30, help="prompts of each method")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    figures: list[Figures] = [{}, {}, {}]
    with tempfile.TemporaryDirectory() as scratch:
        folders = (given.before.resolve(), ROOT)
        checkouts = [Checkout(folder, Path(scratch) / str(number)) for number, folder in enumerate(folders)]
        for number in range(given.rounds):
            sys.stderr.write(f"round {number + 1} of {given.rounds}\n")
            for which in (0, 1, 2):
                add_round(checkouts[which % 2], figures[which])
        sys.stderr.write("answers\n")
        add_answers(checkouts, figures, given.requests)
        commits = [checkout.commit() for checkout in checkouts]
    command = ["BEFORE" if argument == str(given.before) else argument for argument in sys.argv]
    result = {"command": command, "before": commits[0], "after": commits[1], "ratios": {}}
    for name in figures[0]:
        before, after, again = (statistics.median(measured[name]) for measured in figures)
        result["ratios"][name] = {
            "medians": [round(before, 6), round(after, 6)],
            "ratio": round(after / before, 3),
            "same_code": round(again / before, 3),
        }
        sys.stdout.write(f"{name:<40} {after / before:.3f} (the same code: {again / before:.3f})\n")
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
