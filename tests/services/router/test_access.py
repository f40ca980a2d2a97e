"""The key file: scopes, limits, reload, and denials that are counted and logged without the secret."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import structlog
from kvtest.waiting import eventually

from kvferry.services.router.app import Timing
from kvferry.services.router.http import access
from kvferry.services.router.http.access import KeyFile
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.operate.command import make_key

BODY = {"model": "demo", "messages": [{"role": "user", "content": "the red castle ."}], "max_tokens": 2}
TIMING = Timing(recovery_backoff_s=0.01, keys_interval_s=0.05)


def entry(name: str, key: str, **fields: Any) -> str:
    lines = ["[[key]]", f'name = "{name}"', f'hash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"']
    lines += [f"{field} = {str(value).replace(chr(39), chr(34))}" for field, value in fields.items()]
    return "\n".join(lines) + "\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes the key file; returns its path."""
    path = tmp_path / "keys.toml"

    def write(*entries: str) -> str:
        partial = path.with_suffix(".part")
        partial.write_text("\n".join(entries))
        os.replace(partial, path)
        return str(path)

    return write


async def post(stack: Any, key: str, **fields: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return await stack.http.post("/v1/chat/completions", json={**BODY, **fields}, headers=headers)


async def test_keys_may_do_what_their_scopes_say(start_stack: Any, write: Any) -> None:
    path = write(
        entry("alice", "a"),
        entry("prometheus", "p", scopes=["metrics"]),
        entry("root", "r", scopes=["admin"]),
    )
    stack = await start_stack(api_keys="clear", api_keys_file=path, metrics_access="key")
    chats = {key: (await post(stack, key)).status_code for key in ("a", "p", "r", "clear", "x")}
    assert chats == {"a": 200, "p": 403, "r": 200, "clear": 200, "x": 401}
    metrics = {
        key: (await stack.http.get("/metrics", headers={"authorization": f"Bearer {key}"})).status_code
        for key in ("a", "p", "r", "clear", "x")
    }
    assert metrics == {"a": 403, "p": 200, "r": 200, "clear": 200, "x": 401}


async def test_a_file_of_metrics_keys_alone_leaves_chats_open(start_stack: Any, write: Any) -> None:
    stack = await start_stack(api_keys_file=write(entry("prometheus", "p", scopes=["metrics"])))
    assert (await post(stack, "anything")).status_code == 200


async def test_a_public_address_needs_a_key_for_chats(start_stack: Any, write: Any) -> None:
    path = write(entry("prometheus", "p", scopes=["metrics"]))
    with pytest.raises(ConfigurationError, match="no key of api_keys_file is for chat"):
        await start_stack(listen="0.0.0.0:0", api_keys_file=path)


async def test_denials_are_counted_by_name_and_logged_without_the_key(start_stack: Any, write: Any) -> None:
    stack = await start_stack(api_keys_file=write(entry("alice", "secret-a", requests_per_minute=1)))
    with structlog.testing.capture_logs() as logs:
        assert (await post(stack, "secret-a")).status_code == 200
        refused = await post(stack, "secret-a")
        assert (await post(stack, "secret-b")).status_code == 401
        assert (await stack.http.post("/v1/chat/completions", json=BODY)).status_code == 401
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60, "the rest of the window"
    assert stack.metric("access_denied_total", reason="key_requests", key="alice") == 1
    assert stack.metric("access_denied_total", reason="wrong_key", key="") == 1
    assert stack.metric("access_denied_total", reason="no_key", key="") == 1
    assert [line["key"] for line in logs if line["event"] == "request" and "key" in line] == ["alice"] * 2
    assert "secret" not in repr(logs)


async def test_tokens_and_bytes_of_a_minute_are_limited(start_stack: Any, write: Any) -> None:
    path = write(entry("t", "t", tokens_per_minute=5), entry("b", "b", bytes_per_minute=300))
    stack = await start_stack(api_keys_file=path)
    assert (await post(stack, "t")).status_code == 200
    async with asyncio.timeout(60):  # tokens are counted after the answer
        while (refused := await post(stack, "t")).status_code == 200:
            await asyncio.sleep(0.01)
    assert (refused.status_code, "tokens" in refused.text) == (429, True)
    codes = [(await post(stack, "b")).status_code for _ in range(4)]
    assert codes[0] == 200
    assert codes[-1] == 429


async def test_requests_at_the_same_time_are_limited(start_stack: Any, write: Any) -> None:
    stack = await start_stack(api_keys_file=write(entry("a", "a", max_concurrent=2), entry("b", "b")))
    stack.script.may_decode.clear()
    running = [asyncio.create_task(post(stack, key)) for key in "aaaab"]
    await eventually(lambda: sum(task.done() for task in running) == 2)
    stack.script.may_decode.set()
    answers = await asyncio.gather(*running)
    assert sorted(answer.status_code for answer in answers[:4]) == [200, 200, 429, 429]
    refused = [answer for answer in answers[:4] if answer.status_code == 429]
    assert {answer.headers["retry-after"] for answer in refused} == {"1"}, "nothing ended yet"
    assert answers[4].status_code == 200
    async with asyncio.timeout(60):  # a request is counted until shortly after its answer
        while (await post(stack, "a")).status_code != 200:
            await asyncio.sleep(0.01)


async def test_of_requests_at_the_same_time_no_more_run_while_redis_is_asked(
    start_stack: Any, redis_server: Any, write: Any
) -> None:
    path = write(entry("a", "a", max_concurrent=2, requests_per_minute=1000))
    stack = await start_stack(api_keys_file=path, history_redis=redis_server.url)
    stack.script.may_decode.clear()
    running = [asyncio.create_task(post(stack, "a")) for _ in range(24)]
    await eventually(lambda: sum(task.done() for task in running) == 22)
    stack.script.may_decode.set()
    answers = await asyncio.gather(*running)
    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 22


async def test_a_changed_file_is_read_and_a_broken_one_is_not_used(start_stack: Any, write: Any) -> None:
    stack = await start_stack(api_keys_file=write(entry("a", "a")), timing=TIMING)
    assert (await post(stack, "b")).status_code == 401
    write(entry("b", "b"))
    async with asyncio.timeout(60):
        while (await post(stack, "b")).status_code != 200:
            await asyncio.sleep(0.02)
    assert (await post(stack, "a")).status_code == 401
    write()  # no keys: nobody may call, rather than everybody
    async with asyncio.timeout(60):
        while (await post(stack, "b")).status_code != 401:
            await asyncio.sleep(0.02)
    write(entry("b", "b"))
    async with asyncio.timeout(60):
        while (await post(stack, "b")).status_code != 200:
            await asyncio.sleep(0.02)
    with structlog.testing.capture_logs() as logs:
        write("[[key]]\nname = 'c'")
        await eventually(lambda: any(line["log_level"] == "error" for line in logs))
    assert (await post(stack, "b")).status_code == 200


async def test_the_answers_of_a_removed_key_end_and_those_of_others_do_not(
    start_stack: Any, write: Any
) -> None:
    stack = await start_stack(api_keys_file=write(entry("a", "a"), entry("b", "b")), timing=TIMING)
    stack.script.may_decode.clear()
    begun: list[str] = []

    async def stream(key: str, url: str, **fields: Any) -> str:
        body = {"model": "demo", "stream": True, **fields}
        async with stack.http.stream("POST", url, json=body, headers={"x-api-key": key}) as reply:
            begun.append(url)
            return "".join([text async for text in reply.aiter_text()])

    chat = {**BODY, "max_tokens": 9}
    streams = [
        asyncio.create_task(stream("a", "/v1/chat/completions", **chat, session_id="s")),
        asyncio.create_task(stream("a", "/v1/completions", prompt=["the red castle .", "the sea ."])),
        asyncio.create_task(stream("a", "/v1/messages", **chat)),
        asyncio.create_task(stream("a", "/v1/responses", input="the red castle .")),
    ]
    whole = asyncio.create_task(post(stack, "a"))
    other = asyncio.create_task(stream("b", "/v1/chat/completions", **chat))
    await eventually(lambda: len(begun) == 5 and stack.num_active == 7)
    write(entry("b", "b"))
    async with asyncio.timeout(60):
        ends = [text.split("\n\n")[-2] for text in await asyncio.gather(*streams)]
        assert (await whole).status_code == 401
    names = ("invalid_api_key", "invalid_api_key", "authentication_error", "response.failed")
    for end, name in zip(ends, names, strict=True):
        assert name in end
        assert "not one that this server accepts" in end
    await eventually(lambda: stack.num_active == 1)
    assert stack.metric("access_denied_total", reason="wrong_key", key="a") == 5
    stack.script.may_decode.set()
    assert (await other).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "text",
    [
        "[[key]]\nname = 'a'",
        entry("a b", "k"),
        entry("a", "k", scopes=["chats"]),
        entry("a", "k", requests_per_minute=0),
        entry("a", "k", colour=1),
        entry("a", "k") + entry("a", "l"),
        entry("a", "k") + entry("b", "k"),
        "key = 1",
        "[[key",
    ],
)
def test_an_invalid_file_is_an_error_at_start_that_shows_no_hash(write: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match="api_keys_file") as refused:
        KeyFile(Path(write(text)))
    assert hashlib.sha256(b"k").hexdigest() not in refused.value.message


