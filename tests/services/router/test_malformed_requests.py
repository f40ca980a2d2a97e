"""Requests that are wrong, one thing at a time: each is a 4xx in the OpenAI shape that names the field.

Takes only `base_url`, so the same table runs against a router with real workers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "demo", "messages": HELLO, **fields}


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": "demo", "prompt": "hello", **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=[{"role": "user", "content": "hello", **fields}])


# (request, param that the error must name)
BAD_FIELDS: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat(temperature=2.1), "temperature"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(top_p=1.01), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.5), "top_k"),
    (chat(min_p=-1), "min_p"),
    (chat(seed=2**64), "seed"),
    (chat(seed=1.0), "seed"),
    (chat(presence_penalty=2.5), "presence_penalty"),
    (chat(frequency_penalty=-2.5), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(repetition_penalty=10.5), "repetition_penalty"),
    (chat(n=0), "n"),
    (chat(n=17), "n"),
    (chat(n=1.0), "n"),
    (chat(n="2"), "n"),
    (chat(n=2, session_id="s"), "n"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-5), "max_tokens"),
    (chat(max_tokens=3.5), "max_tokens"),
    (chat(max_tokens=True), "max_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(max_tokens=3, max_completion_tokens=4), "max_completion_tokens"),
    (chat(stop=["a"] * 65), "stop"),
    (chat(stop=["a" * 257]), "stop[0]"),
    (chat(stop=5), "stop"),
    (chat(stop=["a", 1]), "stop[1]"),
    (chat(logprobs=5), "logprobs"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(logit_bias={"5": 101}), "logit_bias.5"),
    (chat(logit_bias={"five": 1}), "logit_bias"),
    (chat(logit_bias={"1000000000": 1}), "logit_bias"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(model=5), "model"),
    (chat(use_beam_search=True), "use_beam_search"),
    (chat(bad_words=["a"]), "bad_words"),
    (chat(skip_special_tokens=False), "skip_special_tokens"),
    (chat(skip_special_tokens=1), "skip_special_tokens"),
    (chat(add_generation_prompt=False), "add_generation_prompt"),
    (chat(min_tokens=-1), "min_tokens"),
    (chat(min_tokens=5, max_tokens=4), "min_tokens"),
    (chat(best_of=2), "best_of"),
    (chat(moderation={}), "moderation"),
    (chat(stop_regex="a+"), "stop_regex"),
    (chat(tools=[{"type": "function"}]), "tools[0].function"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
    (chat(functions=[{}]), "functions"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(response_format={"type": "json_object"}), "response_format"),
    (chat(modalities=["text", "audio"]), "modalities"),
    (chat(audio={"voice": "x"}), "audio"),
    (chat(messages=[]), "messages"),
    (chat(messages="hello"), "messages"),
    (chat(messages=None), "messages"),
    (chat(messages=["hello"]), "messages[0]"),
    (chat(messages=[{"content": "hello"}]), "messages[0].role"),
    (chat(messages=[{"role": "user"}]), "messages[0].content"),
    (message(role="wizard"), "messages[0].role"),
    (message(content=None), "messages[0].content"),
    (message(content=5), "messages[0].content"),
    (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content"),
    (message(content=[{"type": "text"}]), "messages[0].content"),
    (message(content=[{"text": "hello"}]), "messages[0].content[0].type"),
    (message(tool_calls=[{}]), "messages[0].tool_calls[0].function"),
    (
        message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
        "messages[0].tool_calls",
    ),
    (message(role="assistant", refusal=5), "messages[0].refusal"),
    (message(audio={"id": "a"}), "messages[0].audio"),
    (chat(structured_outputs={"structural_tag": "a"}), "structured_outputs.structural_tag"),
    (chat(structural_tag="a"), "structural_tag"),
    (chat(continue_final_message=True), "continue_final_message"),
    (chat(cache_salt="a", session_id="s"), "cache_salt"),
    (chat(extra_key="a", session_id="s"), "extra_key"),
    (chat(cache_salt=""), "cache_salt"),
    (chat(messages=[*HELLO, {"role": "x", "content": "y"}]), "messages[1].role"),
    (chat(session_id=""), "session_id"),
    (chat(session_id="a b"), "session_id"),
    (chat(session_id="a\n"), "session_id"),
    (chat(session_id="."), "session_id"),
    (chat(session_id=".."), "session_id"),
    (chat(session_id="ä"), "session_id"),
    (chat(session_id="x" * 129), "session_id"),
    (chat(session_id=7), "session_id"),
    (chat(session_mode="merge"), "session_mode"),
    (chat(kv_compression=5), "kv_compression"),
    (chat(kv_compression={"method": "magic"}), "kv_compression.method"),
    (chat(kv_compression={"method": 5}), "kv_compression.method"),
    (chat(kv_compression={"token_budget": 0}), "kv_compression.token_budget"),
    (chat(kv_compression={"token_budget": 1.5}), "kv_compression.token_budget"),
    (chat(kv_compression={"retention": 0}), "kv_compression.retention"),
    (chat(kv_compression={"retention": 1.5}), "kv_compression.retention"),
    (chat(kv_compression={"quality": 0}), "kv_compression.quality"),
    (chat(kv_compression={"token_budget": 5, "retention": 0.5}), "kv_compression"),
    (chat(kv_compression={"foo": 1}), "kv_compression.foo"),
    (chat(kv_compression={"parameters": 5}), "kv_compression.parameters"),
    (chat(kv_compression={"method": "snapkv", "parameters": {"foo": 1}}), "kv_compression.parameters"),
    (chat(kv_compression={"method": "kivi", "token_budget": 5}), "kv_compression.token_budget"),
    (text(prompt=None), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=["a", 5]), "prompt"),
    (text(prompt=["a"] * 129), "prompt"),
    (text(prompt=["a"] * 9, n=16), "prompt"),
    (text(prompt=["a", ""]), "prompt"),
    (text(prompt=["a", "b"], session_id="s"), "prompt"),
    (text(prompt=[1, -1]), "prompt[1]"),
    (text(prompt=[10**9]), "prompt"),
    (text(prompt=[1.5]), "prompt[0]"),
    (text(logprobs=6), "logprobs"),
    (text(logprobs=True), "logprobs"),
    (chat(echo=True), "echo"),
    (chat(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (text(echo="yes"), "echo"),
    (text(echo=True, session_id="s"), "echo"),
    (text(prompt_logprobs=1, session_id="s"), "prompt_logprobs"),
    (text(prompt_logprobs=21), "prompt_logprobs"),
    (text(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (text(max_tokens=0), "max_tokens"),
    (text(max_tokens=0, logprobs=1), "max_tokens"),
    (text(best_of=3), "best_of"),
    (text(suffix="end"), "suffix"),
    (text(max_completion_tokens=5), "max_completion_tokens"),
    (text(messages=HELLO), "messages"),
]

BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b'"text"', "object"),
    (b"null", "object"),
    (b'{"model": NaN}', "JSON"),
    (b'{"model": "\xff"}', "UTF-8"),
    (b'{"model": "\\ud800"}', "JSON"),
    (b"[" * 100_000, "JSON"),
    (b'{"seed": ' + b"9" * 10_000 + b"}", "JSON"),
]


def assert_openai_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert response.headers["x-request-id"]
    return error


async def post(base_url: str, path: str, **request: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=base_url, trust_env=False, verify=False, timeout=30.0) as client:
        return await client.post(path, **request)


@pytest.mark.parametrize(
    ("request_", "param"), BAD_FIELDS, ids=[f"{index}-{param}" for index, (_, param) in enumerate(BAD_FIELDS)]
)
async def test_wrong_field_is_named(base_url: str, request_: tuple[str, dict[str, Any]], param: str) -> None:
    path, body = request_
    response = await post(base_url, path, json=body)
    error = assert_openai_error(response, 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(
    ("field", "path"), [("model", CHAT), ("messages", CHAT), ("model", TEXT), ("prompt", TEXT)]
)
async def test_missing_field_is_named(base_url: str, field: str, path: str) -> None:
    _, body = chat() if path == CHAT else text()
    del body[field]
    error = assert_openai_error(await post(base_url, path, json=body), 400)
    assert error["param"] == field


@pytest.mark.covering(1)
@pytest.mark.parametrize(("body", "word"), BAD_BODIES, ids=range(len(BAD_BODIES)))
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_body_that_is_no_json_object_is_refused(
    base_url: str, path: str, body: bytes, word: str
) -> None:
    error = assert_openai_error(await post(base_url, path, content=body), 400)
    assert word in error["message"]


async def test_message_states_the_range(base_url: str) -> None:
    path, body = chat(temperature=3)
    message = (await post(base_url, path, json=body)).json()["error"]["message"]
    assert "3" in message
    assert "at least 0" in message
    assert "at most 2" in message


async def test_unknown_method_lists_the_allowed_ones(base_url: str) -> None:
    path, body = chat(kv_compression={"method": "magic"})
    message = (await post(base_url, path, json=body)).json()["error"]["message"]
    assert "magic" in message
    assert "rocketkv" in message
    assert "full" in message


async def test_unknown_model_is_404(base_url: str) -> None:
    path, body = chat(model="gpt-9")
    error = assert_openai_error(await post(base_url, path, json=body), 404)
    assert error["code"] == "model_not_found"
    assert "gpt-9" in error["message"]


async def test_prompt_beyond_the_context_names_the_prompt(base_url: str) -> None:
    long = "hello " * 20_000
    path, body = chat(messages=[{"role": "user", "content": long}])
    error = assert_openai_error(await post(base_url, path, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    path, body = text(prompt=long)
    error = assert_openai_error(await post(base_url, path, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("value", ["a b", "..", "", "x" * 129, "ä"])
async def test_malformed_session_header_is_refused(base_url: str, value: str) -> None:
    path, body = chat()
    headers = {"X-Kvferry-Session-ID": value.encode("latin-1")}
    error = assert_openai_error(await post(base_url, path, json=body, headers=headers), 400)
    assert error["param"] == "X-Kvferry-Session-ID"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/sessions/absent", 404),
        ("DELETE", "/v1/sessions/absent", 404),
        ("GET", "/v1/sessions/a%20b", 400),
        ("GET", "/v1/sessions/a%0A", 400),
        ("DELETE", "/v1/sessions/%2e%2e", 400),
    ],
)
async def test_unknown_routes_and_methods_have_the_error_shape(
    base_url: str, method: str, path: str, status: int
) -> None:
    async with httpx.AsyncClient(base_url=base_url, trust_env=False, verify=False, timeout=30.0) as client:
        response = await client.request(method, path)
    assert_openai_error(response, status)
    if status == 405:
        assert response.headers["allow"]


async def test_body_over_the_limit_is_413(base_url: str) -> None:
    body = json.dumps({"model": "demo", "messages": HELLO, "user": "x" * (9 << 20)}).encode()
    error = assert_openai_error(await post(base_url, CHAT, content=body), 413)
    assert str(8 << 20) in error["message"]


async def test_chunked_body_over_the_limit_is_413(base_url: str) -> None:
    async def chunks() -> Any:
        for _ in range(9):
            yield b" " * (1 << 20)

    assert_openai_error(await post(base_url, CHAT, content=chunks()), 413)


@pytest.mark.parametrize("size_bytes", [70_000, 400_000])
async def test_head_over_the_limit_is_431(base_url: str, size_bytes: int) -> None:
    headers = {f"X-Pad-{index}": "x" * 10_000 for index in range(size_bytes // 10_000)}
    response = await post(base_url, CHAT, json={}, headers=headers)
    assert response.status_code == 431
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_bytes_that_are_no_http_are_answered_in_the_error_shape(base_url: str) -> None:
    url = httpx.URL(base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"\x16\x03\x01\x02\x00 not http at all\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10.0)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
