"""Throughput and CPU time of the block wire over each transport, against raw ZeroMQ sockets, in one run.

    python benchmarks/wire.py [--megabytes 256] [--repeats 5] [--output FILE]

The receiver is a process of its own. Ours: checksums, credits, acknowledgement, and one copy into a
buffer at the blocks' places. Raw: the same bytes in blocks of the same size over bare sockets, received and
dropped; there is none for shared memory. Prints medians of the repeats and the ratio. A busy machine slows
all; CPU time, of all threads of sender and receiver, suffers less from it. `checksums` is the CPU time of
computing the checksums alone, at both ends, and `copies` that of the one copy into place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zmq

from kvferry.shared.control.messages import Ticket
from kvferry.shared.trust.certs import BlockKeys, Certs, Role
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    BlockHeader,
    EndRecord,
    LayerHeader,
    Manifest,
    NamedTensor,
    TransferKey,
)
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import (
    IS_SUPPORTED,
    SharedMemoryConnectingChannel,
    SharedMemoryListeningChannel,
)
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel

"""The variables of UCX of each."""
NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 8, 128, 8
CREDIT_BYTES = 64 << 20
TIMEOUT_S = 120.0


class _CopyingSink:
    """Copies every block to its place in one buffer, as decode's arena does."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = np.zeros(num_bytes, np.uint8)
        self._tensor_bytes = num_bytes // (2 * NUM_LAYERS)

    def open(self, manifest: Manifest) -> None:
        pass

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        pass

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        start = (2 * header.layer + header.tensor) * self._tensor_bytes + header.offset
        self._buffer[start : start + payload.nbytes] = np.frombuffer(payload, np.uint8)

    def commit(self, end: EndRecord) -> None:
        pass

    def abort(self, key: TransferKey, reason: str) -> None:
        raise RuntimeError(reason)


def _keys(transport: str, role: Role) -> BlockKeys | None:
    """A role's keys where the transport names a folder of them; see `encryption.py`."""
    _, _, folder = transport.partition(" ")
    return Certs(folder, role).block_keys() if folder else None


def receive_ours(transport: str, bind: str, num_bytes: int, pipe: Connection) -> None:
    keys = _keys(transport, "decode")
    network = ZmqListeningChannel(bind, keys=keys)
    channel = SharedMemoryListeningChannel(network) if transport == "shm" else network
    server = BlockServer(channel, _CopyingSink(num_bytes))
    pipe.send(server.endpoint)
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())
    server.close()


