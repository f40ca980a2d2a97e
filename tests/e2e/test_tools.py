"""Tools through the whole server, by the official client, from a random model that grammars make call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from kvtest.stack import Stack, serving
from kvtest.text_models import HERMES, MISTRAL, make_text_model

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", 'the "new" one']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "?", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
]
ASK: Any = {"model": "tools", "messages": [{"role": "user", "content": "weather?"}], "max_tokens": 400}


@pytest.fixture(scope="module", params=[HERMES, MISTRAL], ids=["hermes", "mistral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = make_text_model(tmp_path_factory.mktemp("tools"), template=request.param)
    with serving("--model", str(folder), "--model-name", "tools", "--in-process") as stack:
        yield stack


@pytest.fixture
def client(served: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="-", max_retries=0, timeout=120) as client:
        yield client


def check(calls: Any) -> list[str]:
    """The names; raises where an argument does not follow its schema."""
    for call in calls:
        assert call.type == "function"
        if call.function.name == "get_weather":
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        else:
            assert json.loads(call.function.arguments) == {}
    assert len({call.id for call in calls}) == len(calls)
    return [call.function.name for call in calls]


def test_required_calls_are_valid_several_and_of_every_tool(client: openai.OpenAI) -> None:
    found: list[list[str]] = []
    for seed in range(12):
        choice = client.chat.completions.create(
            **ASK, tools=TOOLS, tool_choice="required", seed=seed
        ).choices[0]
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        found.append(check(choice.message.tool_calls))
    assert {name for names in found for name in names} == {"get_weather", "stop"}
    assert max(map(len, found)) > 1


def test_a_named_function_is_called_once(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(**ASK, n=3, tools=TOOLS, tool_choice=named)
    for choice in answer.choices:
        assert check(choice.message.tool_calls) == ["get_weather"]
    alone = client.chat.completions.create(
        **ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert len(check(alone.message.tool_calls)) == 1


def test_streams_have_the_same_calls(client: openai.OpenAI) -> None:
    fields: Any = {**ASK, "tools": TOOLS, "tool_choice": "required", "seed": 3}
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason
    assert check(final.message.tool_calls) == check(whole.message.tool_calls)
    ours = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert [
        (tool_call.function.name, tool_call.function.arguments)
        for tool_call in final.message.tool_calls or ()
    ] == ours
    chunks: Any = list(client.chat.completions.create(**fields, stream=True))
    added = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    for index, (name, arguments) in enumerate(ours):
        first, *rest = [piece for piece in added if piece.index == index]
        assert first.function.name == name
        assert first.id
        assert all(piece.id is None and piece.function.name is None for piece in rest)
        assert "".join(piece.function.arguments for piece in [first, *rest]) == arguments
        assert len(rest) > 1  # they come as the model writes them


def test_a_call_that_is_cut_off_has_what_came_of_its_arguments(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields: Any = {**ASK, "tools": TOOLS, "tool_choice": named, "seed": 3}
    whole: Any = client.chat.completions.create(**fields, extra_body={"return_token_ids": True}).choices[0]
    fields["max_tokens"] = len(whole.token_ids) - 12
    cut = client.chat.completions.create(**fields).choices[0]
    assert cut.finish_reason == "length"
    with client.chat.completions.stream(**fields) as stream:
        chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk"]
    streamed = "".join(
        piece.function.arguments or ""
        for chunk in chunks
        for piece in chunk.delta.tool_calls or ()
        if piece.function is not None
    )
    (call,) = cut.message.tool_calls or ()
    assert call.function.name == "get_weather"
    assert call.function.arguments == streamed
    assert whole.message.tool_calls[0].function.arguments.startswith(streamed)
    assert len(streamed) > 1


def test_a_model_that_calls_by_itself_is_understood(client: openai.OpenAI) -> None:
    ask: Any = {**ASK, "tools": TOOLS, "seed": 3}
    forced: Any = client.chat.completions.create(
        **ask, tool_choice="required", extra_body={"return_token_ids": True}
    ).choices[0]
    # The same tokens again, of which nothing says that they are calls.
    ids = forced.token_ids[:-1] if forced.finish_reason == "tool_calls" else forced.token_ids
    same = {"structured_outputs": {"grammar": "start: " + " ".join(f"<[{token_id}]>" for token_id in ids)}}
    for tool_choice in ("auto", "none"):
        choice = client.chat.completions.create(**ask, tool_choice=tool_choice, extra_body=same).choices[0]
        if tool_choice == "none":
            assert choice.message.tool_calls is None
            assert "get_weather" in (choice.message.content or "") or "stop" in (choice.message.content or "")
            continue
        assert choice.finish_reason == "tool_calls"
        ours = [(call.function.name, call.function.arguments) for call in forced.message.tool_calls]
        assert [
            (tool_call.function.name, tool_call.function.arguments)
            for tool_call in choice.message.tool_calls or ()
        ] == ours
    plain = client.chat.completions.create(**ask).choices[0]
    assert plain.message.tool_calls is None
    assert plain.message.content


def test_a_tools_result_continues_the_session_and_a_resent_conversation(client: openai.OpenAI) -> None:
    session = {"extra_body": {"session_id": "agent", "return_token_ids": True}}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    first: Any = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=named, **session)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    known = first.prompt_token_ids + first.choices[0].token_ids
    resent = [*ASK["messages"], message.model_dump(exclude_none=True), result]
    ask = {**ASK, "messages": resent, "tools": TOOLS, "max_tokens": 5}
    second: Any = client.chat.completions.create(**ask, **session)
    assert second.prompt_token_ids[: len(known)] == known
    assert second.usage.prompt_tokens_details.cached_tokens >= len(known) - 1
    without: Any = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    assert (
        "sunny"
        in client.completions.create(model="tools", prompt=without.prompt_token_ids, max_tokens=1, echo=True)
        .choices[0]
        .text
    )
    third: Any = client.chat.completions.create(
        **{**ask, "messages": [{"role": "tool", "tool_call_id": "x", "content": "rain"}]},
        extra_body={"session_id": "agent", "session_mode": "append", "return_token_ids": True},
    )
    assert third.prompt_token_ids[: len(second.prompt_token_ids)] == second.prompt_token_ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, extra_body=fields)
    assert (refused.value.body or {})["param"].startswith(param)  # type: ignore[index]


def test_an_answer_follows_a_schema_or_calls(client: openai.OpenAI) -> None:
    """OpenAI's: with tools that need not be called, the schema is that of an answer without calls."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    url = str(client.base_url).removesuffix("/v1/")
    marks = [
        httpx.post(f"{url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"][0]
        for text in ("<tool_call>", "[TOOL_CALLS]")
    ]
    num_called = 0
    for seed in range(16):
        bias = dict.fromkeys(map(str, marks), 20 * (seed % 2))  # the random model begins no call by itself
        choice = client.chat.completions.create(
            **ASK, tools=TOOLS, response_format=form, seed=seed, logit_bias=bias
        ).choices[0]
        if choice.finish_reason == "length":
            continue
        if choice.message.tool_calls:
            check(choice.message.tool_calls)
            num_called += 1
        else:
            assert not seed % 2
            jsonschema.validate(json.loads(choice.message.content or ""), schema)
    assert num_called
    none = client.chat.completions.create(
        **ASK, tools=TOOLS, tool_choice="none", response_format=form, seed=1
    )
    jsonschema.validate(json.loads(none.choices[0].message.content or ""), schema)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_knows_the_allowed_tools_alone(client: openai.OpenAI, mode: str) -> None:
    allowed: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "stop"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice, seed=1)
    alone = client.chat.completions.create(**ASK, tools=TOOLS[1:], tool_choice=mode, seed=1)
    assert answer.usage is not None
    assert alone.usage is not None
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.choices[0].message.content == alone.choices[0].message.content
    names = [call.function.name for call in answer.choices[0].message.tool_calls or []]  # type: ignore[union-attr]
    assert set(names) == ({"stop"} if mode == "required" else set(names) & {"stop"})


def test_a_results_parts_and_a_custom_tools_call_are_shown(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages: Any = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c00000001", "type": "custom", "custom": {"name": "run", "input": "ls"}}],
        },
        {"role": "tool", "tool_call_id": "c00000001", "content": [{"type": "text", "text": "done"}, image]},
        {"role": "user", "content": ""},
    ]
    raw = client.chat.completions.with_raw_response.create(
        **{**ASK, "messages": messages, "max_tokens": 1, "extra_body": {"return_token_ids": True}}
    )
    assert raw.headers["x-ignored-fields"] == "messages.content.image_url"
    ids = raw.parse().model_extra["prompt_token_ids"]  # type: ignore[index]
    url = str(client.base_url).removesuffix("/v1/")
    prompt = httpx.post(f"{url}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert '"ls"' in prompt
    assert "done[image_url: left out" in prompt
