"""Turns that lose a worker: the client sees each token once, as if nothing had happened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvtest.router import LAST_INDEX
from kvtest.scripted_workers import failing_at, lost
from kvtest.waiting import eventually

from kvferry.shared.errors import (
    OTHER_RELEASE,
    Cancelled,
    CapacityExceeded,
    HistoryMiss,
    InvalidRequest,
    KvferryError,
    LeaseExpired,
    MalformedMessage,
    Overloaded,
    TransferFailed,
    WorkerUnavailable,
)

BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "the red castle ."}],
    "temperature": 0,
    "max_tokens": 12,
}


async def complete(stack: Any, **fields: Any) -> dict[str, Any]:
    response = await stack.http.post("/v1/chat/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_turn_that_a_draining_worker_refuses_runs_on_another(start_stack: Any, role: str) -> None:
    stack = await start_stack(num_prefill=2, num_decode=2, max_recoveries=0)
    undisturbed = await complete(stack)
    for worker in getattr(stack, role):
        worker.faults = [failing_at(-1 if role == "decode" else 0, WorkerUnavailable.draining(role))]
    workers = getattr(stack, role)
    workers[1].faults = []
    while workers[0].faults:  # until it is chosen
        assert text(await complete(stack)) == text(undisturbed)
    assert stack.metric("recoveries_total", role=role) == 0


UNKNOWN = InvalidRequest("format 'rdkv' was given {'new': 1}; it takes window (int)", param="kv_compression")
"""What a worker of an earlier release says of a parameter that it does not know."""
REFUSALS = {
    "earlier": UNKNOWN,
    "ticket": InvalidRequest("the ticket has no plan; decode sends one with each", param="ticket.plan"),
    "later": Overloaded("in kvferry 9.9, format 'rdkv' does not know new", reason=OTHER_RELEASE),
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("release", REFUSALS)
async def test_a_worker_of_another_release_is_passed_over_and_the_client_not_blamed(
    start_stack: Any, role: str, release: str
) -> None:
    stack = await start_stack(num_prefill=2, num_decode=2, max_recoveries=0)
    undisturbed, refusal = await complete(stack), REFUSALS[release]
    fault = failing_at(-1 if role == "decode" else 0, refusal)
    workers = getattr(stack, role)
    workers[0].faults = [fault]
    while workers[0].faults:  # until it is chosen
        assert text(await complete(stack)) == text(undisturbed)
    assert stack.metric("recoveries_total", role=role) == 0
    for worker in workers:
        worker.faults = [fault]
    response = await stack.http.post("/v1/chat/completions", json=BODY)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (503, "server_error", None)
    assert f"The {role} worker {role}-" in error["message"]
    assert "the two are of different releases" in error["message"]
    assert error["message"].endswith(refusal.message)
    assert text(await complete(stack)) == text(undisturbed)  # none is taken for lost


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_whose_status_is_not_understood_is_named(stack: Any, role: str) -> None:
    (worker,) = getattr(stack, role)
    worker.status_error = WorkerUnavailable("a message of an earlier release", reason="damaged")
    for _ in range(3):  # each poll asks twice
        await worker.asked()
    for path in ("/ready", "/v1/chat/completions"):
        response = await stack.http.request("GET" if path == "/ready" else "POST", path, json=BODY)
        assert response.status_code == 503
        assert f"; of the {role} worker {role}-0: a message of an earlier release" in response.text
    worker.status_error = lost()
    for _ in range(3):  # each poll asks twice
        await worker.asked()
    response = await stack.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 503
    assert "earlier release" not in response.text


async def test_what_the_client_sent_wrongly_is_its_mistake_whatever_the_worker_says(stack: Any) -> None:
    stack.decode[0].faults = [failing_at(-1, UNKNOWN)]
    wanted = {"method": "snapkv", "parameters": {"window": 0}}
    response = await stack.http.post("/v1/chat/completions", json={**BODY, "kv_compression": wanted})
    assert not stack.decode[0].faults
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "kv_compression.window"


async def test_a_refused_turn_ends_where_the_others_speak_another_block_protocol(start_stack: Any) -> None:
    """It went back to the one that had refused it, without end."""
    stack = await start_stack(num_decode=2)
    refusing, other = stack.decode
    other.version += 1
    for _ in range(2):
        await other.asked()
    refusing.faults = [failing_at(-1, CapacityExceeded("the arena is full"))] * 50
    response = await stack.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 429
    assert len(refusing.faults) == 49


async def test_a_turn_runs_and_recovers_on_a_pair_of_one_block_protocol(start_stack: Any) -> None:
    """Two workers of each role are of the next protocol, and one of each of today's."""
    stack = await start_stack(num_prefill=3, num_decode=3)
    undisturbed = await complete(stack)
    for worker in (*stack.prefill[:2], *stack.decode[:2]):
        worker.version += 1
    await asyncio.gather(*(worker.asked() for worker in (*stack.prefill, *stack.decode)))
    for worker in (*stack.prefill, *stack.decode):
        worker.requests.clear()
    for count in (-1, 3, 3, 3, 3):
        for worker in stack.decode:
            worker.faults = [failing_at(count, lost())]
        assert text(await complete(stack)) == text(undisturbed)
    ids = [{request.request_id for worker in workers for request in worker.requests} for workers in (
        stack.prefill[:2], stack.prefill[2:], stack.decode[:2], stack.decode[2:],
    )]  # fmt: skip
    assert ids[0]
    assert not ids[0] & ids[3]
    assert not ids[1] & ids[2]


