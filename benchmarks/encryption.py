"""What encryption costs: blocks with CURVE and calls over mTLS, each beside the same without, in one run.

    python benchmarks/encryption.py [--megabytes 128] [--repeats 7] [--calls 500] [--output FILE]

Blocks go over TCP on the loopback to a process of their own, as in `wire.py`; runs with and without keys take
turns, and `ratio_of_rounds` is the median of the rounds' own ratios, which other work changes least.
Calls are `Status` of an idle worker in this process, one after another on one connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wire import measure_ours, receive_ours, run

from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.messages import WorkerStatus
from kvferry.shared.control.server import serve_control
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.trust.certs import Certs
from kvferry.tools.certs import make_certs

ROOT = Path(__file__).resolve().parents[1]
GOAL_MS = 0.5
_WARM_UP_CALLS = 50
_MODEL = ModelSpec(
    name="m", fingerprint="f", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=1,
    max_model_len=1, dtype="float32", eos_token_ids=(0,),
)  # fmt: skip


class _Idle:
    """A worker that only has a status."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.status

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        return self._status


async def latencies_ms(folder: str, num_calls: int) -> list[float]:
    """Of calls over mTLS with the keys of a folder; without TLS if it is empty."""
    service: Any = _Idle(
        WorkerStatus(
            role="decode",
            instance_id="i",
            protocol_version=1,
            ready=True,
            running=0,
            waiting=0,
            free_bytes=0,
            total_bytes=0,
            model=_MODEL,
        )
    )
    server = await serve_control(
        listen="127.0.0.1:0", decode=service, certs=Certs(folder, "decode") if folder else None
    )
    client = GrpcDecodeClient(server.address, certs=Certs(folder, "router") if folder else None)
    try:
        times_ms = []
        for _ in range(_WARM_UP_CALLS + num_calls):
            begin_s = time.perf_counter()
            await client.status(timeout_s=30.0)
            times_ms.append((time.perf_counter() - begin_s) * 1e3)
        return times_ms[_WARM_UP_CALLS:]
    finally:
        await client.close()
        await server.close(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=128, help="MiB per transfer, a multiple of 64")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    gb_s: dict[str, list[float]] = {"plain": [], "encrypted": []}
    cpu: dict[str, list[float]] = {"plain": [], "encrypted": []}
    calls_ms: dict[str, list[float]] = {"plain": [], "encrypted": []}
    with tempfile.TemporaryDirectory() as folder:
        make_certs(Path(folder), days=2, everything=False)
        for _ in range(options.repeats):
            for name, transport, keys in (("plain", "tcp", ""), ("encrypted", f"tcp {folder}", folder)):
                size = options.megabytes << 20, 2
                timer = run(receive_ours, measure_ours, transport, "tcp://127.0.0.1:0", *size)
                gb_s[name] += timer.gb_s
                cpu[name] += [sum(both) for both in zip(*timer.cpu_s_per_gb.values(), strict=True)]
                calls_ms[name] += asyncio.run(latencies_ms(keys, options.calls // options.repeats))
    medians = {name: statistics.median(values) for name, values in gb_s.items()}
    added_ms = statistics.median(calls_ms["encrypted"]) - statistics.median(calls_ms["plain"])
    results = {
        "gb_s": gb_s,
        "cpu_s_per_gb": {name: statistics.median(values) for name, values in cpu.items()},
        "ratio_of_medians": medians["encrypted"] / medians["plain"],
        "ratio_of_rounds": _ratio_of_rounds(gb_s),
        "calls_ms": {name: _quantiles(times_ms) for name, times_ms in calls_ms.items()},
        "added_ms": added_ms,
    }
    sys.stdout.write(
        f"blocks: {medians['plain']:.2f} GB/s plain, {medians['encrypted']:.2f} encrypted, ratio "
        f"{results['ratio_of_medians']:.2f}, of rounds {results['ratio_of_rounds']:.2f}\n"
        f"calls: {results['calls_ms']} ms, {added_ms:.2f} ms added (goal: {GOAL_MS})\n"
    )
    if options.output:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
        ).stdout.strip()
        command = (
            f"python benchmarks/encryption.py --megabytes {options.megabytes} --repeats {options.repeats} "
            f"--calls {options.calls}"
        )
        about = {"command": command, "commit": commit, "machine": platform.machine()}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


def _ratio_of_rounds(gb_s: dict[str, list[float]]) -> float:
    return statistics.median(
        encrypted / plain for encrypted, plain in zip(gb_s["encrypted"], gb_s["plain"], strict=True)
    )


def _quantiles(times_ms: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times_ms, n=20)
    return {"p50": round(statistics.median(times_ms), 3), "p95": round(cuts[-1], 3)}


if __name__ == "__main__":
    main()
