"""Clients against a serving worker over real sockets: every call's results."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import kvtest.control as kit
import pytest

from kvferry.proto import control_pb2, control_pb2_grpc
from kvferry.shared.control import server as server_module
from kvferry.shared.control.client import GrpcDecodeClient, GrpcPrefillClient
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    FirstToken,
    GenerateRequest,
    GenerationFinished,
    HistoryInfo,
    PrefixRequest,
    TicketIssued,
    TokenGenerated,
    TransferDone,
)
from kvferry.shared.control.server import ControlServer, serve_control
from kvferry.shared.errors import WorkerUnavailable
from kvferry.shared.process.version import VERSION
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.trust.certs import Certs
from kvferry.tools.certs import make_certs


async def test_generate_streams_every_event(decode: Any, decode_client: GrpcDecodeClient) -> None:
    events = await kit.collect(decode_client.generate(kit.generate_request(), timeout_s=kit.WAIT_S))
    assert events == [
        TicketIssued(ticket=kit.TICKET),
        *[TokenGenerated(token=kit.TOKEN)] * 3,
        GenerationFinished(finish_reason="length", num_tokens=3, cache_bytes=7),
    ]
    assert decode.request_ids == ["request-1"]
    assert await decode_client.status(timeout_s=kit.WAIT_S) == kit.STATUS
    await decode_client.finish("r-7", timeout_s=kit.WAIT_S)
    assert decode.finished == ["r-7"]


async def test_prefill_answers_every_call(prefill: Any, prefill_client: GrpcPrefillClient) -> None:
    first, later, done = await kit.collect(prefill_client.prefill(kit.PREFILL_REQUEST, timeout_s=kit.WAIT_S))
    assert isinstance(first, FirstToken)
    assert first.token == kit.TOKEN
    assert later == TokenGenerated(token=replace(kit.TOKEN, index=2))
    assert done == TransferDone(
        bytes_by_kind={"rows": 2**33, "index": 0},
        transfer_s=0.5,
        prefill_s=0.5,
        compress_s=0.25,
        retained_fractions=(0.0, 0.5, 1.0),
    )
    commit = CommitTurnRequest(request_id="r", session=kit.SESSION, token_ids=(1, 2))
    assert await prefill_client.commit_turn(commit, timeout_s=kit.WAIT_S) == HistoryInfo(
        num_tokens=2, size_bytes=2**40
    )
    assert await prefill_client.session_info(kit.SESSION, timeout_s=kit.WAIT_S) == HistoryInfo(
        num_tokens=0, size_bytes=0, tier="none"
    )
    asked = PrefixRequest(owner="key", block_hashes=(-(2**63), 2**63 - 1))
    assert (await prefill_client.prefix_info(asked, timeout_s=kit.WAIT_S)).num_tokens == 64
    await prefill_client.abort_turn("r-9", timeout_s=kit.WAIT_S)
    assert prefill.asked == [kit.PREFILL_REQUEST, commit, kit.SESSION, asked, "r-9"]


async def test_many_calls_share_a_client(decode_client: GrpcDecodeClient) -> None:
    calls = [
        kit.collect(
            decode_client.generate(kit.generate_request(f"r{n}", max_tokens=n + 1), timeout_s=kit.WAIT_S)
        )
        for n in range(20)
    ]
    assert [len(events) for events in await asyncio.gather(*calls)] == [n + 3 for n in range(20)]


async def test_a_long_prompt_passes(decode_client: GrpcDecodeClient) -> None:
    request = GenerateRequest(
        request_id="long",
        model_fingerprint="f",
        prompt_token_ids=tuple(range(1_000_000)),
        plan=kit.PLAN,
        sampling=SamplingParams(max_tokens=1),
    )
    assert len(await kit.collect(decode_client.generate(request, timeout_s=kit.WAIT_S))) == 3


async def test_generated_stubs_of_another_client_are_served(server: ControlServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = control_pb2_grpc.DecodeStub(channel)
        status = await stub.Status(control_pb2.StatusRequest(), timeout=kit.WAIT_S)
        assert (status.role, status.model.name) == (control_pb2.ROLE_DECODE, "demo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(control_pb2.GenerateRequest(), timeout=kit.WAIT_S).read()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(refused.value.trailing_metadata())["kvferry-error-class"] == "Overloaded"
    assert refused.value.details() == f"in kvferry {VERSION}, GenerateRequest has no plan; it is required"


@pytest.mark.parametrize("encrypted", [False, True])
async def test_connections_that_never_begin_are_closed_while_a_client_is_answered(
    decode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    beginnings = itertools.cycle((b"", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
    make_certs(tmp_path, days=2, everything=False)
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 1.0)
    certs = (Certs(str(tmp_path), "decode"), Certs(str(tmp_path), "router")) if encrypted else (None, None)
    server = await serve_control(listen="127.0.0.1:0", decode=kit.as_decode(decode), certs=certs[0])
    client = GrpcDecodeClient(server.address, certs=certs[1])
    silent = [await asyncio.open_connection(*server.address.split(":")) for _ in range(100)]

    async def end_of(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()

    async def answered() -> None:
        async with asyncio.timeout(kit.WAIT_S):
            while True:
                with contextlib.suppress(WorkerUnavailable):  # a busy machine may need more than the limit
                    assert await client.status(timeout_s=kit.WAIT_S) == kit.STATUS
                    return

    try:
        for _, writer in silent:
            writer.write(next(beginnings))
        await answered()
        async with asyncio.timeout(kit.WAIT_S):
            await asyncio.gather(*(end_of(reader) for reader, _ in silent))
        await answered()
    finally:
        for _, writer in silent:
            writer.close()
        await client.close()
        await server.close(0.0)
