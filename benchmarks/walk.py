"""Counts the walk of one chat request: the files it enters and its calls of the repository's functions.

    python benchmarks/walk.py [--methods rocketkv,rdkv] [--requests 5] [--output FILE]

Serves the demo model with `kvferry serve --in-process` and asks it over HTTP: a session's first turn of 123
prompt tokens, a budget of 64, 5 generated tokens. After a warm-up request, a profiler in every thread counts
from the HTTP request until the generated KV is back in the history tier; the thread that watches the metrics
port is not counted. A call is what `sys.setprofile`
reports as one: a function entered, or a generator or coroutine resumed. Background polling adds calls, more
of them on a busy machine, so each function counts as often as in the request that called it least. Python
3.12 and later count less than 3.11, because they inline comprehensions.

To count another commit, put its package first: `PYTHONPATH=OTHER/src python benchmarks/walk.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import operator
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import kvferry


@dataclass(frozen=True)
class Bound:
    """The longest walk that a method may take."""

    files: int
    calls: int


BOUNDS = {"rocketkv": Bound(files=78, calls=3450), "rdkv": Bound(files=90, calls=4580)}
"""Calls are 3 % more than an idle machine counts: on a busy one even the least of some requests polls more.
At b4f2d34: 117 files and 5,900 calls; rdkv 121 and 12,000. Two of the files are the decode step's in C,
one is of rows that return to the history, one is of the device, which prefill has, too, and for rocketkv one
is the count of pages."""

NUM_PROMPT_TOKENS, NUM_GENERATED_TOKENS = 123, 5
TOKEN_BUDGET = 64
TIMEOUT_S = 120.0
SETTLE_S = 0.4
_WATCHER = "/shared/telemetry/metrics_server.py"
"""After the answer, for the KV of generated tokens to reach the history tier."""
_QUESTION = "what is the pin of the red castle ?"
_FILLER = "the old sailor painted the quiet bridge ."
_TEMPLATE_TOKENS = 4


class CallCounter:
    """Counts calls of one package's functions in every thread that starts after `install`.

    Args: root: the package's folder; files are named by their path in it.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root) + os.sep
        # The package may consist of links, so both the links' and the folders' own paths count.
        self._tops = {entry.name: os.path.realpath(entry) + os.sep for entry in os.scandir(root)}
        self._names: dict[str, str] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._counting = False

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def start(self) -> None:
        self._calls = Counter()
        self._counting = True

    def stop(self) -> Counter[tuple[str, str]]:
        """Calls since `start`, by file and function."""
        self._counting = False
        return self._calls

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if not self._counting or event != "call":
            return
        code = frame.f_code
        name = self._names.get(code.co_filename)
        if name is None:
            name = self._names[code.co_filename] = self._name(code.co_filename)
        if name:
            self._calls[name, code.co_qualname] += 1

    def _name(self, path: str) -> str:
        """The path in the package; empty for code that is not the package's."""
        real = os.path.realpath(path)
        if real.endswith(_WATCHER):
            return ""
        for top, folder in self._tops.items():
            if real.startswith(folder):
                return f"{top}/{real[len(folder) :]}"
        return real[len(self._root) :] if real.startswith(self._root) else ""


def _message(number: int) -> str:
    """A prompt of the wanted length. Each number gives another fact, so that no KV is reused."""
    fact = f"remember that the pin of the red castle is {' '.join(str(1000 + 37 * number))} ."
    missing = NUM_PROMPT_TOKENS - _TEMPLATE_TOKENS - len(fact.split()) - len(_QUESTION.split())
    filler = (_FILLER.split() * missing)[:missing]
    return " ".join([fact, *filler, _QUESTION])