@pytest.mark.covering(2)
@pytest.mark.parametrize("count", [-1, 1, 2, 7, 11])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("method", ["full", "rdkv"])
async def test_lost_decode_worker_is_replayed_token_for_token(
    stack: Any, count: int, temperature: int, method: str
) -> None:
    fields = {
        "temperature": temperature,
        "seed": 5,
        "logprobs": True,
        "kv_compression": {"method": method},
    }
    undisturbed = await complete(stack, **fields)
    stack.decode[0].faults = [failing_at(count, lost())]
    replayed = await complete(stack, **fields)
    assert replayed["choices"] == undisturbed["choices"]
    assert replayed["usage"] == undisturbed["usage"]
    assert stack.metric("recoveries_total", role="decode") == 1
    first, second = stack.decode[0].requests[1:]
    delivered = max(count, 0)
    if method == "full":
        assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
        assert len(second.prompt_token_ids) == len(first.prompt_token_ids) + delivered
        assert second.sampling.first_index == delivered
        assert second.sampling.max_tokens == 12 - delivered
    else:  # prefill would compute other KV for the delivered tokens than decode
        assert second.prompt_token_ids == first.prompt_token_ids
        assert len(second.sampling.delivered) == delivered
        assert second.sampling.max_tokens == 12
    assert second.sampling.seed == 5
    assert second.request_id != first.request_id


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "error",
    [
        lost(),
        TransferFailed("cut"),
        LeaseExpired("late"),
        HistoryMiss("gone"),
        Cancelled("stopping"),
        MalformedMessage("spoilt", reason="malformed"),
    ],
)
@pytest.mark.parametrize("count", [0, 1])
async def test_lost_prefill_worker_is_replayed(stack: Any, error: KvferryError, count: int) -> None:
    undisturbed = await complete(stack)
    stack.prefill[0].faults = [failing_at(count, error)]
    replayed = await complete(stack)
    assert text(replayed) == text(undisturbed)
    assert replayed["usage"] == undisturbed["usage"]
    reused = stack.prefill[0].requests[-1].max_reused_tokens
    if isinstance(error, HistoryMiss):
        assert reused == 0  # it does not look for the lost history again
    else:
        assert reused in (None, 0)


async def test_stream_goes_on_where_it_was(stack: Any) -> None:
    undisturbed = await complete(stack)
    stack.decode[0].faults = [failing_at(3, lost()), failing_at(4, lost())]
    response = await stack.http.post("/v1/chat/completions", json={**BODY, "stream": True})
    assert response.text.count('"role"') == 1
    assert response.text.endswith("data: [DONE]\n\n")
    deltas = [line for line in response.text.splitlines() if '"content"' in line]
    assert len(deltas) == 13  # the role's chunk and twelve tokens
    assert stack.metric("recoveries_total", role="decode") == 2
    assert stack.metric("generation_tokens_total", model="demo", method="rdkv") == 24
    assert text(undisturbed)


async def test_replay_goes_to_another_worker_where_there_is_one(start_stack: Any) -> None:
    stack = await start_stack(num_decode=2)
    for worker in stack.decode:
        worker.faults = [failing_at(5, lost())]
    first = asyncio.create_task(complete(stack))
    answer = await first
    used = [len(worker.requests) for worker in stack.decode]
    assert sum(used) >= 2
    assert all(number >= 1 for number in used)
    assert answer["usage"]["completion_tokens"] == 12


