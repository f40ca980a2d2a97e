"""Two routers on one real Redis, over HTTP: the same sessions and documents, one turn at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from kvtest.chaos.links import Link
from kvtest.router import say
from kvtest.waiting import eventually

from kvferry.services.router.app import Timing

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
    assert (await say(stack, "what is the pin ?")).kv["reused_tokens"] > 0
    assert stack.metric("session_store_events_total", event="offline") >= 1
    with pytest.raises(openai.InternalServerError) as refused:
        await say(stack, "what is the pin ?", session_id="unknown")
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
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
    """Two routers before the same workers, and the link between the first one and Redis."""
    link = Link(name="redis", target_port=redis_server.port)
    await link.start()
    # a lease is over before Redis is back
    timing = Timing(session_lease_s=0.5, sweep_interval_s=0.3, recovery_backoff_s=0.01)
    one = await start_stack(history_redis=f"redis://127.0.0.1:{link.port}/0", timing=timing)
    link_of(one).breaker._open_s = 0.05
    other = await start_stack(history_redis=redis_server.url, timing=timing)
    other.prefill[0].pending = one.prefill[0].pending
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
    redis._options = replace(redis._options)
    link.heal()


async def cut_during(one: Any, link: Link, content: str, **extra: Any) -> Any:
    """A turn that the router acknowledges without Redis, which it loses in the middle of it."""
    one.script.may_prefill.clear()
    asked = len(one.prefill[0].requests)
    turn = asyncio.create_task(say(one, content, **extra))
    await eventually(lambda: len(one.prefill[0].requests) > asked)
    cut(one, link)
    one.script.may_prefill.set()
    return await turn


async def refused(stack: Any, content: str, **extra: Any) -> None:
    with pytest.raises(openai.InternalServerError) as error:
        await say(stack, content, **extra)
    assert error.value.status_code == 503
    assert error.value.code == "session_pending"
    assert int(error.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("turns_before", [0, 1])
async def test_a_router_with_redis_does_not_go_on_without_a_turn_that_another_one_has_acknowledged(
    start_stack: Any, redis_server: Any, turns_before: int
) -> None:
    alone = await start_stack()
    contents = ["the red castle .", "what is the pin ?", "and the word ?"][: turns_before + 2]
    for content in contents:
        await say(alone, content)
    async with one_cut_off(start_stack, redis_server) as (one, other, link):
        for content in contents[:turns_before]:
            await say(other, content)
        await cut_during(one, link, contents[-2])
        assert one.metric("session_store_events_total", event="offline") == 0
        await refused(other, contents[-1])  # once the lease of the turn is over
        assert (await other.http.get("/v1/sessions/s", headers=A)).json()["error"][
            "code"
        ] == "session_pending"
        if not turns_before:
            deleted = await other.http.delete("/v1/sessions/s", headers=A)
            assert (deleted.status_code, deleted.json()["error"]["code"]) == (503, "session_pending")
        heal(one, link)
        async with asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(openai.InternalServerError):
                    await say(other, contents[-1])
                    break
                await asyncio.sleep(0.1)
    asked = alone.prefill[0].requests[-1].prompt_token_ids
    assert other.prefill[0].requests[-1].prompt_token_ids == asked


@pytest.mark.parametrize("way", ["delete", "replace"])
async def test_what_replaces_a_session_need_not_wait_for_another_routers_turn(
    start_stack: Any, redis_server: Any, way: str
) -> None:
    async with one_cut_off(start_stack, redis_server) as (one, other, link):
        await say(other, "the red castle .")
        await cut_during(one, link, "what is the pin ?")
        if way == "delete":
            assert (await other.http.delete("/v1/sessions/s", headers=A)).status_code == 200
        mode = "append" if way == "delete" else "replace"
        assert (await say(other, "and the word ?", session_mode=mode)).usage.completion_tokens > 0


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
        one.script.may_prefill.set()
        with pytest.raises(openai.ConflictError):
            await turn
        await other.has_turns("s", 2)
