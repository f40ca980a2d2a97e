"""Transfers between two real processes, over each transport, to the end and to a kill."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvtest.wire as kit
import pytest
from kvtest.lanes import some
from kvtest.waiting import until

from kvferry.shared.wire.channel import ListeningChannel
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.zmq import ZmqListeningChannel

SENDER = """
import hashlib, sys, time, torch
from kvferry.shared.control.messages import Ticket
from kvferry.shared.process.logging import setup_logging
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor, TransferKey
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import SharedMemoryConnectingChannel
from kvferry.shared.wire.zmq import ZmqConnectingChannel

setup_logging("warning", "json", "sender")
endpoint, stop_early = sys.argv[1], sys.argv[2] == "stop"
torch.manual_seed(3)
manifest = Manifest(
    purpose="cache", key=TransferKey(transfer_id=77, generation=2), request_id="r", model_fingerprint="f",
    dtype="bfloat16", num_layers=2, num_kv_heads=2, head_dim=64, start=0, num_tokens=20_000,
)
ticket = Ticket(endpoint=endpoint, transfer_id=77, generation=2, credit_bytes=6 << 20, lease_s=60,
                reserved_bytes=0)
channel = ZmqConnectingChannel()
if sys.argv[3] == "shm":
    channel = SharedMemoryConnectingChannel(channel)
sender = BlockSender(channel, buffer_bytes=8 << 20, timeout_s=20)
transfer = sender.open(ticket, manifest, timeout_s=20)
digest = hashlib.sha256()
for layer, rows in enumerate((20_000, 3)):
    tensors = []
    for name in ("keys", "values"):
        tensor = torch.randn(2, rows, 64).to(torch.bfloat16)
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
        tensors.append(NamedTensor(name=name, tensor=tensor, kind="rows"))
    transfer.send_layer(layer, tensors)
    if stop_early:
        sys.stdout.write("halfway\\n")
        sys.stdout.flush()
        time.sleep(60)
transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
transfer.wait(20)
sender.close()
sys.stdout.write(digest.hexdigest())
"""


@contextmanager
def sending_process(endpoint: str, mode: str, kind: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, endpoint, mode, kind],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


@pytest.fixture(params=["tcp", "ipc", pytest.param("shm", marks=kit.needs_shared_memory)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def channel(kind: str, tmp_path_factory: pytest.TempPathFactory) -> ListeningChannel:
    if kind == "shm":
        return kit.listening_in_shared_memory()
    folder: Path = tmp_path_factory.mktemp("p")
    return ZmqListeningChannel("tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{folder}/blocks")


def test_a_transfer_from_another_process_arrives_whole(kind: str, channel: ListeningChannel) -> None:
    sink = kit.RecordingSink()
    server = BlockServer(channel, sink)
    try:
        with sending_process(server.endpoint, "whole", kind) as process:
            digest, _ = process.communicate(timeout=60)
            assert process.returncode == 0
    finally:
        server.close()
    received = b"".join(bytes(tensor) for tensor in sink.tensors.values())
    assert hashlib.sha256(received).hexdigest() == digest
    assert len(sink.committed) == 1


@pytest.mark.parametrize("kind", some(["tcp", "ipc", "shm"], "tcp"), indirect=True)
def test_a_killed_sender_frees_the_transfer_within_seconds(kind: str, channel: ListeningChannel) -> None:
    sink = kit.RecordingSink()
    server = BlockServer(channel, sink)
    try:
        with sending_process(server.endpoint, "stop", kind) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "halfway\n"
            process.kill()
            until(lambda: list(sink.aborted.values()) == ["peer_lost"])
    finally:
        server.close()
    assert sink.committed == {}
