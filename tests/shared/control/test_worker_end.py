"""A worker that is absent, closes or is killed, and what it says of itself to health and reflection."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import kvtest.control as kit
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvtest.waiting import eventually

from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.messages import TicketIssued
from kvferry.shared.control.server import ControlServer, serve_control
from kvferry.shared.errors import Cancelled, WorkerUnavailable

# ---- a worker's end --------------------------------------------------------------------------------------


async def test_nobody_listening_is_worker_unavailable() -> None:
    client = GrpcDecodeClient("127.0.0.1:1")
    try:
        with pytest.raises(WorkerUnavailable):
            await client.status(timeout_s=kit.WAIT_S)
        with pytest.raises(WorkerUnavailable):
            await kit.collect(client.generate(kit.generate_request(), timeout_s=kit.WAIT_S))
    finally:
        await client.close()


async def closed_in_mid_call(decode: Any, client: GrpcDecodeClient, close: Callable[[], Any]) -> list[Any]:
    """The events of a call that runs when the server closes."""
    request = kit.generate_request()
    reader = asyncio.create_task(kit.collect(client.generate(request, timeout_s=kit.WAIT_S)))
    await eventually(lambda: len(decode.request_ids) == 1)
    await close()
    return await reader


async def test_closing_lets_calls_finish_within_the_grace(
    decode: Any, server: ControlServer, decode_client: GrpcDecodeClient
) -> None:
    decode.gap_s = 0.2
    events = await closed_in_mid_call(decode, decode_client, lambda: server.close(kit.WAIT_S))
    assert len(events) == 5


async def test_closing_cancels_calls_after_the_grace(
    decode: Any, server: ControlServer, decode_client: GrpcDecodeClient
) -> None:
    decode.gap_s = 60.0
    with pytest.raises((WorkerUnavailable, Cancelled)):
        await closed_in_mid_call(decode, decode_client, lambda: server.close(0.1))
    await eventually(lambda: decode.num_closed == 1)


WORKER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from kvtest.control import DecodeService, serve_control

async def main():
    service = DecodeService()
    service.gap_s = 60.0
    server = await serve_control(listen="127.0.0.1:0", decode=service)
    sys.stdout.write(server.address + "\\n")
    sys.stdout.flush()
    await asyncio.sleep(120)

asyncio.run(main())
"""


async def test_a_killed_worker_is_worker_unavailable() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, os.path.dirname(os.path.dirname(kit.__file__))],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        assert process.stdout is not None
        address = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60.0)
        client = GrpcDecodeClient(address.strip())
        stream = client.generate(kit.generate_request(), timeout_s=60.0)
        assert isinstance(await anext(stream), TicketIssued)
        process.kill()
        with pytest.raises(WorkerUnavailable):
            await anext(stream)
        await client.close()
    finally:
        process.kill()
        process.communicate(timeout=kit.WAIT_S)


# ---- health and reflection -------------------------------------------------------------------------------


async def test_health_answers_and_turns_while_closing(decode: Any) -> None:
    server = await serve_control(listen="127.0.0.1:0", decode=decode)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvferry.control.v1.Decode"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=kit.WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=kit.WAIT_S)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        closing = asyncio.create_task(server.close(1.0))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        await closing


async def test_reflection_lists_the_services_and_their_file(server: ControlServer) -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvferry.control.v1.Decode"),
    ]
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=kit.WAIT_S)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert names >= {"kvferry.control.v1.Decode", "kvferry.control.v1.Prefill", "grpc.health.v1.Health"}
    assert b"GenerateRequest" in answers[1].file_descriptor_response.file_descriptor_proto[0]
