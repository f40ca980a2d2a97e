"""Clients against a serving worker over real sockets: results, errors, deadlines, cancellation, death."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.contextvars import get_contextvars, merge_contextvars
from structlog.testing import capture_logs

from kvferry.proto import control_pb2, control_pb2_grpc
from kvferry.shared import errors
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.control.client import GrpcDecodeClient, GrpcPrefillClient
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    FirstToken,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryInfo,
    PrefillEvent,
    PrefillRequest,
    SessionKey,
    Ticket,
    TicketIssued,
    TokenGenerated,
    TransferDone,
    WorkerStatus,
)
from kvferry.shared.control.server import ControlServer, serve_control
from kvferry.shared.errors import (
    Cancelled,
    ConfigurationError,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    PayloadTooLarge,
    SessionNotFound,
    WorkerUnavailable,
)
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken, SamplingParams

WAIT_S = 20.0
PLAN = CompressionPlan(method="full")
TICKET = Ticket(
    endpoint="tcp://d:1", transfer_id=2**64 - 1, generation=3, credit_bytes=5, lease_s=1.5, reserved_bytes=9
)
TOKEN = SampledToken(token_id=5, index=1, logprob=-0.25, top_logprobs=((5, -0.25),))
MODEL = ModelSpec(
    name="demo",
    fingerprint="f",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=10,
    max_model_len=100,
    dtype="float32",
    eos_token_ids=(1,),
)
STATUS = WorkerStatus(
    role="decode",
    instance_id="i",
    protocol_version=1,
    ready=True,
    running=1,
    waiting=2,
    free_bytes=2**40,
    total_bytes=2**41,
    model=MODEL,
    methods=("full", "rocketkv"),
    kernel_paths={"dense_decode": "triton", "quest": "torch"},
)
SESSION = SessionKey(owner="o", session_id="s")


def generate_request(request_id: str = "request-1", max_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model_fingerprint="f",
        prompt_token_ids=(1, 2, 3),
        plan=PLAN,
        sampling=SamplingParams(max_tokens=max_tokens),
    )


PREFILL_REQUEST = PrefillRequest(
    request_id="request-1",
    model_fingerprint="f",
    prompt_token_ids=(1, 2, 3),
    plan=PLAN,
    sampling=SamplingParams(max_tokens=1),
    ticket=TICKET,
    session=SESSION,
    kept_bins=3,
)


class DecodeService:
    """Yields a ticket, then as many tokens as asked for; 0 tokens means for ever."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.fail_at_end = False
        self.gap_s = 0.0
        self.timeout_s = 0.0
        self.closed: list[float] = []
        self.request_ids: list[str] = []
        self.finished: list[str] = []

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.timeout_s = timeout_s
        self.request_ids.append(get_contextvars().get("request_id", ""))
        try:
            if self.error is not None and not self.fail_at_end:
                raise self.error
            yield TicketIssued(ticket=TICKET)
            index = 0
            while request.sampling.max_tokens == 0 or index < request.sampling.max_tokens:
                await asyncio.sleep(self.gap_s)
                yield TokenGenerated(token=TOKEN)
                index += 1
            if self.error is not None:
                raise self.error
            yield GenerationFinished(finish_reason="length", num_tokens=index, cache_bytes=7)
        finally:
            self.closed.append(time.monotonic())

    async def finish(self, request_id: str, *, timeout_s: float) -> None:
        self.finished.append(request_id)

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        return HistoryInfo(num_tokens=len(session.session_id), size_bytes=2**40, tier="retained")

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        if self.error is not None:
            raise self.error
        return STATUS


class PrefillService:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def prefill(
        self, request: PrefillRequest, *, timeout_s: float
    ) -> AsyncGenerator[PrefillEvent, None]:
        self.asked.append(request)
        yield FirstToken(
            token=TOKEN,
            method="full",
            reused_tokens=1,
            full_bytes=2**40,
            prefill_s=0.5,
            compress_s=0.25,
            queue_s=0.125,
            kept=(0.0, 0.5, 1.0),
        )
        yield TransferDone(bytes_by_kind={"rows": 2**33, "index": 0}, transfer_s=0.5)

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo:
        self.asked.append(request)
        return HistoryInfo(num_tokens=len(request.token_ids), size_bytes=2**40)

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        self.asked.append(request_id)

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        self.asked.append(session)
        return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        raise SessionNotFound(f"session {session.session_id!r} is not known", param="id")

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        await asyncio.sleep(60)
        return STATUS


