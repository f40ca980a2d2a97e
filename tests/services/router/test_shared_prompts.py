"""Choices of one request share its prompt: one prefill, one transfer; whichever worker is lost, each choice's
tokens are those of an undisturbed request."""

from __future__ import annotations

from typing import Any

import pytest
from kvtest.scripted_workers import failing_at, lost
from kvtest.waiting import eventually

from kvferry.shared.errors import CapacityExceeded, LeaseExpired

N, MAX_TOKENS = 4, 6


async def complete(stack: Any, status: int = 200, **fields: Any) -> Any:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "the red castle ."}],
        "temperature": 1,
        "seed": 7,
        "logprobs": True,
        "max_tokens": MAX_TOKENS,
        "n": N,
    }
    response = await stack.http.post("/v1/chat/completions", json={**body, **fields})
    assert response.status_code == status, response.text
    return response.json()


def sharing(stack: Any) -> list[Any]:
    return [request for worker in stack.decode for request in worker.requests if request.shares is not None]


@pytest.mark.covering(1)
@pytest.mark.parametrize("compression", ["full", "rdkv"])
@pytest.mark.parametrize("count", [-1, 1, 3])
async def test_a_lost_sibling_is_replayed_and_the_others_go_on(
    stack: Any, count: int, compression: str
) -> None:
    fields = {"kv_compression": {"method": compression}}
    undisturbed = await complete(stack, **fields)
    assert len({choice["message"]["content"] for choice in undisturbed["choices"]}) == N
    stack.prefill[0].requests.clear()
    stack.decode[0].faults = [lambda _: None, failing_at(count, lost())]
    replayed = await complete(stack, **fields)
    assert replayed["choices"] == undisturbed["choices"]
    assert replayed["usage"] == undisturbed["usage"]
    assert stack.metric("recoveries_total", role="decode") == 1
    first, replay = stack.prefill[0].requests
    assert (len(first.siblings), replay.siblings) == (N - 1, ())
    await eventually(lambda: not stack.decode[0].active)


@pytest.mark.covering(1)
@pytest.mark.parametrize("compression", ["full", "rdkv"])
@pytest.mark.parametrize("max_tokens", [1, MAX_TOKENS])
async def test_a_lost_worker_replays_every_choice(
    start_stack: Any, compression: str, max_tokens: int
) -> None:
    stack = await start_stack(num_decode=2)
    fields = {"kv_compression": {"method": compression}, "max_tokens": max_tokens}
    undisturbed = await complete(stack, **fields)
    for worker in stack.decode:
        worker.faults = [failing_at(2, lost()) for _ in range(N)]
        worker.requests.clear()
    replayed = await complete(stack, **fields)
    assert replayed["choices"] == undisturbed["choices"]
    assert len(sharing(stack)) == N - 1


@pytest.mark.parametrize(("role", "count"), [("prefill", 0), ("decode", -1)])
async def test_a_first_choice_that_is_lost_before_decode_has_its_prompt(
    stack: Any, role: str, count: int
) -> None:
    undisturbed = await complete(stack)
    stack.prefill[0].requests.clear()
    stack.decode[0].requests.clear()
    getattr(stack, role)[0].faults = [failing_at(count, lost())]
    replayed = await complete(stack)
    assert replayed["choices"] == undisturbed["choices"]
    assert len(sharing(stack)) == N - 1
    assert len(stack.prefill[0].requests) == (2 if role == "prefill" else 1)


async def test_a_prefill_worker_that_is_lost_with_its_transfer_is_replayed(stack: Any) -> None:
    undisturbed = await complete(stack)
    stack.prefill[0].faults = [failing_at(1, lost())]
    assert (await complete(stack))["choices"] == undisturbed["choices"]


async def test_choices_go_alone_where_the_first_one_has_tokens_and_its_prompt_is_lost(stack: Any) -> None:
    undisturbed = await complete(stack)
    stack.prefill[0].requests.clear()
    stack.decode[0].requests.clear()
    stack.decode[0].faults = [failing_at(0, lost())]
    replayed = await complete(stack)
    assert replayed["choices"] == undisturbed["choices"]
    assert sharing(stack) == []
    assert len(stack.prefill[0].requests) == N + 1


async def test_a_prompt_that_is_not_there_to_share_is_run_again(stack: Any) -> None:
    undisturbed = await complete(stack, n=2)
    stack.prefill[0].requests.clear()
    stack.decode[0].faults = [lambda _: None, failing_at(-1, LeaseExpired("no prompt is stored"))]
    assert (await complete(stack, n=2))["choices"] == undisturbed["choices"]
    assert len(stack.prefill[0].requests) == 2


async def test_a_sibling_without_room_is_refused_and_all_are_given_up(stack: Any) -> None:
    stack.script.token_delay_s = 0.05
    stack.decode[0].faults = [lambda _: None, lambda _: None, failing_at(-1, CapacityExceeded("no room"))]
    answer = await complete(stack, 429, max_tokens=200, logprobs=False, ignore_eos=True)
    assert answer["error"]["code"] == "rate_limit_exceeded"
    await eventually(lambda: not stack.decode[0].active and not stack.prefill[0].active)
    assert stack.metric("recoveries_total") == 0


async def test_a_sibling_without_room_runs_on_another_worker(start_stack: Any) -> None:
    stack = await start_stack(num_decode=2)
    undisturbed = await complete(stack, n=2)
    for worker in stack.decode:
        worker.requests.clear()
        worker.faults = [lambda _: None, failing_at(-1, CapacityExceeded("no room"))]
    answer = await complete(stack, n=2)
    assert answer["choices"] == undisturbed["choices"]
    assert sorted(len(worker.requests) for worker in stack.decode) == [1, 2]
    assert stack.metric("recoveries_total") == 0
