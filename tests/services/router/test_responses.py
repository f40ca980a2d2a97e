"""Stored responses: shared by routers, one continuation at a time, within a key's sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from kvtest.waiting import eventually

ASK: Any = {"model": "demo", "max_output_tokens": 4, "temperature": 0}


async def test_a_response_of_one_router_is_continued_and_deleted_at_another(
    start_stack: Any, redis_server: Any
) -> None:
    one, other = [await start_stack(history_redis=redis_server.url) for _ in range(2)]
    first = await one.client.responses.create(**ASK, input="the red castle .")
    second = await other.client.responses.create(
        **ASK, input="what is the pin ?", previous_response_id=first.id
    )
    prompts = [stack.prefill[0].requests[-1].prompt_token_ids for stack in (one, other)]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert other.prefill[0].requests[-1].session.session_id == first.id[:29] == second.id[:29]
    assert (await one.client.responses.retrieve(second.id)).output == second.output
    await one.client.responses.delete(first.id)
    await one.client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await other.client.responses.create(**ASK, input="and ?", previous_response_id=second.id)


async def test_two_continuations_at_the_same_time_do_not_mix(start_stack: Any) -> None:
    stack = await start_stack()
    first = await stack.client.responses.create(**ASK, input="the red castle .")
    stack.script.token_delay_s = 0.05
    answers = await asyncio.gather(
        *(
            stack.client.responses.create(**ASK, input=text, previous_response_id=first.id)
            for text in ("what is the pin ?", "and the word ?")
        ),
        return_exceptions=True,
    )
    (refused,) = [its for its in answers if isinstance(its, BaseException)]
    assert isinstance(refused, openai.ConflictError)
    # Sent again, as clients do, it is a conversation of its own.
    other = await stack.client.responses.create(**ASK, input="and the word ?", previous_response_id=first.id)
    (done,) = [its for its in answers if not isinstance(its, BaseException)]
    assert other.id[:29] != first.id[:29] == done.id[:29]
    for response in (first, done, other):
        assert (await stack.client.responses.retrieve(response.id)).output == response.output


async def test_a_key_with_all_its_sessions_loses_its_oldest_responses(start_stack: Any) -> None:
    stack = await start_stack(max_sessions_per_key=3)
    await stack.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "the red castle ."}],
        max_tokens=2,
        extra_body={"session_id": "own"},
    )
    made = []
    for _ in range(4):
        made.append(await stack.client.responses.create(**ASK, input="the red castle ."))
        await eventually(lambda: stack.num_active == 0)
    for response in made[:2]:
        with pytest.raises(openai.NotFoundError):
            await stack.client.responses.retrieve(response.id)
    for response in made[2:]:
        await stack.client.responses.retrieve(response.id)
    await stack.has_turns("own", 1)


async def test_a_chat_in_a_responses_session_keeps_what_it_still_has(stack: Any) -> None:
    first = await stack.client.responses.create(**ASK, input="the red castle .", instructions="a word .")

    async def chat(mode: str) -> None:
        await stack.client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "what is the pin ?"}],
            max_tokens=2,
            extra_body={"session_id": first.id[:29], "session_mode": mode},
        )

    await chat("append")
    await eventually(lambda: stack.num_active == 0)
    assert (await stack.client.responses.retrieve(first.id)).output == first.output
    await chat("replace")
    with pytest.raises(openai.NotFoundError):
        await stack.client.responses.retrieve(first.id)


async def test_fields_of_vllm_that_end_an_answer_are_followed(stack: Any) -> None:
    whole = await stack.client.responses.create(**ASK, input="the red castle .", extra_body={"stop": None})
    stop = whole.output_text.split()[1]
    cut = await stack.client.responses.create(
        **ASK, input="the red castle .", extra_body={"stop": [stop], "ignore_eos": True}
    )
    assert cut.output_text == whole.output_text.partition(stop)[0]
    assert stack.prefill[0].requests[-1].sampling.ignore_eos
    with pytest.raises(openai.BadRequestError, match="stop"):
        await stack.client.responses.create(**ASK, input="the red castle .", extra_body={"stop": [1]})


async def test_a_failed_response_is_told_as_an_event(start_stack: Any) -> None:
    stack = await start_stack(request_timeout_s=2.0)
    stack.script.may_decode.clear()
    stream = await stack.client.responses.create(
        model="demo", input="the red castle .", max_output_tokens=20, stream=True
    )
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))