def as_decode(service: DecodeService) -> DecodeControl:
    return service


def as_prefill(service: PrefillService) -> PrefillControl:
    return service


@pytest.fixture
def decode() -> DecodeService:
    return DecodeService()


@pytest.fixture
def prefill() -> PrefillService:
    return PrefillService()


@pytest.fixture
async def server(decode: DecodeService, prefill: PrefillService) -> AsyncIterator[ControlServer]:
    server = await serve_control(listen="127.0.0.1:0", decode=as_decode(decode), prefill=as_prefill(prefill))
    yield server
    await server.close(0.0)


@pytest.fixture
async def decode_client(server: ControlServer) -> AsyncIterator[GrpcDecodeClient]:
    client = GrpcDecodeClient(server.address)
    yield client
    await client.close()


@pytest.fixture
async def prefill_client(server: ControlServer) -> AsyncIterator[GrpcPrefillClient]:
    client = GrpcPrefillClient(server.address)
    yield client
    await client.close()


async def collect(stream: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(stream):
        return [event async for event in stream]


async def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return condition()


# ---- results ---------------------------------------------------------------------------------------------


async def test_generate_streams_every_event(decode: DecodeService, decode_client: GrpcDecodeClient) -> None:
    events = await collect(decode_client.generate(generate_request(), timeout_s=WAIT_S))
    assert events == [
        TicketIssued(ticket=TICKET),
        *[TokenGenerated(token=TOKEN)] * 3,
        GenerationFinished(finish_reason="length", num_tokens=3, cache_bytes=7),
    ]
    assert decode.request_ids == ["request-1"]
    assert await decode_client.status(timeout_s=WAIT_S) == STATUS
    await decode_client.finish("r-7", timeout_s=WAIT_S)
    assert decode.finished == ["r-7"]


async def test_prefill_answers_every_call(prefill: PrefillService, prefill_client: GrpcPrefillClient) -> None:
    first, done = await collect(prefill_client.prefill(PREFILL_REQUEST, timeout_s=WAIT_S))
    assert isinstance(first, FirstToken)
    assert first.token == TOKEN
    assert done == TransferDone(bytes_by_kind={"rows": 2**33, "index": 0}, transfer_s=0.5)
    commit = CommitTurnRequest(request_id="r", session=SESSION, token_ids=(1, 2))
    assert await prefill_client.commit_turn(commit, timeout_s=WAIT_S) == HistoryInfo(
        num_tokens=2, size_bytes=2**40
    )
    assert await prefill_client.session_info(SESSION, timeout_s=WAIT_S) == HistoryInfo(
        num_tokens=0, size_bytes=0, tier="none"
    )
    await prefill_client.abort_turn("r-9", timeout_s=WAIT_S)
    assert prefill.asked == [PREFILL_REQUEST, commit, SESSION, "r-9"]


async def test_many_calls_share_a_client(decode_client: GrpcDecodeClient) -> None:
    calls = [
        collect(decode_client.generate(generate_request(f"r{n}", max_tokens=n + 1), timeout_s=WAIT_S))
        for n in range(20)
    ]
    assert [len(events) for events in await asyncio.gather(*calls)] == [n + 3 for n in range(20)]


async def test_a_long_prompt_passes(decode_client: GrpcDecodeClient) -> None:
    request = GenerateRequest(
        request_id="long",
        model_fingerprint="f",
        prompt_token_ids=tuple(range(1_000_000)),
        plan=PLAN,
        sampling=SamplingParams(max_tokens=1),
    )
    assert len(await collect(decode_client.generate(request, timeout_s=WAIT_S))) == 3


async def test_generated_stubs_of_another_client_are_served(server: ControlServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = control_pb2_grpc.DecodeStub(channel)
        status = await stub.Status(control_pb2.StatusRequest(), timeout=WAIT_S)
        assert (status.role, status.model.name) == (control_pb2.ROLE_DECODE, "demo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(control_pb2.GenerateRequest(), timeout=WAIT_S).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.value.trailing_metadata())["kvferry-error-class"] == "InvalidRequest"


# ---- errors ----------------------------------------------------------------------------------------------

KINDS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KvferryError)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fail_at_end", [True, False])
async def test_every_error_class_arrives_as_itself(
    decode: DecodeService, decode_client: GrpcDecodeClient, kind: type[KvferryError], fail_at_end: bool
) -> None:
    decode.error = kind("väl is 3; 1 is allowed", param="a.b", reason="some_reason", retry_after_s=1.5)
    decode.fail_at_end = fail_at_end
    for call in (
        lambda: collect(decode_client.generate(generate_request(), timeout_s=WAIT_S)),
        lambda: decode_client.status(timeout_s=WAIT_S),
    ):
        with pytest.raises(kind) as raised:
            await call()
        assert type(raised.value) is kind
        assert raised.value.message == "väl is 3; 1 is allowed"
        assert raised.value.param == "a.b"
        assert raised.value.reason == "some_reason"
        assert raised.value.retry_after_s == 1.5


async def test_an_unexpected_exception_is_internal_and_logged_once_with_its_request(
    decode: DecodeService, decode_client: GrpcDecodeClient
) -> None:
    decode.error = ZeroDivisionError("secret detail")
    with capture_logs(processors=[merge_contextvars]) as logs, pytest.raises(KvferryError) as raised:
        await collect(decode_client.generate(generate_request("r-42"), timeout_s=WAIT_S))
    assert type(raised.value) is KvferryError
    assert "secret" not in raised.value.message
    assert [(entry["event"], entry["request_id"]) for entry in logs] == [("control call failed", "r-42")]


async def test_an_error_of_a_unary_call_keeps_its_param(prefill_client: GrpcPrefillClient) -> None:
    with pytest.raises(SessionNotFound, match="session 's' is not known") as raised:
        await prefill_client.drop_session(SESSION, timeout_s=WAIT_S)
    assert raised.value.param == "id"


async def test_a_message_beyond_the_limit_is_too_large(decode: DecodeService) -> None:
    server = await serve_control(listen="127.0.0.1:0", decode=decode, max_message_bytes=1000)
    client = GrpcDecodeClient(server.address)
    try:
        request = generate_request("r" * 2000)
        with pytest.raises(PayloadTooLarge):
            await collect(client.generate(request, timeout_s=WAIT_S))
    finally:
        await client.close()
        await server.close(0.0)


async def test_a_request_that_cannot_be_encoded_never_leaves(decode_client: GrpcDecodeClient) -> None:
    with pytest.raises(InvalidRequest):
        await collect(decode_client.generate(generate_request(max_tokens=-1), timeout_s=WAIT_S))


async def test_the_wrong_role_is_a_configuration_error(decode: DecodeService) -> None:
    server = await serve_control(listen="127.0.0.1:0", decode=decode)
    client = GrpcPrefillClient(server.address)
    try:
        with pytest.raises(ConfigurationError, match="UNIMPLEMENTED"):
            await client.status(timeout_s=WAIT_S)
    finally:
        await client.close()
        await server.close(0.0)


async def test_an_address_in_use_is_a_configuration_error(
    server: ControlServer, decode: DecodeService
) -> None:
    with pytest.raises(ConfigurationError, match="cannot listen for control calls"):
        await serve_control(listen=server.address, decode=decode)


# ---- deadlines and cancellation --------------------------------------------------------------------------


async def test_a_passed_deadline_is_named_and_frees_the_service(
    decode: DecodeService, decode_client: GrpcDecodeClient
) -> None:
    decode.gap_s = 60.0
    await decode_client.status(timeout_s=WAIT_S)  # connected, so the deadline is spent in the service
    with pytest.raises(DeadlineExceeded):
        await collect(decode_client.generate(generate_request(), timeout_s=2.0))
    assert 0.0 < decode.timeout_s < 2.1  # gRPC rounds a timeout up on the wire by some milliseconds
    assert await eventually(lambda: len(decode.closed) == 1)


async def test_a_deadline_of_a_unary_call_holds(prefill_client: GrpcPrefillClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await prefill_client.status(timeout_s=0.3)


@pytest.mark.parametrize("gap_s", [0.001, 60.0])
async def test_closing_the_stream_reaches_the_service_within_a_second(
    decode: DecodeService, decode_client: GrpcDecodeClient, gap_s: float
) -> None:
    decode.gap_s = gap_s
    stream = decode_client.generate(generate_request(max_tokens=0), timeout_s=WAIT_S)
    assert isinstance(await anext(stream), TicketIssued)
    closed_at = time.monotonic()
    await stream.aclose()
    assert await eventually(lambda: len(decode.closed) == 1)
    assert decode.closed[0] - closed_at < 1.0


async def test_cancelling_the_reading_task_reaches_the_service_within_a_second(
    decode: DecodeService, decode_client: GrpcDecodeClient
) -> None:
    decode.gap_s = 60.0
    reader = asyncio.create_task(collect(decode_client.generate(generate_request(), timeout_s=WAIT_S)))
    assert await eventually(lambda: len(decode.request_ids) == 1)
    cancelled_at = time.monotonic()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await eventually(lambda: len(decode.closed) == 1)
    assert decode.closed[0] - cancelled_at < 1.0


async def test_a_client_that_reads_too_slowly_is_cancelled_all_the_same(
    decode: DecodeService, decode_client: GrpcDecodeClient
) -> None:
    stream = decode_client.generate(generate_request(max_tokens=0), timeout_s=WAIT_S)
    await anext(stream)
    await asyncio.sleep(0.3)
    await stream.aclose()
    assert await eventually(lambda: len(decode.closed) == 1)


# ---- a worker's end --------------------------------------------------------------------------------------


async def test_nobody_listening_is_worker_unavailable() -> None:
    client = GrpcDecodeClient("127.0.0.1:1")
    try:
        with pytest.raises(WorkerUnavailable):
            await client.status(timeout_s=WAIT_S)
        with pytest.raises(WorkerUnavailable):
            await collect(client.generate(generate_request(), timeout_s=WAIT_S))
    finally:
        await client.close()


async def test_closing_lets_calls_finish_within_the_grace(decode: DecodeService) -> None:
    server = await serve_control(listen="127.0.0.1:0", decode=decode)
    client = GrpcDecodeClient(server.address)
    decode.gap_s = 0.2
    try:
        reader = asyncio.create_task(collect(client.generate(generate_request(), timeout_s=WAIT_S)))
        assert await eventually(lambda: len(decode.request_ids) == 1)
        await server.close(WAIT_S)
        assert len(await reader) == 5
    finally:
        await client.close()


async def test_closing_cancels_calls_after_the_grace(decode: DecodeService) -> None:
    server = await serve_control(listen="127.0.0.1:0", decode=decode)
    client = GrpcDecodeClient(server.address)
    decode.gap_s = 60.0
    try:
        reader = asyncio.create_task(collect(client.generate(generate_request(), timeout_s=WAIT_S)))
        assert await eventually(lambda: len(decode.request_ids) == 1)
        await server.close(0.1)
        with pytest.raises((WorkerUnavailable, Cancelled)):
            await reader
        assert await eventually(lambda: len(decode.closed) == 1)
    finally:
        await client.close()


WORKER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
import test_calls

async def main():
    service = test_calls.DecodeService()
    service.gap_s = 60.0
    server = await test_calls.serve_control(listen="127.0.0.1:0", decode=service)
    sys.stdout.write(server.address + "\\n")
    sys.stdout.flush()
    await asyncio.sleep(120)

asyncio.run(main())
"""


async def test_a_killed_worker_is_worker_unavailable() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, os.path.dirname(__file__)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    try:
        assert process.stdout is not None
        address = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60.0)
        client = GrpcDecodeClient(address.strip())
        stream = client.generate(generate_request(), timeout_s=60.0)
        assert isinstance(await anext(stream), TicketIssued)
        process.kill()
        with pytest.raises(WorkerUnavailable):
            await anext(stream)
        await client.close()
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


# ---- health and reflection -------------------------------------------------------------------------------


async def test_health_answers_and_turns_while_closing(decode: DecodeService) -> None:
    server = await serve_control(listen="127.0.0.1:0", decode=decode)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvferry.control.v1.Decode"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=WAIT_S)
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
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=WAIT_S)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert names >= {"kvferry.control.v1.Decode", "kvferry.control.v1.Prefill", "grpc.health.v1.Health"}
    assert b"GenerateRequest" in answers[1].file_descriptor_response.file_descriptor_proto[0]
