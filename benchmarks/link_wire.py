"""The block wire over a link of a given speed: a sender here, a receiver in a process of its own.

Part of `links.py`. The speed is kept in user space: the sender's channel accepts a message only once the ones
before it would have left at the link's speed. Layers become ready at the pace of a computation that is not
run; their bytes are the same ones again and again, so that memory is that of one layer.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvferry.shared.control.messages import Ticket
from kvferry.shared.wire.channel import Channel, Peer, PeerLost, Received, SendResult
from kvferry.shared.wire.messages import (
    BlockHeader,
    EndRecord,
    LayerHeader,
    Manifest,
    NamedTensor,
    TransferKey,
)
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import SharedMemoryConnectingChannel, SharedMemoryListeningChannel
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel

NUM_HEADS, WIDTH = 8, 128
CREDIT_BYTES, BUFFER_BYTES = 64 << 20, 256 << 20
TIMEOUT_S = 120.0
_AHEAD_S = 0.002
"""How far a message may be sent before its time, since threads wake up late."""


class PacedChannel:
    """A connecting channel as fast as a link. Attributes: bytes_per_s: of the link; infinite: unpaced."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.open, self.wake, self.close = channel.open, channel.wake, channel.close
        self.bytes_per_s = float("inf")
        self._free_at_s = 0.0
        self._is_waiting = False

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        now_s = time.monotonic()
        self._is_waiting = self._free_at_s > now_s + _AHEAD_S
        if self._is_waiting:
            return SendResult.BLOCKED
        result = self._channel.send(peer, frames)
        if result is SendResult.SENT:
            size = sum(memoryview(frame).nbytes for frame in frames)
            self._free_at_s = max(now_s, self._free_at_s) + size / self.bytes_per_s
        return result

    def poll(self, timeout_s: float) -> Sequence[Received | PeerLost]:
        if self._is_waiting:
            timeout_s = min(timeout_s, max(0.001, self._free_at_s - time.monotonic()))
        return self._channel.poll(timeout_s)


class _Sink:
    """Copies every block to its place in the memory of one layer, and notes when each layer is complete."""

    def __init__(self) -> None:
        self.buffer = np.zeros(0, np.uint8)
        self.arrivals_s: dict[int, float] = {}

    def open(self, manifest: Manifest) -> None:
        self.arrivals_s = {}

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        pass

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        start = header.tensor * (self.buffer.nbytes // 2) + header.offset
        self.buffer[start : start + payload.nbytes] = np.frombuffer(payload, np.uint8)
        self.arrivals_s[header.layer] = time.monotonic()

    def commit(self, end: EndRecord) -> None:
        pass

    def abort(self, key: TransferKey, reason: str) -> None:
        raise RuntimeError(reason)


def _receive(pipe: Connection, through_memory: bool) -> None:
    sink = _Sink()
    network = ZmqListeningChannel("tcp://127.0.0.1:0")
    server = BlockServer(SharedMemoryListeningChannel(network) if through_memory else network, sink)
    pipe.send(server.endpoint)
    while (asked := pipe.recv()) != "stop":
        if asked == "arrivals":
            pipe.send([sink.arrivals_s[layer] for layer in sorted(sink.arrivals_s)])
        elif asked == "cpu":
            pipe.send(_thread_times())
        else:
            sink.buffer = np.ones(asked, np.uint8)
            pipe.send(None)
    server.close()


def _thread_times() -> dict[str, float]:
    """CPU seconds of each thread of this process."""
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}


class Link:
    """A sender and a receiver that stay connected over many transfers."""

    def __init__(self, pipe: Connection, through_memory: bool) -> None:
        self._pipe = pipe
        self._endpoint = pipe.recv()
        network = ZmqConnectingChannel()
        self._channel = PacedChannel(SharedMemoryConnectingChannel(network) if through_memory else network)
        self._sender = BlockSender(self._channel, buffer_bytes=BUFFER_BYTES, timeout_s=TIMEOUT_S)
        self._ids = itertools.count(1)

    @classmethod
    @contextlib.contextmanager
    def running(cls, *, through_memory: bool = False) -> Iterator[Link]:
        """Args: through_memory: a ring in shared memory rather than TCP."""
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=_receive, args=(there, through_memory), daemon=True)
        process.start()
        if not here.poll(60):
            raise RuntimeError("the receiver did not start")
        link = cls(here, through_memory)
        try:
            yield link
        finally:
            link._sender.close()
            here.send("stop")
            process.join(10)
            process.kill()

    def transfer(
        self, *, bytes_per_s: float, layer_bytes: int, num_layers: int, layer_s: float
    ) -> list[float]:
        """Ship layers of which one becomes ready every `layer_s`; returns when each had arrived, in seconds
        from the beginning of the computation."""
        rows = max(1, round(layer_bytes / (2 * NUM_HEADS * WIDTH)))
        tensor = torch.ones(NUM_HEADS, rows, WIDTH, dtype=torch.uint8)
        tensors = [NamedTensor(name=name, tensor=tensor, kind="rows") for name in ("keys", "values")]
        self._ask(2 * tensor.nbytes)
        self._channel.bytes_per_s = bytes_per_s
        key = TransferKey(transfer_id=next(self._ids), generation=1)
        ticket = Ticket(
            endpoint=self._endpoint,
            transfer_id=key.transfer_id,
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
            num_layers=num_layers,
            num_kv_heads=NUM_HEADS,
            head_dim=WIDTH,
            start=0,
            num_tokens=rows,
        )
        begin_s = time.monotonic()
        transfer = self._sender.open(ticket, manifest, timeout_s=TIMEOUT_S)
        for layer in range(num_layers):
            time.sleep(max(0.0, begin_s + (layer + 1) * layer_s - time.monotonic()))
            transfer.send_layer(layer, tensors)
        transfer.finish(EndRecord(key=key, num_blocks=0, payload_bytes=0))
        transfer.wait(TIMEOUT_S)
        return [arrival_s - begin_s for arrival_s in self._ask("arrivals")]

    def cpu_s_per_byte(self, *, num_layers: int = 16, layer_bytes: int = 64 << 20) -> tuple[float, float]:
        """CPU time a byte of the sender's and of the receiver's busiest thread, at full speed. Threads run
        beside one another where there are cores enough."""
        unpaced = {"bytes_per_s": float("inf"), "layer_bytes": layer_bytes, "layer_s": 0.0}
        self.transfer(**unpaced, num_layers=2)
        before = _thread_times(), self._ask("cpu")
        self.transfer(**unpaced, num_layers=num_layers)
        after = _thread_times(), self._ask("cpu")
        sender, receiver = (
            max(times[name] - earlier.get(name, 0.0) for name in times) / (num_layers * layer_bytes)
            for earlier, times in zip(before, after, strict=True)
        )
        return sender, receiver

    def _ask(self, what: str | int) -> Any:
        self._pipe.send(what)
        if not self._pipe.poll(TIMEOUT_S):
            raise RuntimeError(f"the receiver does not answer {what!r}; process {os.getpid()}")
        return self._pipe.recv()
