"""How long a newcomer waits: from cloning this repository to the demo model's first answer.

    python benchmarks/first_answer.py --output benchmarks/results/first-answer/cpu.json

Runs what the README's quickstart says in a folder of its own: git clone, make serve, one question. pip's
cache is not used; what it downloads depends on the network. Needs git, make and Python with venv.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1200.0
QUESTION = (
    "remember that the pin of the red castle is 4 2 7 1 . the old sailor painted the quiet bridge . "
    "what is the pin of the red castle ?"
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask(address: str) -> str:
    body = {
        "model": "demo",
        "temperature": 0,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def _until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/ready", timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(log.read_text()[-4000:]) from None
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    address = f"127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        clone, log = Path(folder) / "kvferry", Path(folder) / "log"
        begin_s = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=TIMEOUT_S)
        cloned_s = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["make", "serve", f"ARGS=--listen {address}"],
                cwd=clone, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "PIP_NO_CACHE_DIR": "1"}, start_new_session=True,
            )  # fmt: skip
        try:
            _until_ready(address, process, log)
            ready_s = time.perf_counter()
            answer = _ask(address)
            answered_s = time.perf_counter()
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    figures = {
        "command": sys.argv,
        "commit": commit,
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "answer": answer,
        "clone_s": round(cloned_s - begin_s, 1),
        "install_and_start_s": round(ready_s - cloned_s, 1),
        "answer_s": round(answered_s - ready_s, 1),
        "total_s": round(answered_s - begin_s, 1),
    }
    sys.stdout.write(f"{json.dumps(figures, indent=1)}\n")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