def _ask(client: httpx.Client, method: str, number: int) -> None:
    body = {
        "model": "demo",
        "session_id": f"walk-{method}-{number}",
        "messages": [{"role": "user", "content": _message(number)}],
        "temperature": 0,
        "max_tokens": NUM_GENERATED_TOKENS,
        "kv_compression": {"method": method, "token_budget": TOKEN_BUDGET},
    }
    reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    usage = reply["usage"]
    found = usage["prompt_tokens"], usage["completion_tokens"]
    if found != (NUM_PROMPT_TOKENS, NUM_GENERATED_TOKENS):
        raise SystemExit(f"the prompt and answer had {found[0]} and {found[1]} tokens")


def _measure(
    client: httpx.Client, counter: CallCounter, methods: list[str], num_requests: int
) -> Iterator[tuple[str, Counter[tuple[str, str]]]]:
    """Each method's calls, of each function as many as in the request with the fewest."""
    number = 0
    for method in methods:
        walks = []
        for i in range(num_requests + 1):
            number += 1
            counter.start()
            _ask(client, method, number)
            time.sleep(SETTLE_S)
            walk = counter.stop()
            if i > 0:  # the first one warms up
                walks.append(walk)
        yield method, reduce(operator.and_, walks)


def _figures(calls: Counter[tuple[str, str]]) -> dict[str, Any]:
    by_folder: dict[str, dict[str, int]] = {}
    by_file: Counter[str] = Counter()
    for (file, _), number in calls.items():
        by_file[file] += number
    for file, number in by_file.items():
        parts = file.split("/")[:-1]
        folder = by_folder.setdefault("/".join(parts[:2]), {"files": 0, "calls": 0})
        folder["files"] += 1
        folder["calls"] += number
    return {
        "files": len(by_file),
        "functions": len(calls),
        "calls": calls.total(),
        "by_folder": dict(sorted(by_folder.items())),
        "by_file": dict(by_file.most_common()),
        "by_function": {f"{file}: {name}": number for (file, name), number in calls.most_common()},
    }


def _client(ready: Path, counter: CallCounter, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Asks and counts, in a thread of its own; then ends the server as Ctrl-C would."""
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the services were not ready after {TIMEOUT_S:g} s")
            time.sleep(0.05)
        url = f"http://{json.loads(ready.read_text())['address']}"
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
            for method, calls in _measure(client, counter, options.methods.split(","), options.requests):
                found[method] = _figures(calls)
    except (SystemExit, httpx.HTTPError) as error:
        sys.stderr.write(f"{error}\n")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _show(method: str, figures: dict[str, Any]) -> None:
    sys.stdout.write(f"{method}: {figures['files']} files, {figures['calls']} calls\n")
    for folder, part in figures["by_folder"].items():
        sys.stdout.write(f"  {folder:<24} {part['files']:>4} files {part['calls']:>6} calls\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--methods", default="rocketkv,rdkv", help="comma-separated (default: rocketkv,rdkv)")
    parser.add_argument("--requests", type=int, default=5, help="counted per method (default: 5)")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    counter = CallCounter(Path(next(iter(kvferry.__path__))))
    counter.install()  # before the services start their threads
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvferry-walk-") as folder:
        ready = Path(folder) / "ready.json"
        asking = threading.Thread(target=_client, args=(ready, counter, options, found), daemon=True)
        asking.start()
        from kvferry.services.launcher.cli import main as kvferry_command
        from kvferry.services.prefill import schedule

        # On a slow machine a short prompt's pass may be interrupted, too, which is a call for each operation.
        schedule.LONG_S = math.inf
        serve = ["serve", "--in-process", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        try:
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
                kvferry_command([*serve, "--threads", "1", "--arena-bytes", str(64 << 20)])
        except SystemExit as ended:
            if ended.code:
                raise
    missing = set(options.methods.split(",")) - set(found)
    if missing:
        raise SystemExit(f"nothing was counted of {sorted(missing)}")
    for method, figures in found.items():
        _show(method, figures)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "command": sys.argv,
            "python": platform.python_version(),
            "prompt_tokens": NUM_PROMPT_TOKENS,
            "generated_tokens": NUM_GENERATED_TOKENS,
            "token_budget": TOKEN_BUDGET,
            "methods": found,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
