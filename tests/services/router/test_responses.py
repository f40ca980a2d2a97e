"""Stored responses: shared by routers, one continuation at a time, within a key's sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from kvtest.waiting import eventually

from kvferry.services.router.api.response_answer import head_of
from kvferry.services.router.completion.responses import ResponseRequest

KEY_A = {"Authorization": "Bearer key-a"}
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
    (refused,) = [answer for answer in answers if isinstance(answer, BaseException)]
    assert isinstance(refused, openai.ConflictError)
    # Sent again, as clients do, it is a conversation of its own.
    other = await stack.client.responses.create(**ASK, input="and the word ?", previous_response_id=first.id)
    (done,) = [answer for answer in answers if not isinstance(answer, BaseException)]
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


async def test_a_key_with_all_its_bytes_loses_its_oldest_responses(start_stack: Any) -> None:
    stack = await start_stack(max_stored_bytes_per_key=10_000)
    made = []
    for _ in range(12):
        made.append(await stack.client.responses.create(**ASK, input="the red castle ."))
        await eventually(lambda: stack.num_active == 0)
    with pytest.raises(openai.NotFoundError):
        await stack.client.responses.retrieve(made[0].id)
    for response in made[-3:]:
        await stack.client.responses.retrieve(response.id)
    found = (await stack.http.get("/v1/sessions", headers=KEY_A)).json()["data"]
    assert 5_000 < sum(session["stored_bytes"] for session in found) <= 10_000


LARGE = "x" * 3_000_000
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"n" * 65: "v"}}, "metadata." + "n" * 65),
        ({"metadata": {LARGE: "v"}}, ("metadata." + LARGE)[:128]),
        ({"metadata": {"n": "v" * 513}}, "metadata.n"),
        ({"metadata": {f"n{number}": "v" for number in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "text", "name": LARGE}}}, "text.format.name"),
        ({"text": {"format": {"type": "text", "description": LARGE}}}, "text.format.description"),
        ({"tools": [{"type": "function", "name": "f", "strict": LARGE}]}, "tools[0].strict"),
        ({"input": [{**CALL, "call_id": LARGE}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": LARGE, "output": ""}]}, "input[0].call_id"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
async def test_what_an_answer_repeats_is_bounded(stack: Any, fields: dict[str, Any], param: str) -> None:
    body = {**ASK, "input": "the red castle .", **fields}
    response = await stack.http.post("/v1/responses", json=body, headers=KEY_A)
    assert response.status_code == 400, response.text[:200]
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 1000
    assert not stack.prefill[0].requests


async def test_what_the_model_does_not_get_to_know_is_neither_repeated_nor_stored(stack: Any) -> None:
    response = await stack.client.responses.create(
        **ASK,
        input="the red castle .",
        metadata={"n" * 64: "v" * 512},
        text={"format": {"type": "text", "schema": {"title": LARGE}, "other": "x"}},
        tools=[{"type": "web_search", "filters": {LARGE: 1}}],
    )
    stored = (await stack.http.get(f"/v1/responses/{response.id}", headers=KEY_A)).json()
    assert (stored["text"], stored["tools"]) == ({"format": {"type": "text"}}, [])
    assert stored["metadata"] == {"n" * 64: "v" * 512}
    session = (await stack.http.get(f"/v1/sessions/{response.id[:29]}", headers=KEY_A)).json()
    assert session["stored_bytes"] < 5_000


def test_of_tools_an_answer_repeats_the_fields_that_are_known() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    more = {"other": LARGE}
    inner = [function | more, {"type": "custom", **more}]
    request = ResponseRequest.model_validate(
        {
            "model": "demo",
            "input": "a",
            "tools": [function | more, {"type": "namespace", "name": "n", "tools": inner, **more}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": inner, **more},
        }
    )
    head = head_of(request, "resp_1")
    assert head["tools"] == [
        {"description": None, **function},
        {"type": "namespace", "name": "n", "tools": [function]},
    ]
    chosen = {"type": "function", "name": "f"}
    assert head["tool_choice"] == {"type": "allowed_tools", "mode": "auto", "tools": [chosen]}


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
