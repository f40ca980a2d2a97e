"""Requests as programs of many kinds send them, which other servers answer: whole and as a stream, with the
names of what changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from kvtest.stack import Stack, serving
from kvtest.text_models import HERMES, make_text_model

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = {"role": "user", "content": "Say OK."}
ANSWERED = {"role": "assistant", "content": "OK."}
TOOL = {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {"type": "function", "function": TOOL}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def text(kind: str = "text", **more: Any) -> list[dict[str, Any]]:
    return [{"type": kind, "text": "Say OK.", **more}]


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [ASKED], "max_tokens": 2, **fields}


def items(*given: Any, **fields: Any) -> dict[str, Any]:
    return {"input": list(given) or [ASKED], "max_output_tokens": 2, **fields}


def schema(**keywords: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": keywords}}


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    # empty
    "a call beside null": (
        CHAT,
        chat(
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": None},
        ),
        "",
    ),
    "a call beside no content": (
        CHAT,
        chat(
            ASKED,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": ""},
        ),
        "",
    ),
    "a call whose arguments are empty": (
        CHAT,
        chat(
            ASKED,
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "look", "arguments": ""}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        ),
        "",
    ),
    "an empty system message": (CHAT, chat({"role": "system", "content": []}, ASKED), ""),
    "no calls": (CHAT, chat(ASKED, {**ANSWERED, "tool_calls": None}, ASKED), ""),
    "an empty list of calls": (CHAT, chat(ASKED, {**ANSWERED, "tool_calls": []}, ASKED), ""),
    "an empty system prompt": (MESSAGES, chat(system=[]), ""),
    "a result without content": (
        MESSAGES,
        chat(
            ASKED,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
        ),
        "",
    ),
    "an empty output": (
        RESPONSES,
        items(ASKED, ITEM, {"type": "function_call_output", "call_id": "c1", "output": ""}),
        "",
    ),
    "an output of no parts": (
        RESPONSES,
        items(ASKED, ITEM, {"type": "function_call_output", "call_id": "c1", "output": []}),
        "",
    ),
    "an answer of no parts": (RESPONSES, items(ASKED, {"role": "assistant", "content": []}, ASKED), ""),
    # fields of other servers and of programs' own
    "of a router of models": (
        CHAT,
        chat(provider={"sort": "price"}, transforms=[], usage={"include": True}),
        "provider, transforms, usage",
    ),
    "of a local server": (
        CHAT,
        chat(options={"num_ctx": 8192}, keep_alive="5m", think=False),
        "keep_alive, options, think",
    ),
    "of a web page": (
        CHAT,
        chat(
            {**ASKED, "timestamp": 1, "files": []}, chat_id="a", features={"web": False}, background_tasks={}
        ),
        "background_tasks, chat_id, features, messages.files, messages.timestamp",
    ),
    "details of thoughts": (
        CHAT,
        chat(ASKED, {**ANSWERED, "reasoning_content": "hm", "reasoning_details": [{"type": "x"}]}, ASKED),
        "messages.reasoning_content, messages.reasoning_details",
    ),
    "a call's signature": (
        CHAT,
        chat(
            ASKED,
            {"role": "assistant", "tool_calls": [{**CALL, "index": 0, "extra_content": {"google": {}}}]},
            {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "seen"},
        ),
        "messages.tool_calls.extra_content",
    ),
    "a strict function": (
        CHAT,
        chat(tools=[{"type": "function", "function": {**TOOL, "strict": True}, "x": 1}]),
        "tools.function.strict, tools.x",
    ),
    "a cached part": (CHAT, chat({**ASKED, "content": text(cache_control={"type": "ephemeral"})}), "*"),
    "thoughts that are off": (
        CHAT,
        chat(thinking={"type": "disabled"}, enable_thinking=False),
        "enable_thinking, thinking",
    ),
    "a user's id": (MESSAGES, chat(metadata={"user_id": "u"}, service_tier="auto"), "metadata, service_tier"),
    "cached blocks": (
        MESSAGES,
        chat(
            {"role": "user", "content": text(cache_control={"type": "ephemeral", "ttl": "1h"})},
            system=text(cache_control={"type": "ephemeral"}),
            tools=[{"name": "look", "input_schema": {"type": "object"}, "cache_control": None}],
        ),
        "messages.content.cache_control, system.cache_control",
    ),
    "a tool that loads late": (
        MESSAGES,
        chat(tools=[{"name": "look", "input_schema": {"type": "object"}, "defer_loading": True}]),
        "tools.defer_loading",
    ),
    "encrypted thoughts": (
        RESPONSES,
        items(
            ASKED,
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": "OK."},
            ASKED,
            include=["reasoning.encrypted_content"],
            reasoning={"effort": "medium", "summary": "auto"},
            store=False,
            prompt_cache_key="k",
        ),
        "*",
    ),
    "verbosity": (RESPONSES, items(text={"verbosity": "low"}, store=False), "text.verbosity"),
    "a patch": (
        RESPONSES,
        items(tools=[{"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}], store=False),
        "tools.custom",
    ),
    "a shell of the server's": (
        RESPONSES,
        items(
            ASKED, {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {}}, ASKED, store=False
        ),
        "input.local_shell_call",
    ),
    # limits
    "a limit of 16 bits": (CHAT, chat(max_tokens=None, max_completion_tokens=65_535, stop=["e"]), ""),
    "a limit of 63 bits": (RESPONSES, items(max_output_tokens=2**63 - 1, stop="e", store=False), ""),
    "an agent's limit": (MESSAGES, chat(max_tokens=32_000, stop_sequences=["e", "a"]), ""),
    # schemas
    "a draft is named": (
        CHAT,
        chat(
            response_format=schema(**{"$schema": "https://json-schema.org/draft/2020-12/schema", "enum": [1]})
        ),
        "*",
    ),
    "an unknown format": (
        CHAT,
        chat(response_format=schema(type="integer", format="uint32", minimum=0, maximum=2**32 - 1)),
        "*",
    ),
    "bounds of 64 bits": (
        MESSAGES,
        chat(
            output_config={
                "format": {
                    "type": "json_schema",
                    "schema": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
                }
            }
        ),
        "",
    ),
    "remarks": (
        RESPONSES,
        items(
            text={
                "format": {
                    "type": "json_schema",
                    "name": "x",
                    "schema": {"type": "string", "title": "t", "deprecated": True, "examples": ["a"]},
                }
            },
            store=False,
        ),
        "*",
    ),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("requests")
    make_text_model(folder, template=HERMES)
    with serving("--model", str(folder), "--model-name", "demo", "--in-process") as stack:
        yield stack


@pytest.mark.parametrize(("path", "body", "names"), CASES.values(), ids=CASES)
def test_a_programs_request_is_answered(served: Stack, path: str, body: dict[str, Any], names: str) -> None:
    given = {"model": "demo", "temperature": 0, **body}
    whole = httpx.post(served.base_url + path, json=given, timeout=60)
    assert whole.status_code == 200, whole.text
    if names != "*":
        assert whole.headers.get("x-ignored-fields", "") == names
    streamed = httpx.post(served.base_url + path, json={**given, "stream": True}, timeout=60)
    assert streamed.headers.get("x-ignored-fields") == whole.headers.get("x-ignored-fields")
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert lines
    assert not [line for line in map(json.loads, lines) if line.get("type") == "error" or line.get("error")]
