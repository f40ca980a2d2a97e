"""Two routers on one real Redis, over HTTP: the same sessions and documents, one turn at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from kvtest.chaos.links import Link
from kvtest.router import say
from kvtest.waiting import eventually

from kvferry.services.router.app import Timing
from kvferry.shared.errors import StoreUnavailable

A = {"Authorization": "Bearer key-a"}


def link_of(stack: Any) -> Any:
    """Return the router's connection to Redis."""
    return stack.services.sessions._records._link


async def test_a_conversation_moves_between_routers_and_survives_their_restart(
    start_stack: Any, redis_server: Any
) -> None:
    alone = await start_stack()
    one, other = [await start_stack(history_redis=redis_server.url) for _ in range(2)]
    for turn, (content, stack) in enumerate(
        (("the red castle .", one), ("what is the pin ?", other)), start=1
    ):
        await say(alone, content)
        await say(stack, content)
        await stack.has_turns("s", turn)
    await one.close()
    await other.close()
    third = await start_stack(history_redis=redis_server.url)
    await say(alone, "and the word ?")
    await say(third, "and the word ?")
    assert third.prefill[0].requests[-1].prompt_token_ids == alone.prefill[0].requests[-1].prompt_token_ids


async def test_a_turn_at_one_router_makes_the_other_wait_then_refuse(
    start_stack: Any, redis_server: Any
) -> None:
    one = await start_stack(history_redis=redis_server.url)
    other = await start_stack(history_redis=redis_server.url, session_wait_s=0.05)
    one.script.token_delay_s = 60.0
    running = asyncio.create_task(say(one, "the red castle ."))
    await eventually(lambda: bool(one.prefill[0].requests))
    with pytest.raises(openai.ConflictError):
        await say(other, "what is the pin ?")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(60.0):  # who leaves frees the session for everybody
        while True:
            try:
                assert (await say(other, "what is the pin ?")).usage.completion_tokens > 0
                return
            except openai.ConflictError:
                await asyncio.sleep(0.05)


async def test_documents_and_deletion_reach_every_router(start_stack: Any, redis_server: Any) -> None:
    one, other = [await start_stack(history_redis=redis_server.url) for _ in range(2)]
    await one.http.post("/v1/documents", json={"text": "the pin is 4 2 .", "id": "d"}, headers=A)
    await say(other, "what is the pin ?", document_ids=["d"])
    await other.has_turns("s", 1)
    assert (await one.http.delete("/v1/sessions/s", headers=A)).status_code == 200
    assert (await other.http.get("/v1/sessions/s", headers=A)).status_code == 404
    assert (await one.http.get("/v1/documents", headers=A)).json()["data"][0]["id"] == "d"


async def test_the_server_goes_on_without_redis_and_says_what_it_cannot(
    start_stack: Any, redis_server: Any
) -> None:
    stack = await start_stack(history_redis=redis_server.url)
    link_of(stack).breaker._open_s = 0.05
    await say(stack, "the red castle .")
    await stack.has_turns("s", 1)
    redis_server.kill()
    for session_id in ("s", "unknown"):
        with pytest.raises(openai.InternalServerError) as refused:
            await say(stack, "what is the pin ?", session_id=session_id)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
    assert stack.metric("session_store_events_total", event="offline") >= 2
    answered = await stack.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "x"}]
    )
    assert answered.usage.completion_tokens > 0
    assert (await stack.http.delete("/v1/sessions/s", headers=A)).status_code == 503
    redis_server.start()
    status = 503
    async with asyncio.timeout(120.0):
        while status == 503:
            await asyncio.sleep(0.1)
            status = (await stack.http.delete("/v1/sessions/s", headers=A)).status_code
    # 404 where an answer came too late for the request that it was of: the next one finds it done.
    assert status in (200, 404)
    assert (await stack.http.get("/v1/sessions/s", headers=A)).status_code == 404


@contextlib.asynccontextmanager
async def one_cut_off(start_stack: Any, redis_server: Any) -> AsyncIterator[tuple[Any, Any, Link]]:
    """Two routers, and the link between the first one and Redis."""
    link = Link(name="redis", target_port=redis_server.port)
    await link.start()
    # a lease is over before Redis is back
    timing = Timing(session_lease_s=0.5, sweep_interval_s=0.3, recovery_backoff_s=0.01)
    one = await start_stack(history_redis=f"redis://127.0.0.1:{link.port}/0", timing=timing)
    link_of(one).breaker._open_s = 0.05
    other = await start_stack(history_redis=redis_server.url, timing=timing)
    try:
        yield one, other, link
    finally:
        heal(one, link)
        await one.close()
        await other.close()
        await link.close()


def cut(one: Any, link: Link) -> None:
    """Let nothing pass to Redis; the router soon gives a call up."""
    redis = link_of(one)
    redis._options = replace(redis._options, timeout_s=0.3)
    link.hold()


def heal(one: Any, link: Link) -> None:
    redis = link_of(one)
    redis._options = replace(redis._options, timeout_s=30.0)
    link.heal()


