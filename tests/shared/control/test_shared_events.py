"""The tokens of one step travel in one message, and every call still gets its own events, errors and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import kvtest.control as kit
import pytest
from kvtest.waiting import eventually

from kvferry.shared.control import codec
from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.event_streams import UNKNOWN_S
from kvferry.shared.control.messages import (
    EventsOfCalls,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryReturned,
    TicketIssued,
    TokenGenerated,
    TransferAccepted,
    WorkerStatus,
)
from kvferry.shared.control.server import ControlServer, serve_control
from kvferry.shared.errors import InvalidRequest, KvferryError, TransferFailed, WorkerUnavailable

NUM_CALLS, NUM_TOKENS = 16, 40


class Engine:
    """Gives every running call a token at each step, all of them at once, as decode does.

    Attributes: wanted: calls without which there is no step.
    """

    def __init__(self) -> None:
        self.step_s = 0.01
        self.wanted = 0
        self.running: dict[str, asyncio.Queue[GenerateEvent]] = {}
        self.failing: dict[str, KvferryError] = {}
        self.closed: list[str] = []
        self._steps = asyncio.create_task(self._run())

    async def _run(self) -> None:
        index = 0
        while True:
            await asyncio.sleep(self.step_s)
            if len(self.running) < self.wanted:
                continue
            index += 1
            for number, queue in enumerate(self.running.values()):
                token = replace(kit.TOKEN, token_id=number + 1, index=index)
                queue.put_nowait(TokenGenerated(token=token))

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        queue: asyncio.Queue[GenerateEvent] = asyncio.Queue()
        try:
            yield TicketIssued(ticket=kit.TICKET)
            yield TransferAccepted(transfer_s=0.1)
            self.running[request.request_id] = queue
            for _ in range(request.sampling.max_tokens):
                yield await queue.get()
            del self.running[request.request_id]
            if request.request_id in self.failing:
                raise self.failing[request.request_id]
            yield GenerationFinished(finish_reason="length", num_tokens=7, cache_bytes=7)
            await asyncio.sleep(self.step_s)
            yield HistoryReturned(num_tokens=9)
        finally:
            self.running.pop(request.request_id, None)
            self.closed.append(request.request_id)

    async def finish(self, request_id: str, *, timeout_s: float) -> None: ...

    async def drop_session(self, session: Any, *, timeout_s: float) -> Any: ...

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        return kit.STATUS

    def stop(self) -> None:
        self._steps.cancel()


class Counting(GrpcDecodeClient):
    """Counts what comes by the stream that calls share."""

    num_messages = num_events = 0

    async def _shared_events(self, stream_id: str) -> AsyncGenerator[EventsOfCalls, None]:
        async with aclosing(super()._shared_events(stream_id)) as messages:
            async for message in messages:
                self.num_messages += 1
                self.num_events += len(message.events)
                yield message


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    engine.stop()


@pytest.fixture
async def worker(engine: Engine) -> AsyncIterator[ControlServer]:
    server = await serve_control(listen="127.0.0.1:0", decode=engine)
    yield server
    await server.close(0.0)


@pytest.fixture
async def client(worker: ControlServer) -> AsyncIterator[Counting]:
    client = Counting(worker.address)
    yield client
    await client.close()


async def opened(client: GrpcDecodeClient) -> None:
    """Has the client open the stream: its first call does, and uses its own."""
    await ask(client, "first", 1)
    await eventually(lambda: bool(client._events.stream_id))


async def ask(client: GrpcDecodeClient, request_id: str, max_tokens: int = NUM_TOKENS) -> list[Any]:
    request = kit.generate_request(request_id, max_tokens)
    return await kit.collect(client.generate(request, timeout_s=kit.WAIT_S))


def kinds(num_tokens: int) -> list[type]:
    return [
        TicketIssued,
        TransferAccepted,
        *[TokenGenerated] * num_tokens,
        GenerationFinished,
        HistoryReturned,
    ]


async def test_the_tokens_of_a_step_are_one_message_and_every_call_has_its_own(
    client: Counting, engine: Engine
) -> None:
    await opened(client)
    engine.wanted = NUM_CALLS
    before = client.num_messages
    answers = await asyncio.gather(*(ask(client, f"call-{i}") for i in range(NUM_CALLS)))
    for events in answers:
        assert [type(event) for event in events] == kinds(NUM_TOKENS)
        tokens = [event.token for event in events if isinstance(event, TokenGenerated)]
        indexes = [token.index for token in tokens]
        assert indexes == list(range(indexes[0], indexes[0] + NUM_TOKENS))
    # a message a step, some more where calls begin and end
    assert client.num_events == NUM_CALLS * (NUM_TOKENS + 2)
    assert client.num_messages - before < 3 * NUM_TOKENS
    assert client._events._queues == {}


async def test_a_call_s_error_is_raised_after_its_tokens_and_others_go_on(
    client: Counting, engine: Engine
) -> None:
    await opened(client)
    engine.failing["fails"] = TransferFailed("the reason", reason="of_the_test")
    other = asyncio.create_task(ask(client, "other"))
    seen: list[Any] = []

    async def read() -> None:
        async for event in client.generate(kit.generate_request("fails", 5), timeout_s=kit.WAIT_S):
            seen.append(event)

    with pytest.raises(TransferFailed, match="the reason") as raised:
        await read()
    assert raised.value.reason == "of_the_test"
    assert [type(event) for event in seen] == kinds(5)[:-2]
    assert len(await other) == len(kinds(NUM_TOKENS))


async def test_closing_a_call_ends_it_at_the_worker_and_no_other(client: Counting, engine: Engine) -> None:
    await opened(client)
    other = asyncio.create_task(ask(client, "other"))
    stream = client.generate(kit.generate_request("left", 10_000), timeout_s=kit.WAIT_S)
    async for event in stream:
        if isinstance(event, TokenGenerated):
            break
    await stream.aclose()
    await eventually(lambda: "left" in engine.closed)
    assert len(await other) == len(kinds(NUM_TOKENS))
    assert client._events._queues == {}


async def test_a_lost_stream_fails_its_calls_and_later_ones_go_on(client: Counting, engine: Engine) -> None:
    await opened(client)
    reading = asyncio.create_task(ask(client, "lost", 10_000))
    await eventually(lambda: "lost" in engine.running)
    before = client.num_events
    await eventually(lambda: client.num_events > before + 3)
    reader = client._events._reader
    assert reader is not None
    reader.cancel()
    with pytest.raises(WorkerUnavailable) as raised:
        await reading
    assert raised.value.reason == "events"
    await eventually(lambda: "lost" in engine.closed)
    assert len(await ask(client, "again")) == len(kinds(NUM_TOKENS))


async def test_a_worker_that_is_gone_fails_every_call(
    client: Counting, worker: ControlServer, engine: Engine
) -> None:
    await opened(client)
    calls = [asyncio.create_task(ask(client, f"call-{i}", 10_000)) for i in range(3)]
    await eventually(lambda: len(engine.running) == 3)
    before = client.num_events
    await eventually(lambda: client.num_events > before + 9)
    await worker.close(0.0)
    for call in calls:
        with pytest.raises(KvferryError):
            await asyncio.wait_for(call, kit.WAIT_S)


async def test_a_worker_ends_when_its_last_call_has_and_not_later(
    client: Counting, worker: ControlServer, engine: Engine
) -> None:
    await opened(client)
    call = asyncio.create_task(ask(client, "last"))
    await eventually(lambda: "last" in engine.running)
    await asyncio.wait_for(worker.close(10 * kit.WAIT_S), kit.WAIT_S)
    assert len(await call) == len(kinds(NUM_TOKENS))


async def test_without_the_method_calls_use_their_own_streams(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a worker of the release before."""
    methods = {name: method for name, method in codec.DECODE.methods.items() if name != "Events"}
    with monkeypatch.context() as patch:
        patch.setattr(codec, "DECODE", replace(codec.DECODE, methods=methods))
        server = await serve_control(listen="127.0.0.1:0", decode=engine)
    client = Counting(server.address)
    try:
        for number in range(3):
            assert len(await ask(client, f"call-{number}")) == len(kinds(NUM_TOKENS))
        assert client._events.stream_id == ""
        assert client._events._patience_s == UNKNOWN_S
        assert client.num_messages == 0
    finally:
        await client.close()
        await server.close(0.0)


async def test_the_id_of_an_open_stream_is_refused(client: Counting) -> None:
    await opened(client)
    again = GrpcDecodeClient._shared_events(client, client._events.stream_id)
    with pytest.raises(InvalidRequest, match="stream_id"), suppress(StopAsyncIteration):
        await anext(again)


async def test_a_stream_that_nobody_opened_is_not_used(client: Counting) -> None:
    client._events.stream_id = "unknown"
    client._events._next_try_s = float("inf")
    assert [type(event) for event in await ask(client, "own", 3)] == kinds(3)
    assert client.num_messages == 0