async def test_replays_are_bounded(start_stack: Any) -> None:
    stack = await start_stack(max_recoveries=2)
    stack.decode[0].faults = [failing_at(1, lost())] * 10
    response = await stack.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["code"] == "overloaded"
    assert len(stack.decode[0].requests) == 3
    assert stack.metric("recoveries_total", role="decode") == 2
    assert stack.metric("request_failure_total", category="worker_lost") == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_prompt_that_is_never_ready_in_time_is_refused_without_the_workers_words(
    start_stack: Any, role: str
) -> None:
    stack = await start_stack(max_recoveries=1)
    late = LeaseExpired("no reservation for transfer 0xbeef exists", reason="lease_expired")
    getattr(stack, role)[0].faults = [failing_at(0, late)] * 2
    response = await stack.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    error = response.json()["error"]
    assert error["code"] == "overloaded"
    assert error["message"] == "The workers did not have the prompt ready in time; repeat the request later"


async def test_replay_waits_for_the_worker_to_come_back(stack: Any) -> None:
    worker = stack.decode[0]

    def die(num_tokens: int) -> None:
        if num_tokens == 4:
            worker.status_error = lost()
            raise lost()

    worker.faults = [die]
    turn = asyncio.create_task(complete(stack))
    await eventually(lambda: stack.metric("recoveries_total", role="decode") == 1)
    for _ in range(3):
        await worker.asked()
    assert not turn.done()
    assert (await stack.http.get("/ready")).status_code == 503
    worker.instance_id, worker.status_error = "restarted", None
    assert (await turn)["usage"]["completion_tokens"] == 12


async def test_no_worker_at_all_is_503_at_once(start_stack: Any) -> None:
    stack = await start_stack()
    stack.decode[0].ready = False
    await stack.decode[0].asked()
    response = await stack.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert (await stack.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("max_tokens", [12, 100])
async def test_worker_lost_after_its_last_token_needs_no_replay(stack: Any, max_tokens: int) -> None:
    # The last token is out, its finish is not: the tokens themselves tell that they are all.
    num_tokens = min(max_tokens, LAST_INDEX + 1)
    undisturbed = await complete(stack, max_tokens=max_tokens)
    decode = stack.decode[0]
    generate = decode.generate

    async def cut(request: Any, *, timeout_s: float) -> Any:
        async for event in generate(request, timeout_s=timeout_s):
            if type(event).__name__ == "GenerationFinished":
                raise lost()
            yield event

    decode.generate = cut
    answer = await complete(stack, max_tokens=max_tokens)
    assert answer["choices"] == undisturbed["choices"]
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert len(decode.requests) == 2


async def test_stop_string_that_spans_the_loss_is_found(stack: Any) -> None:
    words = text(await complete(stack)).split()
    stack.decode[0].faults = [failing_at(7, lost())]
    answer = await complete(stack, stop=f"{words[6]} {words[7]}")
    assert text(answer).split() == words[:6]
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_session_turn_that_was_replayed_is_committed_once(stack: Any) -> None:
    stack.decode[0].faults = [failing_at(5, lost())]
    await complete(stack, session_id="s")
    await eventually(lambda: bool(stack.prefill[0].history))
    assert len(stack.prefill[0].aborted) == 1
    assert stack.prefill[0].staged == {}
    first = stack.prefill[0].requests[0]
    held = next(iter(stack.prefill[0].history.values()))
    assert held[: len(first.prompt_token_ids)] == first.prompt_token_ids
    assert len(held) == len(first.prompt_token_ids) + 11


@pytest.mark.parametrize(("method", "count"), [("rdkv", 5), ("full", 5), ("rdkv", 0)])
async def test_a_lossy_replay_reuses_no_more_than_the_first_attempt(
    stack: Any, method: str, count: int
) -> None:
    """With another number of reused tokens it would select other rows."""
    fields = {"session_id": "s", "session_mode": "append", "kv_compression": {"method": method}}
    first = await complete(stack, **fields)
    stack.decode[0].faults = [failing_at(count or -1, lost())]
    answer = await complete(stack, **fields)
    reused = answer["kv"]["reused_tokens"]
    assert reused >= first["usage"]["prompt_tokens"]
    limits = [request.max_reused_tokens for request in stack.prefill[0].requests]
    # An attempt that failed before its transfer goes on with another decode worker's ticket.
    assert limits[:2] == [None, None]
    assert limits[2:] == ([] if count == 0 else [reused if method == "rdkv" else None])
    assert stack.metric("recoveries_total", role="decode") == 1