async def cut_during(one: Any, link: Link, turn: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a turn in the middle of which the router loses Redis."""
    one.script.may_prefill.clear()
    asked = len(one.prefill[0].requests)
    running = asyncio.create_task(turn())
    await eventually(lambda: len(one.prefill[0].requests) > asked)
    cut(one, link)
    one.script.may_prefill.set()
    return await running


async def refused(stack: Any, content: str) -> None:
    with pytest.raises(openai.ConflictError) as error:
        await say(stack, content)
    assert error.value.code == "session_not_stored"
    assert "send the whole conversation" in error.value.message


async def marked(redis_server: Any) -> None:
    """Wait until the session's mark is in Redis."""
    with redis_server.client() as client:
        await eventually(
            lambda: any(client.hexists(key, "unstored") for key in client.keys("kvferry:router:*:session:s"))
        )


def whole(*texts: str) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


@pytest.mark.parametrize("turns_before", [0, 1])
async def test_a_turn_that_redis_does_not_take_says_so_and_the_next_one_is_refused_until_it_is_whole(
    start_stack: Any, redis_server: Any, turns_before: int
) -> None:
    texts: list[str] = []
    async with one_cut_off(start_stack, redis_server) as (one, other, link):
        if turns_before:
            answer = await say(other, "the red castle .")
            assert "session" not in answer.kv
            texts += ["the red castle .", answer.choices[0].message.content]
        answer = await cut_during(one, link, lambda: say(one, "what is the pin ?"))
        assert answer.kv["session"] == "not_stored"
        assert one.metric("session_store_events_total", event="not_stored") == 1
        texts += ["what is the pin ?", answer.choices[0].message.content]
        await refused(one, "and the word ?")  # while Redis is away
        heal(one, link)
        await marked(redis_server)
        for stack in (one, other, await start_stack(history_redis=redis_server.url)):
            await refused(stack, "and the word ?")
        messages = whole(*texts, "and the word ?")
        restored = await other.client.chat.completions.create(
            model="demo", messages=messages, temperature=0, max_tokens=4, extra_body={"session_id": "s"}
        )
        assert "session" not in restored.kv
        assert restored.usage.prompt_tokens > answer.usage.prompt_tokens
        await one.has_turns("s", turns_before + 1)
        assert (await say(one, "the red castle .")).kv["prompt_tokens"] > restored.usage.prompt_tokens


async def test_a_stream_says_in_its_last_event_that_its_turn_was_not_stored(
    start_stack: Any, redis_server: Any
) -> None:
    async with one_cut_off(start_stack, redis_server) as (one, _, link):

        async def streamed() -> list[Any]:
            fields = {"model": "demo", "max_tokens": 4, "stream": True, "extra_body": {"session_id": "s"}}
            stream = await one.client.chat.completions.create(messages=whole("the red castle ."), **fields)
            return [chunk async for chunk in stream]

        *_, last = await cut_during(one, link, streamed)
        assert last.kv["session"] == "not_stored"


async def test_a_response_that_was_not_stored_says_so_and_cannot_be_continued(
    start_stack: Any, redis_server: Any
) -> None:
    async with one_cut_off(start_stack, redis_server) as (one, other, link):

        async def respond() -> Any:
            return await one.http.post(
                "/v1/responses", json={"model": "demo", "input": "the red castle ."}, headers=A
            )

        answer = (await cut_during(one, link, respond)).json()
        assert (answer["status"], answer["kv"]["session"]) == ("completed", "not_stored")
        heal(one, link)
        body = {"model": "demo", "input": "and the word ?", "previous_response_id": answer["id"]}
        refusal = await other.http.post("/v1/responses", json=body, headers=A)
        assert refusal.json()["error"]["code"] == "previous_response_not_found"


async def test_a_whole_conversation_is_answered_while_redis_is_away_and_is_not_stored(
    start_stack: Any, redis_server: Any
) -> None:
    async with one_cut_off(start_stack, redis_server) as (one, other, link):
        await say(other, "the red castle .")
        cut(one, link)
        answer = await say(one, "what is the pin ?", session_mode="replace")
        assert answer.kv["session"] == "not_stored"
        heal(one, link)
        await marked(redis_server)
        await refused(other, "and the word ?")
        assert (await other.http.delete("/v1/sessions/s", headers=A)).status_code == 200
        assert (await say(one, "and the word ?")).kv["reused_tokens"] == 0


async def test_a_turn_that_another_router_has_overtaken_is_not_acknowledged(
    start_stack: Any, redis_server: Any
) -> None:
    async with one_cut_off(start_stack, redis_server) as (one, other, link):
        await say(one, "the red castle .")
        one.script.may_prefill.clear()
        asked = len(one.prefill[0].requests)
        turn = asyncio.create_task(say(one, "what is the pin ?"))
        await eventually(lambda: len(one.prefill[0].requests) > asked)
        cut(one, link)
        await say(other, "and the word ?")  # the lease ends, and the other router takes the session over
        heal(one, link)
        async with asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    await link_of(one).call(lambda client: client.ping())
                    break
                await asyncio.sleep(0.05)
        one.script.may_prefill.set()
        with pytest.raises(openai.ConflictError) as error:
            await turn
        assert error.value.code == "session_busy"
        await other.has_turns("s", 2)
