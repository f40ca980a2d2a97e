"""Throughput of the block wire against raw ZeroMQ sockets of the same kind, in one run.

    python benchmarks/wire.py [--megabytes 256] [--repeats 5] [--output FILE]

The receiver is a process of its own. Ours: checksums, credits, acknowledgement, and one copy into a
buffer at the blocks' places. Raw: the same bytes in blocks of the same size over bare sockets, received and
dropped. Prints the median of the repeats and the ratio; a busy machine slows both.
"""

from __future__ import annotations

import argparse
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

import numpy as np
import torch
import zmq

from kvferry.shared.control.messages import Ticket
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
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel

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


def _receive_ours(bind: str, num_bytes: int, pipe: Connection) -> None:
    server = BlockServer(ZmqListeningChannel(bind), _CopyingSink(num_bytes))
    pipe.send(server.endpoint)
    pipe.recv()
    server.close()


def _receive_raw(bind: str, num_bytes: int, pipe: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.rcvhwm = 64
        router.bind(bind)
        pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
        while not pipe.poll():
            received = 0
            while received < num_bytes:
                if not router.poll(200):
                    break
                frames = router.recv_multipart(copy=False)
                received += len(frames[-1])
            if received:
                router.send_multipart([frames[0].bytes, b"done"])
        pipe.recv()
        router.close(linger=0)


def _measure_ours(endpoint: str, num_bytes: int, repeats: int) -> list[float]:
    rows = num_bytes // (2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 2)
    tensor = torch.randn(NUM_KV_HEADS, rows, HEAD_DIM).to(torch.float16)
    sender = BlockSender(ZmqConnectingChannel(), buffer_bytes=2 * num_bytes, timeout_s=TIMEOUT_S)
    tensors = [NamedTensor(name=name, tensor=tensor, kind="rows") for name in ("keys", "values")]
    rates = []
    for transfer_id in range(1, repeats + 2):
        key = TransferKey(transfer_id=transfer_id, generation=1)
        begin_s = time.perf_counter()
        transfer = sender.open(
            Ticket(
                endpoint=endpoint,
                transfer_id=transfer_id,
                generation=1,
                credit_bytes=CREDIT_BYTES,
                lease_s=TIMEOUT_S,
                reserved_bytes=0,
            ),
            Manifest(
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
            ),
            timeout_s=TIMEOUT_S,
        )
        for layer in range(NUM_LAYERS):
            transfer.send_layer(layer, tensors)
        transfer.finish(EndRecord(key=key, num_blocks=0, payload_bytes=0))
        transfer.wait(TIMEOUT_S)
        rates.append(2 * NUM_LAYERS * tensor.nbytes / (time.perf_counter() - begin_s) / 1e9)
    sender.close()
    return rates[1:]  # the first one connects


def _measure_raw(endpoint: str, num_bytes: int, repeats: int) -> list[float]:
    rates = []
    block = bytes(MAX_PAYLOAD_BYTES)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.sndhwm = 64
        dealer.connect(endpoint)
        for _ in range(repeats + 1):
            begin_s = time.perf_counter()
            for _ in range(num_bytes // MAX_PAYLOAD_BYTES):
                dealer.send(block, copy=False)
            dealer.recv()
            rates.append(num_bytes / (time.perf_counter() - begin_s) / 1e9)
        dealer.close(linger=0)
    return rates[1:]


def _with_receiver(
    receive: Callable[[str, int, Connection], None],
    measure: Callable[[str, int, int], list[float]],
    bind: str,
    num_bytes: int,
    repeats: int,
) -> list[float]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=receive, args=(bind, num_bytes, there), daemon=True)
    process.start()
    try:
        if not here.poll(60):
            raise RuntimeError("the receiver did not start")
        return measure(here.recv(), num_bytes, repeats)
    finally:
        here.send("stop")
        process.join(10)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="MiB per transfer, a multiple of 64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    num_bytes = options.megabytes << 20
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, bind in (("tcp", "tcp://127.0.0.1:0"), ("ipc", f"ipc://{folder}/{{}}.sock")):
            raw = _with_receiver(_receive_raw, _measure_raw, bind.format("raw"), num_bytes, options.repeats)
            ours = _with_receiver(
                _receive_ours, _measure_ours, bind.format("ours"), num_bytes, options.repeats
            )
            ratio = statistics.median(ours) / statistics.median(raw)
            results[name] = {"kvferry_gb_s": ours, "raw_zmq_gb_s": raw, "ratio_of_medians": ratio}
            sys.stdout.write(
                f"{name}: kvferry {statistics.median(ours):.2f} GB/s, raw ZeroMQ "
                f"{statistics.median(raw):.2f} GB/s, ratio {ratio:.2f}\n"
            )
    if options.output:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        about = {"command": sys.argv, "commit": commit, "machine": platform.machine(), "python": sys.version}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
