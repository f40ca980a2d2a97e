"""Streams that go wrong or go slowly, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import weakref
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import structlog
from kvtest.scripted_workers import failing_at
from kvtest.waiting import eventually

from kvferry.services.router.http import middleware
from kvferry.services.router.http.middleware import BoundedH11Protocol
from kvferry.shared.errors import (
    CapacityExceeded,
    HistoryMiss,
    Overloaded,
    ProtocolMismatch,
)

BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "the red castle ."}],
    "temperature": 0,
    "max_tokens": 20,
}


KEEP_ALIVE = "(an empty line)"


def events_of(text: str) -> list[str]:
    return [block for block in text.split("\n\n") if block]


async def events_around_silence(
    stack: Any, waits: asyncio.Event, num_silent: int, **fields: Any
) -> list[str]:
    """Return the events of a stream that waits for `waits`, which is set after so many keep-alives."""
    waits.clear()
    events: list[str] = []
    body = {**BODY, "stream": True, **fields}
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            text = piece.decode()
            events += [KEEP_ALIVE] * text.startswith("\n") + events_of(text.lstrip("\n"))
            if events.count(KEEP_ALIVE) == num_silent:
                waits.set()
    return events


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("session", [True, False])
async def test_client_that_leaves_frees_both_workers(stack: Any, stream: bool, session: bool) -> None:
    stack.script.may_decode.clear()  # so that nothing else ends the turn
    extra = {"session_id": "s"} if session else {}
    with structlog.testing.capture_logs() as logs:
        request = asyncio.create_task(
            stack.http.post("/v1/chat/completions", json={**BODY, **extra, "stream": stream})
        )
        await eventually(lambda: stack.metric("generation_tokens_total", model="demo", method="rdkv") == 1)
        assert stack.num_active > 0
        request.cancel()
        await eventually(lambda: stack.num_active == 0)
        await eventually(lambda: any(entry.get("status") == 499 for entry in logs))
    line = next(entry for entry in logs if entry.get("status") == 499)
    assert line["outcome"] == "cancelled"
    assert stack.metric("request_failure_total", category="cancelled") == 1
    assert stack.metric("requests_running", model="demo") == 0
    if session:
        if stream:  # what was delivered is a turn of the session
            await eventually(lambda: len(stack.prefill[0].history) == 1)
        else:
            await eventually(lambda: len(stack.prefill[0].aborted) == 1)
        assert stack.metric("request_success_total", model="demo") == 0
        stack.script.may_decode.set()
        assert (await stack.http.post("/v1/chat/completions", json={**BODY, **extra})).status_code == 200


async def test_a_stream_cut_off_by_its_deadline_is_an_error_and_what_was_delivered_is_kept(
    start_stack: Any,
) -> None:
    stack = await start_stack(request_timeout_s=3.0)
    assert (await stack.http.post("/v1/chat/completions", json=BODY)).status_code == 200
    stack.prefill[0].requests.clear()
    stack.script.token_delay_s = 0.2
    body = {**BODY, "session_id": "s", "stream": True, "max_tokens": 400, "ignore_eos": True}
    reply = await stack.http.post("/v1/chat/completions", json=body)
    *deltas, last = [json.loads(event[6:]) for event in events_of(reply.text)]
    assert last["error"]["message"] == "The request's deadline passed before its completion ended"
    said = "".join(delta["choices"][0]["delta"].get("content", "") for delta in deltas)
    assert said
    await eventually(lambda: len(stack.prefill[0].history) == 1)
    assert stack.num_active == 0
    stack.script.token_delay_s = 0.0
    question = {"role": "user", "content": "and the garden ?"}
    conversation = [*BODY["messages"], {"role": "assistant", "content": said}, question]
    restated = {**BODY, "session_id": "s", "messages": conversation, "session_mode": "replace"}
    next_turn = await stack.http.post("/v1/chat/completions", json=restated)
    assert next_turn.status_code == 200
    # the answer that was delivered is the recorded one, token by token
    held = len(stack.prefill[0].requests[0].prompt_token_ids) + len(deltas) - 2
    assert next_turn.json()["kv"]["reused_tokens"] >= held


async def test_client_that_leaves_while_prefill_runs_frees_both_workers(stack: Any) -> None:
    stack.script.may_prefill.clear()
    request = asyncio.create_task(stack.http.post("/v1/chat/completions", json=BODY))
    await eventually(lambda: len(stack.prefill[0].active) == 1)
    request.cancel()
    await eventually(lambda: stack.num_active == 0)


async def test_one_of_n_failing_ends_all(stack: Any) -> None:
    stack.script.token_delay_s = 0.05
    stack.decode[0].faults = [failing_at(3, ProtocolMismatch("other model"))]
    response = await stack.http.post("/v1/chat/completions", json={**BODY, "n": 3})
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "transfer_failed"
    await eventually(lambda: stack.num_active == 0)


async def test_error_in_mid_stream_is_one_event_without_done(stack: Any) -> None:
    stack.decode[0].faults = [failing_at(4, ProtocolMismatch("decode holds another model"))]
    response = await stack.http.post("/v1/chat/completions", json={**BODY, "stream": True})
    assert response.status_code == 200
    events = events_of(response.text)
    assert json.loads(events[-1].removeprefix("data: ")) == {
        "error": {
            "message": "decode holds another model",
            "type": "server_error",
            "param": None,
            "code": "transfer_failed",
        }
    }
    assert sum('"error"' in event for event in events) == 1
    assert "[DONE]" not in response.text
    assert stack.metric("request_failure_total", category="transfer") == 1
    assert stack.metric("request_success_total", model="demo", finish_reason="length") == 0


async def test_error_in_mid_stream_is_raised_by_the_official_client(stack: Any) -> None:
    stack.decode[0].faults = [failing_at(4, ProtocolMismatch("decode holds another model"))]
    stream = await stack.client.chat.completions.create(**BODY, stream=True)
    with pytest.raises(openai.APIError, match="another model"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("stream", [True, False])
async def test_full_arena_is_429_with_retry_after(stack: Any, stream: bool) -> None:
    refusal = CapacityExceeded("the arena is full", retry_after_s=2.5)
    stack.decode[0].faults = [failing_at(-1, refusal)]
    with pytest.raises(openai.RateLimitError) as refused:
        await stack.client.chat.completions.create(**BODY, stream=stream)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "3"
    assert stack.metric("recoveries_total", role="decode") == 0


async def test_overloaded_prefill_is_503_with_retry_after(stack: Any) -> None:
    stack.prefill[0].faults = [failing_at(0, Overloaded("the queue is full", retry_after_s=4))]
    with pytest.raises(openai.InternalServerError) as refused:
        await stack.client.chat.completions.create(**BODY)
    assert refused.value.status_code == 503
    assert refused.value.code == "overloaded"
    assert refused.value.response.headers["retry-after"] == "4"


async def test_a_caller_that_a_full_queue_has_refused_is_refused_for_a_moment_without_asking_it(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    recent = partial(middleware.RecentRefusals, clock=lambda: now_s)
    monkeypatch.setattr(middleware, "RecentRefusals", recent)
    stack = await start_stack()
    full = CapacityExceeded("64 requests wait", reason="queue_full", retry_after_s=2.5)
    stack.prefill[0].faults = [failing_at(0, full)]

    async def ask(path: str = "/v1/chat/completions", **headers: str) -> Any:
        body = BODY if "chat" in path else {"model": "demo", "prompt": "a b", "max_tokens": 2}
        return await stack.http.post(path, json=body, headers=headers)

    answers = [await ask(), await ask()]
    for answer in answers:
        assert answer.status_code == 429, answer.text
        assert answer.json()["error"]["message"] == "64 requests wait"
        assert answer.headers["retry-after"] == "3"
    other = await ask(Authorization="Bearer another")
    assert other.status_code == 200, other.text
    assert (await ask("/v1/completions")).status_code == 200
    now_s += middleware.REFUSED_S
    assert (await ask()).status_code == 200


def test_refusals_are_forgotten_and_the_request_is_not_kept() -> None:
    now_s = 0.0
    refused = middleware.RecentRefusals(clock=lambda: now_s)

    class Body:
        pass

    bodies: list[weakref.ref[Body]] = []

    def handle() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        raise CapacityExceeded("full", reason="queue_full")

    for number in range(100):
        now_s = float(number)
        with contextlib.suppress(CapacityExceeded), refused.around(str(number), "/v1/completions"):
            handle()
    gc.collect()
    assert not any(body() for body in bodies)
    assert list(refused._refused) == [("99", "/v1/completions")]


async def test_full_worker_is_passed_over_for_another(start_stack: Any) -> None:
    stack = await start_stack(num_decode=2)
    for worker in stack.decode:
        worker.faults = [failing_at(-1, CapacityExceeded("full"))]
    stack.decode[0].faults = []
    for _ in range(4):
        assert (await stack.http.post("/v1/chat/completions", json=BODY)).status_code == 200
    assert stack.metric("recoveries_total", role="decode") == 0


async def test_slow_prefill_is_bridged_by_keep_alives(start_stack: Any) -> None:
    stack = await start_stack(keepalive_s=0.05)
    events = await events_around_silence(stack, stack.script.may_prefill, 2, max_tokens=2)
    assert events[:2] == [KEEP_ALIVE] * 2
    assert events[-1] == "data: [DONE]"


async def test_slow_tokens_are_bridged_by_keep_alives(start_stack: Any) -> None:
    stack = await start_stack(keepalive_s=0.05)
    stack.script.token_delay_s = 0.2
    chunks = [
        chunk
        async for chunk in await stack.client.chat.completions.create(
            **{**BODY, "max_tokens": 3}, stream=True
        )
    ]
    assert chunks[-1].choices[0].finish_reason == "length"
    stack.script.token_delay_s = 0.0
    events = await events_around_silence(stack, stack.script.may_decode, 2, max_tokens=3)
    contents = [at for at, event in enumerate(events) if '"content"' in event]
    assert KEEP_ALIVE in events[contents[1] : contents[-1]]
    assert events[-1] == "data: [DONE]"


async def test_error_after_a_keep_alive_comes_in_the_stream(start_stack: Any) -> None:
    stack = await start_stack(keepalive_s=0.05, max_recoveries=0)
    stack.prefill[0].faults = [failing_at(0, HistoryMiss("gone"))]
    events = await events_around_silence(stack, stack.script.may_prefill, 1)
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "gone"


async def test_one_deadline_bounds_the_whole_turn(start_stack: Any) -> None:
    stack = await start_stack(request_timeout_s=0.3)
    stack.script.may_decode.clear()
    response = await stack.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    await eventually(lambda: stack.num_active == 0)


async def test_client_that_reads_nothing_slows_nobody_and_is_dropped(start_stack: Any) -> None:
    stack = await start_stack(write_timeout_s=1.0, request_timeout_s=240.0)
    stack.script.token_delay_s = 0.01  # so that it still generates when the router's side is full
    wide = {**BODY, "stream": True, "n": 16, "max_tokens": 400, "ignore_eos": True, "logprobs": True}
    body = json.dumps({**wide, "top_logprobs": 20}).encode()
    url = httpx.URL(stack.base_url)
    # A receive window that the kernel may not grow: the router's side fills up after some megabytes at most.
    loop = asyncio.get_running_loop()
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.setblocking(False)
        await loop.sock_connect(idle, (url.host, url.port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        await loop.sock_sendall(idle, head + body)
        await eventually(lambda: len(stack.decode[0].requests) == 16)
        assert (await stack.http.post("/v1/chat/completions", json=BODY)).status_code == 200
        await eventually(
            lambda: stack.metric("request_failure_total", category="cancelled") == 1, within_s=200
        )


async def test_each_token_leaves_at_once(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TCP_NODELAY a connection's second answer waits up to 200 ms for an acknowledgement."""
    set_options: list[int] = []
    connection_made = BoundedH11Protocol.connection_made

    def recorded(self: BoundedH11Protocol, transport: asyncio.Transport) -> None:
        accepted = transport.get_extra_info("socket")
        set_options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        connection_made(self, transport)

    monkeypatch.setattr(BoundedH11Protocol, "connection_made", recorded)
    async with httpx.AsyncClient(base_url=stack.base_url, trust_env=False) as client:
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
    assert set_options
    assert all(set_options)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_chunks_that_have_text_alone_are_as_whole_as_others(stack: Any, path: str) -> None:
    """They are put together from bytes; with `continuous_usage_stats` every chunk is encoded anew."""
    body = {**BODY, "ignore_eos": True, "n": 2}
    if path == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]

    async def chunks(**fields: Any) -> dict[int, list[Any]]:
        answer = await stack.http.post(path, json={**body, "stream": True, **fields})
        found: dict[int, list[Any]] = {0: [], 1: []}
        for event in events_of(answer.text):
            if event != "data: [DONE]":
                chunk = json.loads(event.removeprefix("data: "))
                for choice in chunk.pop("choices"):
                    found[choice["index"]].append((choice, sorted(chunk.keys() - {"usage", "kv"})))
        return found

    plain = await chunks()
    assert len(plain[0]) == len(plain[1]) >= body["max_tokens"]
    whole = {"include_usage": True, "continuous_usage_stats": True}
    assert await chunks(stream_options=whole) == plain
