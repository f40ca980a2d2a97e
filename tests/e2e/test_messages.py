"""Anthropic's Messages API by the official client, against the whole server; tokens and models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from kvtest.stack import Stack
from kvtest.text_models import KEY, THOUGHT, WEATHER, Person

TOOLS: Any = [{"name": "get_weather", "description": "?", "input_schema": WEATHER}]
QUESTION: Any = [{"role": "user", "content": "what is the weather like today?"}]
ASK: Any = {"model": "text", "messages": QUESTION, "max_tokens": 12}
NOT_POSSIBLE = {"type": "json_schema", "schema": {"not": {}}}
GREEDY: Any = {"extra_body": {"temperature": 0}}


@pytest.fixture
def client(served: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.base_url, api_key="-", max_retries=0, timeout=120) as client:
        yield client


def post(served: Stack, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{served.base_url}{path}", json=body, headers=KEY, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(served: Stack, messages: Any, **fields: Any) -> Any:
    more = {"temperature": 0, "max_tokens": 12, **fields}
    return post(served, "/v1/chat/completions", model="text", messages=messages, **more)


def prompt_tokens(message: Any) -> int:
    return int(message.usage.input_tokens + message.usage.cache_read_input_tokens)


def test_a_message_is_answered_as_the_same_chat_is(client: anthropic.Anthropic, served: Stack) -> None:
    system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(**ASK, **GREEDY, system=system)
    same = chat(served, [{"role": "system", "content": "be brief"}, *QUESTION])
    (block,) = message.content
    assert block.type == "text"
    assert block.text == same["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 12
    assert prompt_tokens(message) == same["usage"]["prompt_tokens"]


def test_counted_tokens_are_the_prompts(client: anthropic.Anthropic, served: Stack) -> None:
    fields: Any = {"system": "be brief", "tools": TOOLS, "messages": QUESTION, "model": "text"}
    counted = client.messages.count_tokens(**fields)
    assert counted.input_tokens == prompt_tokens(client.messages.create(**fields, max_tokens=1))
    post(served, "/v1/documents", id="report", text="the quick brown fox")
    with_document = client.messages.count_tokens(**fields, extra_body={"document_ids": ["report"]})
    assert with_document.input_tokens > counted.input_tokens


def test_a_stop_sequence_is_named(client: anthropic.Anthropic, served: Stack) -> None:
    text = chat(served, QUESTION)["choices"][0]["message"]["content"]
    stop = text[3:5]
    message = client.messages.create(**ASK, **GREEDY, stop_sequences=["nowhere", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == text[: text.index(stop)]


def test_streamed_events_make_the_same_message(client: anthropic.Anthropic) -> None:
    fields: Any = {**ASK, "max_tokens": 60, "extra_body": THOUGHT}
    whole = client.messages.create(**fields)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.stop_reason == "end_turn"
    kinds = [event.type for event in client.messages.create(**fields, stream=True)]
    assert [kind for kind in kinds if kind != "content_block_delta"] == [
        "message_start",
        *("content_block_start", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0] == whole.content[0]
    assert whole.content[1].type == "text"
    assert whole.content[1].text == text
    assert final.content[1].type == "text"
    assert final.content[1].text == text
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    hidden = client.messages.create(**fields, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["text"]


def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic) -> None:
    ask: Any = {**ASK, "max_tokens": 300, "tools": TOOLS}
    first = client.messages.create(**ask, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    second = client.messages.create(**{**ask, "messages": messages, "max_tokens": 4})
    assert second.usage.cache_read_input_tokens
    assert prompt_tokens(second) > prompt_tokens(first)
    named: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(**ask, tool_choice=named) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use"
    assert len(pieces) > 2  # they come as the model writes them
    assert json.loads("".join(pieces)) == block.input
    fields: Any = {**ask, "tool_choice": named, **GREEDY}
    (whole,) = client.messages.create(**fields).content
    with client.messages.stream(**fields) as stream:
        (streamed,) = stream.get_final_message().content
    assert isinstance(whole, anthropic.types.ToolUseBlock)
    assert isinstance(streamed, anthropic.types.ToolUseBlock)
    assert (streamed.name, streamed.input) == (whole.name, whole.input)
    # Arguments that are cut off are the same, too: both have what is whole of them.
    for max_tokens in range(20, 40, 5):
        cut = {**fields, "max_tokens": max_tokens}
        blocks = client.messages.create(**cut).content
        with client.messages.stream(**cut) as stream:
            parts = stream.get_final_message().content
        assert [getattr(part, "text", None) for part in parts] == [
            getattr(expected, "text", None) for expected in blocks
        ]
        assert [getattr(part, "input", None) for part in parts] == [
            getattr(expected, "input", None) for expected in blocks
        ]


def test_structured_answers_are_parsed_by_the_clients_helper(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(**{**ASK, "max_tokens": 100}, output_format=Person)
    assert isinstance(parsed.parsed_output, Person)


async def test_the_async_client_streams(served: Stack) -> None:
    async with anthropic.AsyncAnthropic(base_url=served.base_url, api_key="-", max_retries=0) as client:
        whole = await client.messages.create(**ASK, **GREEDY)
        async with client.messages.stream(**ASK, **GREEDY) as stream:
            assert await stream.get_final_text() == "".join(
                getattr(block, "text", "") for block in whole.content
            )


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    *QUESTION,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    },
                ]
            },
            "messages",
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format",
        ),
        ({"container": "c"}, "container"),
    ],
)
def test_what_cannot_be_done_is_refused_in_anthropics_shape(
    client: anthropic.Anthropic, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASK, extra_body=fields)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert name in body["error"]["message"]


def test_errors_are_the_clients_own_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASK, "model": "other"})
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    raw = client.messages.with_raw_response.create(**ASK, metadata={"user_id": "u"})
    assert raw.headers["x-ignored-fields"] == "metadata"


def test_what_agents_send_is_taken(client: anthropic.Anthropic) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    text = {"type": "text", "text": "what is the weather like today?", "cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Rome"}}
    messages = [
        {
            "role": "user",
            "content": [text, {"type": "document", "source": {"type": "text", "data": "a report"}}],
        },
        {"role": "system", "content": "be brief"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "b", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "b", "content": []},
                use,
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}]},
        {"role": "user", "content": []},
    ]
    given = {
        "messages": messages,
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "max_tokens": 10**6,
        "stop_sequences": ["e"],
    }
    raw = client.messages.with_raw_response.create(**ASK, extra_body=given)
    names = raw.headers["x-ignored-fields"].split(", ")
    assert {"messages.content.cache_control", "messages.content.redacted_thinking"} < set(names)
    assert {"messages.content.server_tool_use", "tools.web_search_20250305"} < set(names)
    prompt = client.messages.count_tokens(
        model="text",
        messages=messages[:1],
        extra_body={"tools": given["tools"]},  # type: ignore[arg-type]
    )
    assert prompt_tokens(raw.parse()) > prompt.input_tokens


def test_an_answer_that_has_begun_is_continued(client: anthropic.Anthropic, served: Stack) -> None:
    whole = chat(served, QUESTION)["choices"][0]["message"]["content"]
    begun = whole[:4]
    for message in (begun, [{"type": "text", "text": begun}]):
        rest = client.messages.create(
            **{**ASK, "messages": [*QUESTION, {"role": "assistant", "content": message}]}, **GREEDY
        )
        assert "".join(getattr(part, "text", "") for part in rest.content)
    answer = {"role": "assistant", "content": begun}
    more = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    same = chat(served, [*QUESTION, answer], **more)
    (block,) = rest.content
    assert block.type == "text"
    assert same["choices"][0]["message"]["content"] == block.text
    prompt = post(served, "/detokenize", tokens=same["prompt_token_ids"])["prompt"]
    assert prompt.endswith(f"<|im_start|>assistant\n{begun}")
    # A session has the whole answer, and goes on from there.
    session = {**more, "session_id": "begun"}
    rest = chat(served, [*QUESTION, answer], **session)["choices"][0]["message"]["content"]
    following = [*QUESTION, {"role": "assistant", "content": begun + rest}, *QUESTION]
    again = chat(served, following, session_id="begun", return_token_ids=True)
    alone = chat(served, following, return_token_ids=True)
    # The session has the ids that were generated, which are not always those of the text.
    texts = [
        post(served, "/detokenize", tokens=reply["prompt_token_ids"])["prompt"] for reply in (again, alone)
    ]
    assert texts[0] == texts[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > same["usage"]["prompt_tokens"]


def test_tokens_of_texts_and_of_chats(served: Stack) -> None:
    of_text = post(served, "/tokenize", model="text", prompt="the fox<|im_end|>", return_token_strs=True)
    assert len(of_text["tokens"]) == len(of_text["token_strs"]) == of_text["count"]
    assert of_text["token_strs"][-1] == "<|im_end|>"
    assert post(served, "/detokenize", tokens=of_text["tokens"]) == {"prompt": "the fox<|im_end|>"}
    answer = chat(served, QUESTION, return_token_ids=True)
    assert post(served, "/tokenize", messages=QUESTION)["tokens"] == answer["prompt_token_ids"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": QUESTION}, "messages"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ):
        reply = httpx.post(f"{served.base_url}{path}", json=body, headers=KEY)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_models_have_capabilities_for_both_clients(client: anthropic.Anthropic, served: Stack) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type, model.display_name) == ("text", "model", "text")
    listed = httpx.get(f"{served.base_url}/v1/models", headers=KEY).json()["data"][0]
    assert {
        name: capability["supported"] for name, capability in listed["capabilities"].items()
    } == dict.fromkeys(("chat", "tools", "required_tools", "thinking", "structured_outputs"), True)
    assert client.models.retrieve("text").max_input_tokens == listed["max_model_len"] - 1
