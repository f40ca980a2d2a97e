"""What coding agents send first and next, by the structure of their requests, against the whole server; and
what a session of theirs costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from kvtest.stack import Stack, serving
from kvtest.text_models import HERMES, make_text_model

FOLDER = Path(__file__).parent / "agents"
NUM_TURNS = 20
SENTENCE = "the quick brown fox jumps over the lazy dog, and then it is done. "
SHELL: Any = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 12}},
    "required": ["command"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("agents")
    make_text_model(folder, template=HERMES, max_position_embeddings=32_768)
    with serving("--model", str(folder), "--model-name", "demo", "--in-process") as stack:
        yield stack


def first_request(api: str) -> dict[str, Any]:
    """An agent's first request, with prose cut short: the tiny model's tokens are letters."""

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            return value[:64]
        if isinstance(value, dict):
            return {name: cut(field) for name, field in value.items()}
        return [cut(element) for element in value] if isinstance(value, list) else value

    request: dict[str, Any] = cut(json.loads((FOLDER / f"{api}-agent-first-request.json").read_text()))
    return request


@pytest.fixture
def messages_api(served: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.base_url, api_key="-", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def responses_api(served: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="-", max_retries=0, timeout=120) as client:
        yield client


def test_the_messages_agent_gets_its_answer_and_a_second_turn(messages_api: anthropic.Anthropic) -> None:
    request = first_request("messages")
    request.update(max_tokens=200, temperature=0, tool_choice={"type": "any"})

    def answered(messages: list[Any]) -> Any:
        with messages_api.messages.stream(
            model="demo", max_tokens=200, messages=messages, extra_body=given
        ) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert kinds.count("content_block_start") == len(message.content)
        return message

    given = {name: field for name, field in request.items() if name not in ("messages", "stream")}
    first = answered(request["messages"])
    uses = [block for block in first.content if block.type == "tool_use"]
    assert uses
    if first.stop_reason != "max_tokens":
        assert first.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "done"}]}
        for use in uses
    ]
    # the demo model writes numbers beyond a float's, which the client cannot send back
    blocks = json.loads(json.dumps([block.to_dict() for block in first.content]).replace("Infinity", "0"))
    del given["tool_choice"]
    second = answered(
        [*request["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    )
    assert second.usage.cache_read_input_tokens > 0.9 * (
        first.usage.input_tokens + first.usage.cache_read_input_tokens
    )


def test_the_responses_agent_gets_its_answer_and_a_second_turn(responses_api: openai.OpenAI) -> None:
    request = first_request("responses")
    request.update(max_output_tokens=200, temperature=0, tool_choice="required")
    request.pop("stream")

    def answered(given: list[Any]) -> Any:
        raw = responses_api.responses.with_raw_response.create(
            model="demo", input=given, stream=True, extra_body=more
        )
        assert "tools.web_search" in raw.headers["x-ignored-fields"]
        events = list(raw.parse())
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        end = events[-1]
        assert end.type in ("response.completed", "response.incomplete")
        return end.response

    more = {name: field for name, field in request.items() if name not in ("input", "model")}
    first = answered(request["input"])
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    spaces = {tool["name"]: tool for tool in request["tools"] if tool["type"] == "namespace"}
    plain = {tool["name"] for tool in request["tools"] if tool["type"] == "function"}
    for call in calls:
        space = (call.model_extra or {}).get("namespace") or getattr(call, "namespace", None)
        inner = {tool["name"] for tool in spaces[space]["tools"]} if space else plain
        assert call.name in inner
    results = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": [{"type": "input_text", "text": "done"}],
        }
        for call in calls
    ]
    more["tool_choice"] = "auto"
    second = answered([*request["input"], *(item.to_dict() for item in first.output), *results])
    assert second.usage.input_tokens_details.cached_tokens > 0.9 * first.usage.input_tokens


def messages_turn(served: Stack, conversation: list[Any]) -> tuple[int, int]:
    with anthropic.Anthropic(
        base_url=served.base_url, api_key="agent-m", max_retries=0, timeout=120
    ) as client:
        message = client.messages.create(
            model="demo",
            max_tokens=40,
            system=SENTENCE * 4,
            messages=conversation,
            tools=[{"name": "shell", "description": "?", "input_schema": SHELL}],
            tool_choice={"type": "tool", "name": "shell"},
        )
    uses = [block for block in message.content if block.type == "tool_use"]
    conversation.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": use.id, "content": SENTENCE * 3} for use in uses
    ]
    conversation.append({"role": "user", "content": results or SENTENCE * 3})
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    return usage.input_tokens + cached, cached


def responses_turn(served: Stack, conversation: list[Any]) -> tuple[int, int]:
    with openai.OpenAI(
        base_url=f"{served.base_url}/v1", api_key="agent-r", max_retries=0, timeout=120
    ) as client:
        response = client.responses.create(
            model="demo",
            max_output_tokens=40,
            instructions=SENTENCE * 4,
            input=conversation,
            store=False,
            tools=[
                {"type": "function", "name": "shell", "description": "?", "parameters": SHELL, "strict": True}
            ],
            tool_choice={"type": "function", "name": "shell"},
        )
    conversation += [item.to_dict() for item in response.output]
    calls = [item for item in response.output if item.type == "function_call"]
    conversation += [
        {"type": "function_call_output", "call_id": call.call_id, "output": SENTENCE * 3} for call in calls
    ]
    if not calls:
        conversation.append({"role": "user", "content": SENTENCE * 3})
    assert response.usage is not None
    return response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize("turn", [messages_turn, responses_turn])
def test_an_agents_session_without_an_id_prefills_little_more_than_its_new_tokens(
    served: Stack, turn: Callable[[Stack, list[Any]], tuple[int, int]]
) -> None:
    conversation: list[Any] = [{"role": "user", "content": SENTENCE}]
    before = served.prefill_metric("kvferry_prefill_tokens_total")
    counts = [turn(served, conversation) for _ in range(NUM_TURNS)]
    run = served.prefill_metric("kvferry_prefill_tokens_total") - before
    assert run == sum(prompt - cached for prompt, cached in counts)
    new_tokens = counts[-1][0]  # every prompt begins with the one before it
    assert run <= 1.1 * new_tokens
