"""Two routers on one real Redis, over HTTP: the same sessions and documents, one turn at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from kvtest.router import eventually

A = {"Authorization": "Bearer key-a"}


async def say(stack: Any, content: str, **extra: Any) -> Any:
    return await stack.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=4,
        extra_body={"session_id": "s", "session_mode": "append", **extra},
    )


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
    await eventually(lambda: bool(one.prefill[0].requests), timeout_s=30.0)
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
