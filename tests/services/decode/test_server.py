"""The decode worker as a process of its own: gRPC control, ZeroMQ blocks, metrics over HTTP, a clean end."""

import asyncio
import contextlib
import signal
import time
import urllib.request

import pytest
from kvtest.command import kvferry
from kvtest.decode import Shipper
from kvtest.families import FAMILIES
from kvtest.processes import started

from kvferry.services.decode.config import GROWTH_TOKENS
from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.messages import GenerationFinished, TransferAccepted
from kvferry.shared.model.loading import load_model
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.zmq import ZmqConnectingChannel
from kvferry.tools.oracle import OneProcessGenerator

STOP_TIMEOUT_S = 60


@pytest.fixture
def worker(tmp_path):
    """A running worker's process and addresses."""
    options = ("--threads", "1", "--device", "cpu", "--arena-bytes", "64MiB")
    with started(tmp_path, "decode", *options) as wait:
        yield wait()


def scrape(info):
    with urllib.request.urlopen(f"http://{info['metrics']}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_a_worker_process_serves_a_request_and_stops_on_a_signal(worker, request_of):
    info = worker.addresses
    assert info["service"] == "decode"
    model = load_model("demo", device="cpu")
    sender = BlockSender(ZmqConnectingChannel(), buffer_bytes=1 << 24, timeout_s=20)
    client = GrpcDecodeClient(info["address"])
    try:
        status = await client.status(timeout_s=60)
        assert status.ready
        assert status.model == model.spec
        request = request_of(
            range(10, 90), method="rocketkv", tokens=16, model_fingerprint=model.spec.fingerprint
        )
        stream = client.generate(request, timeout_s=60)
        async with contextlib.aclosing(stream):
            ticket = (await anext(stream)).ticket
            assert ticket.endpoint == info["blocks"]
            first = await asyncio.to_thread(Shipper(model, sender).ship, request, ticket)
            events = [event async for event in stream]
        assert isinstance(events[0], TransferAccepted)
        assert isinstance(events[-1], GenerationFinished)
        expected = OneProcessGenerator(model).generate(
            list(request.prompt_token_ids), plan=request.plan, sampling=request.sampling
        )
        assert [first, *(e.token for e in events[1:-1])] == expected
        metrics = await asyncio.to_thread(scrape, info)
        assert metrics['kvferry_decode_tokens_total{method="rocketkv",model="demo"}'] == 7
        assert metrics['kvferry_arena_bytes{state="free"}'] == 64 << 20
        stream = client.generate(request, timeout_s=60)
        await anext(stream)
        await stream.aclose()  # a call closed across gRPC frees its reservation
        deadline = time.monotonic() + 60
        while (await client.status(timeout_s=60)).free_bytes != 64 << 20:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    finally:
        await client.close()
        sender.close()
    worker.popen.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.popen.wait, STOP_TIMEOUT_S) == 0


def test_an_arena_without_room_for_a_sequence_is_an_error_at_start(tmp_path):
    FAMILIES["deepseek_v2"].save(tmp_path)  # the size of its rows is known once it is loaded
    least = load_model(tmp_path, device="cpu").spec.full_bytes(GROWTH_TOKENS)
    done = kvferry("decode", "--model", str(tmp_path), "--arena-bytes", str(least - 1))
    assert done.returncode == 2
    assert f"kvferry decode: arena_bytes is {least - 1}; it must be at least {least}" in done.stderr
