"""What fails a call reaches its other end: errors, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import kvtest.control as kit
import pytest
from kvtest.waiting import eventually
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from kvferry.shared import errors
from kvferry.shared.control import client as client_module
from kvferry.shared.control.client import GrpcDecodeClient, GrpcPrefillClient
from kvferry.shared.control.codec import DECODE
from kvferry.shared.control.messages import TicketIssued
from kvferry.shared.control.seal import SEALED_KEY, Seal
from kvferry.shared.control.server import ControlServer, serve_control
from kvferry.shared.errors import (
    ConfigurationError,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    PayloadTooLarge,
    SessionNotFound,
    WorkerUnavailable,
)

LONG_S = 1000.0
"""Longer than a test may take."""

# ---- errors ----------------------------------------------------------------------------------------------

KINDS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KvferryError)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fail_at_end", [True, False])
async def test_every_error_class_arrives_as_itself(
    decode: Any, decode_client: GrpcDecodeClient, kind: type[KvferryError], fail_at_end: bool
) -> None:
    decode.error = kind("väl is 3; 1 is allowed", param="a.b", reason="some_reason", retry_after_s=1.5)
    decode.fail_at_end = fail_at_end
    for call in (
        lambda: kit.collect(decode_client.generate(kit.generate_request(), timeout_s=kit.WAIT_S)),
        lambda: decode_client.status(timeout_s=kit.WAIT_S),
    ):
        with pytest.raises(kind) as raised:
            await call()
        assert type(raised.value) is kind
        assert raised.value.message == "väl is 3; 1 is allowed"
        assert raised.value.param == "a.b"
        assert raised.value.reason == "some_reason"
        assert raised.value.retry_after_s == 1.5


class StuckCall:
    """As a call of gRPC whose timers stand still: no deadline, and its waiter is not cancelled."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._wakes = asyncio.Event()

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> bytes:
        while not self.is_cancelled:
            with contextlib.suppress(asyncio.CancelledError):
                await self._wakes.wait()
        raise asyncio.CancelledError

    def cancel(self) -> None:
        self.is_cancelled = True
        self._wakes.set()

    def done(self) -> bool:
        return self.is_cancelled


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_call_that_grpc_does_not_end_is_given_up(
    decode_client: GrpcDecodeClient, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    call = StuckCall()
    monkeypatch.setattr(decode_client._channel, "unary_unary", lambda *_: lambda *_, **__: call)
    if is_cancelled:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await decode_client.status(timeout_s=LONG_S)
    else:
        with pytest.raises(WorkerUnavailable, match=r"did not answer a call within 0\.2 s") as raised:
            await decode_client.status(timeout_s=0.2)
        assert raised.value.reason == "silent"
    assert call.is_cancelled


async def test_an_unexpected_exception_is_internal_and_logged_once_with_its_request(
    decode: Any, decode_client: GrpcDecodeClient
) -> None:
    decode.error = ZeroDivisionError("secret detail")
    with capture_logs(processors=[merge_contextvars]) as logs, pytest.raises(KvferryError) as raised:
        await kit.collect(decode_client.generate(kit.generate_request("r-42"), timeout_s=kit.WAIT_S))
    assert type(raised.value) is KvferryError
    assert "secret" not in raised.value.message
    assert [(entry["event"], entry["request_id"]) for entry in logs] == [("control call failed", "r-42")]


async def test_an_error_of_a_unary_call_keeps_its_param(prefill_client: GrpcPrefillClient) -> None:
    with pytest.raises(SessionNotFound, match="session 's' is not known") as raised:
        await prefill_client.drop_session(kit.SESSION, timeout_s=kit.WAIT_S)
    assert raised.value.param == "id"


async def test_a_message_beyond_the_limit_is_too_large(
    decode_client: GrpcDecodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(PayloadTooLarge):
        await kit.collect(decode_client.generate(kit.generate_request("r" * 2000), timeout_s=kit.WAIT_S))


async def test_a_request_that_cannot_be_encoded_never_leaves(decode_client: GrpcDecodeClient) -> None:
    with pytest.raises(InvalidRequest):
        await kit.collect(decode_client.generate(kit.generate_request(max_tokens=-1), timeout_s=kit.WAIT_S))


async def test_the_wrong_role_is_no_worker(decode: Any) -> None:
    server = await serve_control(listen="127.0.0.1:0", decode=decode)
    client = GrpcPrefillClient(server.address)
    try:
        with pytest.raises(WorkerUnavailable, match="UNIMPLEMENTED"):
            await client.status(timeout_s=kit.WAIT_S)
    finally:
        await client.close()
        await server.close(0.0)


async def test_an_address_in_use_is_a_configuration_error(server: ControlServer, decode: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot listen for control calls"):
        await serve_control(listen=server.address, decode=decode)


# ---- deadlines and cancellation --------------------------------------------------------------------------


async def test_a_passed_deadline_is_named_and_frees_the_service(
    decode: Any, decode_client: GrpcDecodeClient
) -> None:
    decode.gap_s = 60.0
    await decode_client.status(timeout_s=kit.WAIT_S)  # connected, so the deadline is spent in the service
    with pytest.raises(DeadlineExceeded):
        await kit.collect(decode_client.generate(kit.generate_request(), timeout_s=2.0))
    assert 0.0 < decode.timeout_s < 2.1  # gRPC rounds a timeout up on the wire by some milliseconds
    await eventually(lambda: decode.num_closed == 1)


async def test_a_deadline_of_a_unary_call_holds(prefill_client: GrpcPrefillClient) -> None:
    await prefill_client.session_info(kit.SESSION, timeout_s=kit.WAIT_S)  # connected
    with pytest.raises(DeadlineExceeded):
        await prefill_client.status(timeout_s=0.3)


@pytest.mark.parametrize("gap_s", [0.001, LONG_S])
async def test_closing_the_stream_reaches_the_service_before_the_deadline(
    decode: Any, decode_client: GrpcDecodeClient, gap_s: float
) -> None:
    decode.gap_s = gap_s
    stream = decode_client.generate(kit.generate_request(max_tokens=0), timeout_s=LONG_S)
    assert isinstance(await anext(stream), TicketIssued)
    await stream.aclose()
    await eventually(lambda: decode.num_closed == 1)


async def test_cancelling_the_reading_task_reaches_the_service_before_the_deadline(
    decode: Any, decode_client: GrpcDecodeClient
) -> None:
    decode.gap_s = LONG_S
    reader = asyncio.create_task(
        kit.collect(decode_client.generate(kit.generate_request(), timeout_s=LONG_S))
    )
    await eventually(lambda: len(decode.request_ids) == 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await eventually(lambda: decode.num_closed == 1)


async def test_a_client_that_reads_too_slowly_is_cancelled_all_the_same(
    decode: Any, decode_client: GrpcDecodeClient
) -> None:
    stream = decode_client.generate(kit.generate_request(max_tokens=0), timeout_s=LONG_S)
    await anext(stream)
    await eventually(lambda: decode.num_tokens > 1000)
    assert decode.num_closed == 0
    await stream.aclose()
    await eventually(lambda: decode.num_closed == 1)


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_a_service_that_answers_a_caller_which_has_left_is_no_error(
    decode: Any, server: ControlServer, is_sealed: bool
) -> None:
    decode.gap_s, decode.answers_when_cancelled = 60.0, True
    method = DECODE.methods["Generate"]
    request = method.request.encode(kit.generate_request())
    sent = Seal(method.path, "id").close(request) if is_sealed else request
    with capture_logs() as logs:
        async with grpc.aio.insecure_channel(server.address) as channel:
            metadata = ((SEALED_KEY, "id"),) if is_sealed else ()
            call = channel.unary_stream(method.path)(sent, metadata=metadata)
            assert await call.read()
            call.cancel()
            await eventually(lambda: decode.num_closed == 1)
    assert [entry for entry in logs if entry["log_level"] == "error"] == []