def test_a_new_key_fits_its_entry() -> None:
    key, text = make_key("alice")
    (made,) = tomllib.loads(text)["key"]
    assert made["hash"] == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    assert len(key) > 40
    assert make_key("alice")[0] != key
    with pytest.raises(ConfigurationError, match="name is"):
        make_key("a b")


async def test_routers_of_one_redis_count_together_and_alone_without_it(
    start_stack: Any, redis_server: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_REDIS_TIMEOUT_S", 60.0)
    path = write(entry("a", "a", requests_per_minute=3))
    one, other = [await start_stack(api_keys_file=path, history_redis=redis_server.url) for _ in range(2)]
    assert [(await post(each, "a")).status_code for each in (one, other, one, other)] == [200, 200, 200, 429]
    redis_server.kill()
    assert [(await post(one, "a")).status_code for _ in range(4)] == [200, 200, 200, 429]


async def test_every_api_takes_the_same_keys_scopes_and_limits(start_stack: Any, write: Any) -> None:
    path = write(entry("a", "a", requests_per_minute=5), entry("p", "p", scopes=["metrics"]))
    stack = await start_stack(api_keys_file=path)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": BODY,
        "/v1/messages/count_tokens": {name: BODY[name] for name in ("model", "messages")},
        "/v1/responses": {"model": "demo", "input": "the red castle .", "max_output_tokens": 2},
        "/tokenize": {"prompt": "the red castle ."},
        "/detokenize": {"tokens": [101]},
    }
    for key, status in (("x", 401), ("p", 403), ("", 401), ("a", 200), ("a", 429)):
        for url, body in bodies.items():
            reply = await stack.http.post(url, json=body, headers={"x-api-key": key})
            assert reply.status_code == status, (url, key, reply.text)
            if status != 200:
                assert (reply.json().get("type") == "error") == url.startswith("/v1/messages")
    both = {"x-api-key": "a", "authorization": "Bearer x"}
    assert (await stack.http.get("/v1/models", headers=both)).status_code == 401
    assert (await stack.http.get("/v1/models", headers={"x-api-key": "a"})).status_code == 200
