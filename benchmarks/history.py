"""Time to first token of a conversation's second turn: history from host memory, from Redis, or recomputed.

    python benchmarks/history.py [--tokens 4096] [--repeats 5] [--redis URL] [--output FILE]

Serves the demo model with `kvferry serve`, over a Redis of its own unless one is given, and asks as a client
does, streaming. Host memory holds one session only: after a turn of another session the first one's history
is in Redis alone. Recomputing is the same prompt in a new session. Each repeat measures all three; printed
are medians, and the ratios of recomputing to each; a busy machine slows all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from kvferry.tools.bench.serving import served
from kvferry.tools.recall.tasks import TASKS

TIMEOUT_S = 300.0
METHOD = {"method": "rocketkv", "token_budget": 256}
SOURCES = ("memory", "redis", "recomputed")
# Of the demo model: layers, K and V, KV heads, channels, bytes of an element in float32.
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4


@contextlib.contextmanager
def _redis(url: str) -> Iterator[str]:
    """The given one, or a `redis-server` of our own without persistence."""
    binary = shutil.which("redis-server")
    if url or binary is None:
        if not url:
            raise SystemExit("redis-server is not on PATH; give --redis URL")
        yield url
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def _options(redis_url: str, history_bytes: int) -> tuple[str, ...]:
    """Of `kvferry serve`. A long timeout, so that Redis is measured on a busy machine as well."""
    return (
        *("--history-redis", redis_url, "--history-redis-timeout-s", "30"),
        *("--history-bytes", str(history_bytes)),
    )


def _turn(
    client: httpx.Client, messages: list[dict[str, str]], session_id: str, *, number: int = 1
) -> tuple[float, dict[str, Any]]:
    """Seconds from sending the session's turn of this number to its first token, and its `kv`.

    Each session has a key of its own, so that none begins with another's KV.
    """
    body = {
        "model": "demo", "messages": messages, "session_id": session_id, "max_tokens": 4, "temperature": 0,
        "stream": True, "kv_compression": METHOD,
    }  # fmt: skip
    begin_s = time.perf_counter()
    first_s, kv = 0.0, {}
    headers = {"Authorization": f"Bearer {session_id}"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if not first_s and any(choice["delta"].get("content") for choice in event["choices"]):
                first_s = time.perf_counter() - begin_s
            kv = event.get("kv", kv)
    _wait_recorded(client, session_id, number, headers)
    return first_s, kv


def _wait_recorded(client: httpx.Client, session_id: str, number: int, headers: dict[str, str]) -> None:
    """Wait until the session has a turn that has ended, so that the next turn finds the memory free."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not _is_kept(client.get(f"/v1/sessions/{session_id}", headers=headers).json(), number):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"session {session_id} has fewer than {number} turns after {TIMEOUT_S:.0f} s")
        time.sleep(0.01)


def _is_kept(session: dict[str, Any], number: int) -> bool:
    # A server from before `running` recorded a turn when its KV was in the history.
    return bool(session.get("turns", 0) >= number and not session.get("running", False))


def _measure(client: httpx.Client, num_tokens: int, repeat: int) -> dict[str, tuple[float, dict[str, Any]]]:
    """One second turn from each source, the same conversation in all of them."""
    example = TASKS["multi_key_8"].example(num_tokens=num_tokens, seed=repeat)
    text = example.messages[-1]["content"]
    first, second = {"role": "user", "content": text}, {"role": "user", "content": "what is the pin ?"}
    filler = {"role": "user", "content": " ".join(text.split()[:-8])}
    measured = {}
    for source in ("memory", "redis"):
        session = f"{source}-{repeat}"
        _turn(client, [first], session)
        if source == "redis":
            _turn(client, [filler], f"filler-{repeat}")  # takes the place of the session in memory
        measured[source] = _turn(client, [second], session, number=2)
    whole = [first, {"role": "assistant", "content": "ok"}, second]
    measured["recomputed"] = _turn(client, whole, f"recomputed-{repeat}")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="history before the second turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--redis", default="", help="URL of a Redis to use; one is started if empty")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    history_bytes = int(1.4 * options.tokens * TOKEN_BYTES)
    seconds: dict[str, list[float]] = {source: [] for source in SOURCES}
    reused: dict[str, list[int]] = {source: [] for source in SOURCES}
    with (
        _redis(options.redis) as redis_url,
        served(*_options(redis_url, history_bytes)) as addresses,
        httpx.Client(base_url=addresses["url"], timeout=TIMEOUT_S, trust_env=False) as client,
    ):
        for repeat in range(options.repeats + 1):  # the first one warms up
            for source, (first_s, kv) in _measure(client, options.tokens, repeat).items():
                if repeat:
                    seconds[source].append(first_s)
                    reused[source].append(kv["reused_tokens"])
    medians = {source: statistics.median(values) for source, values in seconds.items()}
    ratios = {source: medians["recomputed"] / medians[source] for source in ("memory", "redis")}
    for source in SOURCES:
        ratio = f", {ratios[source]:.1f} times faster than recomputing" if source in ratios else ""
        sys.stdout.write(f"{source}: {medians[source] * 1000:.0f} ms to the first token{ratio}\n")
    if options.output:
        figures = {
            "command": sys.argv,
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "tokens": options.tokens,
            "time_to_first_token_s": seconds,
            "reused_tokens": reused,
            "ratio_of_medians": ratios,
        }
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