def _receive_raw(transport: str, bind: str, num_bytes: int, pipe: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.rcvhwm = 64
        router.bind(bind)
        pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
        while True:
            if pipe.poll():
                if pipe.recv() != "cpu":
                    break
                pipe.send(time.process_time())
            received = 0
            while received < num_bytes:
                if not router.poll(200):
                    break
                frames = router.recv_multipart(copy=False)
                received += len(frames[-1])
            if received:
                router.send_multipart([frames[0].bytes, b"done"])
        router.close(linger=0)


class Timer:
    """Rates and CPU times of transfers, the receiver's included."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.gb_s: list[float] = []
        self.cpu_s_per_gb: dict[str, list[float]] = {"sender": [], "receiver": []}

    @contextlib.contextmanager
    def transfer(self, num_bytes: int) -> Iterator[None]:
        begin = self._cpu_s()
        begin_s = time.perf_counter()
        yield
        self.gb_s.append(num_bytes / (time.perf_counter() - begin_s) / 1e9)
        for times, before, after in zip(self.cpu_s_per_gb.values(), begin, self._cpu_s(), strict=True):
            times.append((after - before) / num_bytes * 1e9)

    def drop_first(self) -> None:
        """Forget the transfer that made the connection."""
        for figures in (self.gb_s, *self.cpu_s_per_gb.values()):
            del figures[0]

    def _cpu_s(self) -> tuple[float, float]:
        self._pipe.send("cpu")
        return time.process_time(), float(self._pipe.recv())


def measure_ours(transport: str, endpoint: str, num_bytes: int, repeats: int, timer: Timer) -> None:
    rows = num_bytes // (2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 2)
    tensor = torch.randn(NUM_KV_HEADS, rows, HEAD_DIM).to(torch.float16)
    keys = _keys(transport, "prefill")
    network = ZmqConnectingChannel(keys)
    channel = SharedMemoryConnectingChannel(network) if transport == "shm" else network
    sender = BlockSender(channel, buffer_bytes=2 * num_bytes, timeout_s=TIMEOUT_S)
    tensors = [NamedTensor(name=name, tensor=tensor, kind="rows") for name in ("keys", "values")]
    for transfer_id in range(1, repeats + 2):
        key = TransferKey(transfer_id=transfer_id, generation=1)
        ticket = Ticket(
            endpoint=endpoint,
            transfer_id=transfer_id,
            generation=1,
            credit_bytes=CREDIT_BYTES,
            lease_s=TIMEOUT_S,
            reserved_bytes=0,
        )
        manifest = Manifest(
            purpose="history",
            key=key,
            request_id="benchmark",
            model_fingerprint="benchmark",
            dtype="float16",
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            start=0,
            num_tokens=rows,
        )
        with timer.transfer(2 * NUM_LAYERS * tensor.nbytes):
            transfer = sender.open(ticket, manifest, timeout_s=TIMEOUT_S)
            for layer in range(NUM_LAYERS):
                transfer.send_layer(layer, tensors)
            transfer.finish(EndRecord(key=key, num_blocks=0, payload_bytes=0))
            transfer.wait(TIMEOUT_S)
    sender.close()


def _measure_raw(transport: str, endpoint: str, num_bytes: int, repeats: int, timer: Timer) -> None:
    block = bytes(MAX_PAYLOAD_BYTES)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.sndhwm = 64
        dealer.connect(endpoint)
        for _ in range(repeats + 1):
            with timer.transfer(num_bytes):
                for _ in range(num_bytes // MAX_PAYLOAD_BYTES):
                    dealer.send(block, copy=False)
                dealer.recv()
        dealer.close(linger=0)


def run(
    receive: Callable[[str, str, int, Connection], None],
    measure: Callable[[str, str, int, int, Timer], None],
    transport: str,
    bind: str,
    num_bytes: int,
    repeats: int,
) -> Timer:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=receive, args=(transport, bind, num_bytes, there), daemon=True)
    process.start()
    try:
        if not here.poll(60):
            raise RuntimeError("the receiver did not start")
        timer = Timer(here)
        measure(transport, here.recv(), num_bytes, repeats, timer)
        timer.drop_first()
        return timer
    finally:
        here.send("stop")
        process.join(10)
        process.kill()


def _cpu_of_parts(num_bytes: int, repeats: int) -> dict[str, list[float]]:
    """CPU seconds per GB of both ends' checksums and of the copy into place, by themselves."""
    data, place = np.random.default_rng(0).bytes(num_bytes), np.zeros(num_bytes, np.uint8)
    source = np.frombuffer(data, np.uint8)
    parts: dict[str, list[float]] = {"checksums": [], "copies": []}
    for _ in range(repeats):
        begin_s = time.process_time()
        for _ in range(2):
            for start in range(0, num_bytes, MAX_PAYLOAD_BYTES):
                xxhash.xxh3_64(memoryview(data)[start : start + MAX_PAYLOAD_BYTES]).intdigest()
        middle_s = time.process_time()
        for start in range(0, num_bytes, MAX_PAYLOAD_BYTES):
            place[start : start + MAX_PAYLOAD_BYTES] = source[start : start + MAX_PAYLOAD_BYTES]
        parts["checksums"].append((middle_s - begin_s) / num_bytes * 1e9)
        parts["copies"].append((time.process_time() - middle_s) / num_bytes * 1e9)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="MiB per transfer, a multiple of 64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    num_bytes = options.megabytes << 20
    results: dict[str, Any] = {}
    transports = ["tcp", "ipc", "shm"] if IS_SUPPORTED else ["tcp", "ipc"]
    with tempfile.TemporaryDirectory() as folder:
        for name in transports:
            bind = "tcp://127.0.0.1:0" if name == "tcp" else f"ipc://{folder}/{name}-{{}}.sock"
            size = num_bytes, options.repeats
            ours = run(receive_ours, measure_ours, name, bind.format("ours"), *size)
            cpu = {end: statistics.median(values) for end, values in ours.cpu_s_per_gb.items()}
            results[name] = {
                "kvferry_gb_s": ours.gb_s,
                "kvferry_cpu_s_per_gb": ours.cpu_s_per_gb,
                "medians": {"gb_s": statistics.median(ours.gb_s), "cpu_s_per_gb": sum(cpu.values())},
            }
            line = (
                f"{name}: kvferry {statistics.median(ours.gb_s):.2f} GB/s, CPU s per GB"
                f" {cpu['sender']:.2f} sender, {cpu['receiver']:.2f} receiver"
            )
            if name in ("tcp", "ipc"):
                raw = run(_receive_raw, _measure_raw, name, bind.format("raw"), *size)
                ratio = statistics.median(ours.gb_s) / statistics.median(raw.gb_s)
                results[name] |= {"raw_zmq_gb_s": raw.gb_s, "raw_zmq_cpu_s_per_gb": raw.cpu_s_per_gb}
                results[name]["ratio_of_medians"] = ratio
                line += f"; raw ZeroMQ {statistics.median(raw.gb_s):.2f} GB/s, ratio {ratio:.2f}"
            sys.stdout.write(line + "\n")
    results["parts_cpu_s_per_gb"] = _cpu_of_parts(num_bytes, options.repeats)
    for part, times in results["parts_cpu_s_per_gb"].items():
        sys.stdout.write(f"{part}: CPU s per GB {statistics.median(times):.2f}\n")
    if options.output:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        about = {"command": sys.argv, "commit": commit, "machine": platform.machine(), "python": sys.version}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
