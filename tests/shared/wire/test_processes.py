"""Transfers between two real processes, over tcp and ipc, to the end and to a kill."""

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

from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.zmq import ZmqListeningChannel

SENDER = """
import hashlib, sys, time, torch
from kvferry.shared.control.messages import Ticket
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor, TransferKey
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.zmq import ZmqConnectingChannel

endpoint, stop_early = sys.argv[1], sys.argv[2] == "stop"
torch.manual_seed(3)
manifest = Manifest(
    purpose="cache", key=TransferKey(transfer_id=77, generation=2), request_id="r", model_fingerprint="f",
    dtype="bfloat16", num_layers=2, num_kv_heads=2, head_dim=64, start=0, num_tokens=20_000,
)
ticket = Ticket(endpoint=endpoint, transfer_id=77, generation=2, credit_bytes=6 << 20, lease_s=60,
                reserved_bytes=0)
sender = BlockSender(ZmqConnectingChannel(), buffer_bytes=8 << 20, timeout_s=20)
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
def sending_process(endpoint: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, endpoint, mode],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


@pytest.fixture(params=["tcp", "ipc"])
def bind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("p")
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{folder}/blocks"


def test_a_transfer_from_another_process_arrives_whole(bind: str) -> None:
    sink = kit.RecordingSink()
    server = BlockServer(ZmqListeningChannel(bind), sink)
    try:
        with sending_process(server.endpoint, "whole") as process:
            digest, _ = process.communicate(timeout=60)
            assert process.returncode == 0
    finally:
        server.close()
    received = b"".join(bytes(tensor) for tensor in sink.tensors.values())
    assert hashlib.sha256(received).hexdigest() == digest
    assert len(sink.committed) == 1


def test_a_killed_sender_frees_the_transfer_within_seconds(bind: str) -> None:
    sink = kit.RecordingSink()
    server = BlockServer(ZmqListeningChannel(bind), sink, idle_timeout_s=600.0)
    try:
        with sending_process(server.endpoint, "stop") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "halfway\n"
            process.kill()
            assert kit.eventually(lambda: list(sink.aborted.values()) == ["peer_lost"])
    finally:
        server.close()
    assert sink.committed == {}
