"""The Responses API by the official client, unmodified, against the whole server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from kvtest.stack import Stack
from kvtest.text_models import KEY, THOUGHT, WEATHER, Person

TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "?", "parameters": WEATHER, "strict": True}
]
ASK: Any = {"model": "text", "input": "what is the weather like today?", "max_output_tokens": 12}
NOT_POSSIBLE = {"type": "json_schema", "name": "x", "schema": {"not": {}}}


@pytest.fixture
def client(served: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="-", max_retries=0, timeout=120) as client:
        yield client


def chat_text(client: openai.OpenAI, messages: Any, **fields: Any) -> str:
    answer = client.chat.completions.create(model="text", messages=messages, max_tokens=12, **fields)
    return answer.choices[0].message.content or ""


def test_a_text_is_answered_as_the_same_chat_is(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASK, temperature=0, instructions="be brief", metadata={"a": "b"})
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": ASK["input"]}]
    assert response.output_text == chat_text(client, messages, temperature=0)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 12
    assert (response.metadata, response.instructions, response.store) == ({"a": "b"}, "be brief", True)
    assert response.model_extra is not None
    assert response.model_extra["kv"]["prompt_tokens"] == response.usage.input_tokens


def test_a_previous_response_is_continued_and_its_kv_reused(client: openai.OpenAI, served: Stack) -> None:
    first = client.responses.create(**ASK, temperature=0, instructions="be brief")
    second = client.responses.create(
        **{**ASK, "input": "and then?"}, temperature=0, instructions="be brief", previous_response_id=first.id
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": ASK["input"]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then?"},
    ]
    # A session has the ids that were generated, which are not always those of the text.
    for messages in (conversation[:2], conversation[3:]):
        text = chat_text(client, messages, temperature=0, extra_body={"session_id": "same"})
    assert second.output_text == text
    # The earlier one again: a conversation of its own, which leaves the other as it is.
    other = client.responses.create(
        **{**ASK, "input": "really?"}, temperature=0, instructions="be brief", previous_response_id=first.id
    )
    assert other.usage is not None
    assert other.usage.input_tokens_details.cached_tokens > 0
    third = client.responses.create(**ASK, temperature=0, previous_response_id=second.id)
    # Instructions are of one response alone.
    shown = [*conversation[1:], {"role": "assistant", "content": second.output_text}]
    again = [*shown, {"role": "user", "content": ASK["input"]}]
    assert third.output_text == chat_text(client, again, temperature=0)
    for response in (first, second, third, other):
        assert client.responses.retrieve(response.id).output == response.output
    sessions = {
        session["id"] for session in httpx.get(f"{served.base_url}/v1/sessions", headers=KEY).json()["data"]
    }
    assert {first.id[:29], other.id[:29]} <= sessions
    for response in (first, second, third):
        client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
    assert httpx.get(f"{served.base_url}/v1/sessions/{first.id[:29]}", headers=KEY).status_code == 404
    assert client.responses.retrieve(other.id).previous_response_id == first.id


def test_what_is_not_stored_cannot_be_continued(client: openai.OpenAI, served: Stack) -> None:
    response = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(**ASK, previous_response_id=response.id)
    assert missing.value.code == "previous_response_not_found"
    kept = client.responses.create(**ASK, temperature=0)
    other_key = client.with_options(api_key="another")
    with pytest.raises(openai.NotFoundError):
        other_key.responses.retrieve(kept.id)
    unstored = client.responses.create(**ASK, temperature=0, previous_response_id=kept.id, store=False)
    stored = client.responses.create(**ASK, temperature=0, previous_response_id=kept.id)
    assert unstored.output_text == stored.output_text


def test_streamed_events_come_in_order_and_make_the_same_response(client: openai.OpenAI) -> None:
    fields: Any = {**ASK, "max_output_tokens": 60, "extra_body": THOUGHT}
    whole = client.responses.create(**fields)
    with client.responses.create(**fields, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    final: Any = events[-1]
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert final.response.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    reasoning: Any = whole.output[0]
    assert "".join(thoughts) == reasoning.content[0].text
    assert len(reasoning.content[0].text) == 4
    assert final.response.usage.output_tokens_details.reasoning_tokens > 0
    assert client.responses.retrieve(final.response.id).output == final.response.output
    with client.responses.stream(**fields) as helper:
        assert helper.get_final_response().output_text == whole.output_text


def test_structured_answers_are_parsed_by_the_clients_helpers(client: openai.OpenAI) -> None:
    asked: Any = {**ASK, "max_output_tokens": 100}
    parsed = client.responses.parse(**asked, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    with client.responses.stream(**asked, text_format=Person) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


def test_a_tool_is_called_and_its_result_continues_the_response(client: openai.OpenAI) -> None:
    ask: Any = {**ASK, "max_output_tokens": 300, "tools": TOOLS}
    first = client.responses.create(**ask, tool_choice="required", parallel_tool_calls=False)
    call: Any = first.output[-1]
    assert (call.type, call.name, first.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_id = client.responses.create(
        **{**ask, "input": [result]}, temperature=0, previous_response_id=first.id
    )
    items: Any = [{"role": "user", "content": ASK["input"]}, *first.output, result]
    resent = client.responses.create(**{**ask, "input": items}, temperature=0)
    assert by_id.usage is not None
    assert resent.usage is not None
    assert by_id.usage.input_tokens_details.cached_tokens > 0
    assert resent.usage.input_tokens_details.cached_tokens > 0
    named: Any = {"type": "function", "name": "get_weather"}
    with client.responses.create(**ask, tool_choice=named, stream=True) as stream:
        events: list[Any] = list(stream)
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.name == "get_weather"
    assert json.loads(done.arguments)["city"] in ("Paris", "Rome")
    assert events[-1].response.output[-1].arguments == done.arguments
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 2  # they come as the model writes them
    assert "".join(pieces) == done.arguments
    whole: Any = client.responses.create(**ask, tool_choice=named, temperature=0).output[-1]
    with client.responses.stream(**ask, tool_choice=named, temperature=0) as helper:
        streamed: Any = helper.get_final_response().output[-1]
    assert (streamed.name, streamed.arguments) == (whole.name, whole.arguments)
    # The same tools as an item of the input.
    added: Any = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    items = [{"role": "user", "content": ASK["input"]}, added]
    ask |= {"input": items, "tools": None}
    again: Any = client.responses.create(**ask, tool_choice=named, temperature=0).output[-1]
    assert (again.name, again.arguments) == (whole.name, whole.arguments)


def test_logprobs_are_included_on_request(client: openai.OpenAI) -> None:
    response: Any = client.responses.create(
        **ASK, include=["message.output_text.logprobs"], top_logprobs=2, temperature=0
    )
    (content,) = response.output[0].content
    assert len(content.logprobs) == 12
    # The answer's end may be within a character.
    assert content.text.startswith("".join(entry.token for entry in content.logprobs))
    assert all(len(entry.top_logprobs) == 2 for entry in content.logprobs)


async def test_the_async_client_streams(served: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="-", max_retries=0) as client:
        whole = await client.responses.create(**ASK, temperature=0)
        async with client.responses.stream(**ASK, temperature=0) as stream:
            text = "".join(
                [event.delta async for event in stream if event.type == "response.output_text.delta"]
            )
            assert text == whole.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "hi"}, {"role": "robot", "content": ""}]}, "input[1].role"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format.schema",
        ),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_clients_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"max_output_tokens": 1, **ASK}, extra_body=fields)
    assert refused.value.param == param
    assert param.split("[")[0].split(".")[0] in refused.value.message


def test_fields_that_change_nothing_are_named(client: openai.OpenAI) -> None:
    given: Any = {
        "user": "u",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "reasoning": {"effort": "low"},
    }
    raw = client.responses.with_raw_response.create(**ASK, **given)
    assert raw.headers["x-ignored-fields"] == "prompt_cache_key, reasoning.effort, service_tier, user"
    given = {
        "input": [
            {"role": "user", "content": "hi", "nonsense": 1},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "compaction", "encrypted_content": "x"},
        ],
        "tools": [*TOOLS, {"type": "web_search", "external_web_access": False}],
        "truncation": "auto",
        "max_output_tokens": 10**6,
        "ignore_eos": True,
    }
    raw = client.responses.with_raw_response.create(model="text", input="", extra_body=given)
    names = "input.compaction, input.nonsense, input.web_search_call, tools.web_search"
    assert raw.headers["x-ignored-fields"] == names
    response = raw.parse()
    assert response.usage is not None
    assert response.usage.output_tokens == (response.model_extra or {})["kv"]["max_tokens"]


def test_functions_of_a_namespace_are_called_by_their_own_names(client: openai.OpenAI) -> None:
    space: Any = {
        "type": "namespace",
        "name": "sky",
        "description": "?",
        "tools": [*TOOLS, {"type": "custom"}],
    }
    fields: Any = {**ASK, "max_output_tokens": 60, "tools": [space], "extra_body": {"seed": 1}}
    choice: Any = {"type": "function", "namespace": "sky", "name": "get_weather"}
    for tool_choice in ("required", choice, {"type": "allowed_tools", "mode": "required", "tools": [choice]}):
        response = client.responses.create(**fields, tool_choice=tool_choice)
        (call,) = response.output[:1]
        assert call.type == "function_call"
        assert (call.name, (call.model_extra or {}).get("namespace", call.namespace)) == (
            "get_weather",
            "sky",
        )
        with client.responses.create(**fields, tool_choice=tool_choice, stream=True) as stream:
            done = [event.item for event in stream if event.type == "response.output_item.done"]
        assert [item.to_dict() | {"id": "", "call_id": ""} for item in done[:1]] == [
            call.to_dict() | {"id": "", "call_id": ""}
        ]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    given: Any = [{"role": "user", "content": ASK["input"]}, call.to_dict(), result]
    again = client.responses.create(**{**fields, "input": given})
    by_reference: Any = [given[0], {"type": "item_reference", "id": call.id}, result]
    assert client.responses.create(**{**fields, "input": by_reference}).output_text == again.output_text
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0
