"""A worker's services on a real socket, their clients, and the messages that they exchange."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from structlog.contextvars import get_contextvars

from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, ResolvedPlan
from kvferry.shared.control.calls import DecodeControl, PrefillControl
from kvferry.shared.control.client import GrpcDecodeClient, GrpcPrefillClient
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    FirstToken,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryInfo,
    PrefillEvent,
    PrefillRequest,
    PrefixRequest,
    RedirectRequest,
    SessionKey,
    Ticket,
    TicketIssued,
    TokenGenerated,
    TransferDone,
    WorkerStatus,
)
from kvferry.shared.control.server import ControlServer, serve_control
from kvferry.shared.errors import SessionNotFound, TransferFailed
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken, SamplingParams

WAIT_S = 20.0
PLAN = CompressionPlan(method="full")
TICKET = Ticket(
    endpoint="tcp://d:1",
    transfer_id=2**64 - 1,
    generation=3,
    credit_bytes=5,
    lease_s=1.5,
    reserved_bytes=9,
    plan=ResolvedPlan(
        plan=PLAN,
        method="full",
        num_prompt_tokens=3,
        max_new_tokens=3,
        layers=(LayerPlan(rows=3),) * 2,
    ),
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
    sampling=SamplingParams(max_tokens=1),
    ticket=TICKET,
    session=SESSION,
    retained_bins=3,
)


class DecodeService:
    """Yields a ticket, then as many tokens as asked for; 0 tokens means for ever."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.fail_at_end = False
        self.gap_s = 0.0
        self.answers_when_cancelled = False
        self.timeout_s = 0.0
        self.num_tokens = 0
        self.num_closed = 0
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
                try:
                    await asyncio.sleep(self.gap_s)
                except asyncio.CancelledError:
                    if not self.answers_when_cancelled:
                        raise
                yield TokenGenerated(token=TOKEN)
                index += 1
                self.num_tokens += 1
            if self.error is not None:
                raise self.error
            yield GenerationFinished(finish_reason="length", num_tokens=index, cache_bytes=7)
        finally:
            self.num_closed += 1

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
            queue_s=0.125,
        )
        yield TokenGenerated(token=replace(TOKEN, index=TOKEN.index + 1))
        yield TransferDone(
            bytes_by_kind={"rows": 2**33, "index": 0},
            transfer_s=0.5,
            prefill_s=0.5,
            compress_s=0.25,
            retained_fractions=(0.0, 0.5, 1.0),
        )

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo:
        self.asked.append(request)
        return HistoryInfo(num_tokens=len(request.token_ids), size_bytes=2**40)

    async def redirect(self, request: RedirectRequest, *, timeout_s: float) -> None:
        raise TransferFailed("nothing is sent again here", reason="resend")

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        self.asked.append(request_id)

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        self.asked.append(session)
        return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")

    async def prefix_info(self, request: PrefixRequest, *, timeout_s: float) -> HistoryInfo:
        self.asked.append(request)
        return HistoryInfo(num_tokens=32 * len(request.block_hashes), size_bytes=0)

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        raise SessionNotFound(f"session {session.session_id!r} is not known", param="id")

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        await asyncio.sleep(60)
        return STATUS


def as_decode(service: DecodeService) -> DecodeControl:
    return service


def as_prefill(service: PrefillService) -> PrefillControl:
    return service


async def collect(stream: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(stream):
        return [event async for event in stream]


@pytest.fixture
def decode() -> DecodeService:
    return DecodeService()


@pytest.fixture
def prefill() -> PrefillService:
    return PrefillService()


@pytest.fixture
async def server(decode: DecodeService, prefill: PrefillService) -> AsyncIterator[ControlServer]:
    server = await serve_control(
        listen="127.0.0.1:0", decode=as_decode(decode), prefill=as_prefill(prefill), with_reflection=True
    )
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
