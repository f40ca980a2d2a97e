"""Bytes per second between host and device, over the block wire's loopback, and to Redis."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, cast

import torch

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import KvferryError
from kvferry.shared.history.redis_client import RedisLink, RedisOptions
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
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel
from kvferry.tools.doctor.report import Finding

COPY_BYTES = 256 << 20
WIRE_BYTES = 64 << 20
REDIS_BYTES = 8 << 20
_TIMEOUT_S = 60.0
_LEAST_HOST_GB_S = 3.0
_LEAST_WIRE_GB_S = 0.2
_SLOW_PING_S = 0.02
_HEADS, _HEAD_DIM = 8, 128


def host_findings(device: torch.device) -> Iterator[Finding]:
    """Time copies from page-locked memory to the device and back."""
    if device.type != "cuda":
        yield Finding(check="host to device", verdict="skip", found="no GPU")
        return
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    for check, target, source in (("host to device", there, host), ("device to host", host, there)):
        target.copy_(source)
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        rate = COPY_BYTES / (time.perf_counter() - begin_s)
        is_slow = rate < _LEAST_HOST_GB_S * 1e9
        yield Finding(
            check=check,
            verdict="warn" if is_slow else "ok",
            found=f"{rate / 1e9:.1f} GB/s",
            advice="look at the PCIe link's width and generation (nvidia-smi -q)" if is_slow else "",
            data={"bytes_s": rate},
        )


class _Sink:
    """Copies every block to memory, as decode's arena does."""

    def __init__(self) -> None:
        self._memory = bytearray(WIRE_BYTES)

    def open(self, manifest: Manifest) -> None: ...

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None: ...

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        self._memory[header.offset : header.offset + payload.nbytes] = payload

    def commit(self, end: EndRecord) -> None: ...

    def abort(self, key: TransferKey, reason: str) -> None: ...


def wire_findings() -> Iterator[Finding]:
    """Time transfers of the block protocol over ZeroMQ on the loopback, both ends in this process."""
    server = BlockServer(ZmqListeningChannel("tcp://127.0.0.1:0"), cast(Any, _Sink()))
    sender = BlockSender(ZmqConnectingChannel(), buffer_bytes=2 * WIRE_BYTES, timeout_s=_TIMEOUT_S)
    try:
        rates = [_transfer(server, sender, transfer_id) for transfer_id in (1, 2, 3)]
    finally:
        sender.close()
        server.close()
    rate = max(rates)
    is_slow = rate < _LEAST_WIRE_GB_S * 1e9
    yield Finding(
        check="wire, loopback",
        verdict="warn" if is_slow else "ok",
        found=f"{rate / 1e9:.2f} GB/s over ZeroMQ, checksums included",
        advice="the processors are busy or slow; KV will travel at this rate at most" if is_slow else "",
        data={"bytes_s": rate},
    )


def _transfer(server: BlockServer, sender: BlockSender, transfer_id: int) -> float:
    rows = WIRE_BYTES // (_HEADS * _HEAD_DIM * 2)
    tensor = torch.ones(_HEADS, rows, _HEAD_DIM, dtype=torch.float16)
    key = TransferKey(transfer_id=transfer_id, generation=1)
    ticket = Ticket(
        endpoint=server.endpoint,
        transfer_id=transfer_id,
        generation=1,
        credit_bytes=WIRE_BYTES,
        lease_s=_TIMEOUT_S,
        reserved_bytes=0,
    )
    manifest = Manifest(
        purpose="history",
        key=key,
        request_id="doctor",
        model_fingerprint="doctor",
        dtype="float16",
        num_layers=1,
        num_kv_heads=_HEADS,
        head_dim=_HEAD_DIM,
        start=0,
        num_tokens=rows,
    )
    begin_s = time.perf_counter()
    transfer = sender.open(ticket, manifest, timeout_s=_TIMEOUT_S)
    transfer.send_layer(0, [NamedTensor(name="keys", tensor=tensor, kind="rows")])
    transfer.finish(EndRecord(key=key, num_blocks=0, payload_bytes=0))
    transfer.wait(_TIMEOUT_S)
    return tensor.nbytes / (time.perf_counter() - begin_s)


def redis_findings(url: str) -> Iterator[Finding]:
    """Measure Redis' answer time; write, read and delete a value."""
    if not url:
        yield Finding(check="redis", verdict="skip", found="no --history-redis")
        return
    link = RedisLink(RedisOptions(url=url, timeout_s=5.0))
    name = f"kvferry:doctor:{secrets.token_hex(8)}"
    value = bytes(REDIS_BYTES)
    try:
        link.call(lambda client: client.exists(name))
        begin_s = time.perf_counter()
        link.call(lambda client: client.exists(name))
        ping_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        link.call(lambda client: client.set(name, value, ex=60))
        read = link.call(lambda client: client.get(name))
        rate = 2 * REDIS_BYTES / (time.perf_counter() - begin_s)
        link.call(lambda client: client.delete(name))
    except KvferryError as error:
        advice = (
            "look at the URL, the credentials and the network; without Redis history ends with the worker"
        )
        found = f"{error.reason}: {error.message}"
        yield Finding(check="redis", verdict="fail", found=found, advice=advice)
        return
    finally:
        link.close()
    if read != value:
        yield Finding(check="redis", verdict="fail", found="it returned another value than was written")
        return
    is_slow = ping_s > _SLOW_PING_S
    yield Finding(
        check="redis",
        verdict="warn" if is_slow else "ok",
        found=f"answers in {ping_s * 1e3:.1f} ms, {rate / 1e9:.2f} GB/s",
        advice="it is far away or busy; a turn waits for it" if is_slow else "",
        data={"ping_s": ping_s, "bytes_s": rate},
    )
