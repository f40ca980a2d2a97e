"""What encryption costs: blocks over CURVE and calls over mTLS, each beside the same without, in one run.

    python benchmarks/encryption.py [--megabytes 128] [--repeats 7] [--calls 500] [--output FILE]

Blocks go over TCP on the loopback to a process of their own, as in `wire.py`; runs with and without keys take
turns. `bare` is ZeroMQ with CURVE and nothing above it. Calls are `Status` of an idle worker in this process,
one after another on one connection. `ciphers` is what one core encrypts of 4 MiB messages with ciphers that
are not CURVE's: AES-GCM and ChaCha20-Poly1305 of OpenSSL, which TLS has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from wire import measure_ours, receive_ours, run

from kvferry.shared.certs import Certs
from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.messages import WorkerStatus
from kvferry.shared.control.server import serve_control
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES
from kvferry.tools.certs import make_certs

ROOT = Path(__file__).resolve().parents[1]
GOAL_RATIO, GOAL_MS = 0.6, 0.5
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


def _drain(pipe: Connection, keys: tuple[bytes, bytes] | None, io_threads: int, num_bytes: int) -> None:
    """A bare receiver."""
    with zmq.Context(io_threads) as context, context.socket(zmq.ROUTER) as router:
        if keys is not None:
            router.curve_server, router.curve_secretkey = True, keys[1]
        router.bind("tcp://127.0.0.1:0")
        pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
        while not pipe.poll():
            received = 0
            while received < num_bytes and router.poll(200):
                frames = router.recv_multipart(copy=False)
                received += len(frames[-1])
            if received:
                router.send_multipart([frames[0].bytes, b"done"])
        router.close(linger=0)


def bare_gb_s(num_bytes: int, *, encrypted: bool, frame_bytes: int, io_threads: int, repeats: int) -> float:
    """Of bare ZeroMQ sockets, with CURVE or without: what is possible above it."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    keys = zmq.curve_keypair() if encrypted else None
    process = spawn.Process(target=_drain, args=(there, keys, io_threads, num_bytes), daemon=True)
    process.start()
    rates = []
    with zmq.Context(io_threads) as context, context.socket(zmq.DEALER) as dealer:
        if keys is not None:
            dealer.curve_serverkey = keys[0]
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.connect(here.recv())
        block = bytes(frame_bytes)
        for _ in range(repeats + 1):
            begin_s = time.perf_counter()
            for _ in range(num_bytes // frame_bytes):
                dealer.send(block, copy=False)
            dealer.recv()
            rates.append(num_bytes / (time.perf_counter() - begin_s) / 1e9)
        dealer.close(linger=0)
    here.send("stop")
    process.join(10)
    process.kill()
    return statistics.median(rates[1:])


def bare_rates(num_bytes: int, repeats: int) -> dict[str, float]:
    """What was tried to make CURVE faster: smaller frames, which stay in a processor's cache, and a second
    thread of ZeroMQ."""
    tried = {
        "plain": (False, MAX_PAYLOAD_BYTES, 1),
        "curve": (True, MAX_PAYLOAD_BYTES, 1),
        "curve, frames of 1 MiB": (True, 1 << 20, 1),
        "curve, frames of 256 KiB": (True, 256 << 10, 1),
        "curve, frames of 64 KiB": (True, 64 << 10, 1),
        "curve, 2 threads": (True, MAX_PAYLOAD_BYTES, 2),
    }
    return {
        name: bare_gb_s(num_bytes, encrypted=encrypted, frame_bytes=size, io_threads=threads, repeats=repeats)
        for name, (encrypted, size, threads) in tried.items()
    }


def ciphers_gb_s(repeats: int) -> dict[str, float]:
    """GB per second of one core, with messages of the largest block."""
    data, nonce = bytes(MAX_PAYLOAD_BYTES), bytes(12)
    found = {
        name: _rate(lambda its=cipher: its.encrypt(nonce, data, None), repeats)
        for name, cipher in (
            ("aes_256_gcm", AESGCM(bytes(32))),
            ("chacha20_poly1305", ChaCha20Poly1305(bytes(32))),
        )
    }
    return found


def _rate(encrypt: Callable[[], bytes], repeats: int) -> float:
    times_s = []
    for _ in range(5 * repeats):
        begin_s = time.perf_counter()
        encrypt()
        times_s.append(time.perf_counter() - begin_s)
    return MAX_PAYLOAD_BYTES / statistics.median(times_s) / 1e9


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
                cpu[name] += [sum(its) for its in zip(*timer.cpu_s_per_gb.values(), strict=True)]
                calls_ms[name] += asyncio.run(latencies_ms(keys, options.calls // options.repeats))
    medians = {name: statistics.median(its) for name, its in gb_s.items()}
    added_ms = statistics.median(calls_ms["encrypted"]) - statistics.median(calls_ms["plain"])
    results = {
        "gb_s": gb_s,
        "cpu_s_per_gb": {name: statistics.median(its) for name, its in cpu.items()},
        "ratio_of_medians": medians["encrypted"] / medians["plain"],
        "calls_ms": {name: _quantiles(its) for name, its in calls_ms.items()},
        "added_ms": added_ms,
        "bare_gb_s": bare_rates(options.megabytes << 20, options.repeats),
        "ciphers_gb_s": ciphers_gb_s(options.repeats),
    }
    sys.stdout.write(
        f"blocks: {medians['plain']:.2f} GB/s plain, {medians['encrypted']:.2f} encrypted, ratio "
        f"{results['ratio_of_medians']:.2f} (goal: {GOAL_RATIO})\n"
        f"calls: {results['calls_ms']} ms, {added_ms:.2f} ms added (goal: {GOAL_MS})\n"
        f"bare ZeroMQ: {results['bare_gb_s']} GB/s\n"
        f"ciphers: {results['ciphers_gb_s']} GB/s of one core\n"
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


def _quantiles(times_ms: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times_ms, n=20)
    return {"p50": round(statistics.median(times_ms), 3), "p95": round(cuts[-1], 3)}


if __name__ == "__main__":
    main()
