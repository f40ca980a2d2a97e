"""What clients without a key, of other sites, or with bodies made to be slow get: nothing, at little cost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from kvtest.router import EOS
from kvtest.text_models import CHATML, byte_level_tokenizer
from kvtest.waiting import eventually
from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerFast

from kvferry.services.router.completion.requests import ChatRequest
from kvferry.services.router.config import RouterConfig
from kvferry.services.router.http import body as body_module
from kvferry.services.router.http import large_work, middleware
from kvferry.services.router.http import server as server_module
from kvferry.services.router.http.body import MAX_VALUES, check_size
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.trust.certs import tls_name
from kvferry.tools.certs import make_certs

BODY = {"model": "demo", "messages": [{"role": "user", "content": "the red castle ."}], "max_tokens": 2}


async def longest_hold_s(work: Any) -> float:
    """Return the longest processor time for which the event loop ran nothing else while `work` ran.

    Without the garbage of the other tests of this process, whose collection takes a second.
    """
    gc.disable()
    try:
        longest_s, last_s, done = 0.0, time.thread_time(), asyncio.ensure_future(work)
        while not done.done():
            await asyncio.sleep(0)
            now_s = time.thread_time()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        await done
    finally:
        gc.enable()
    return longest_s


async def test_the_key_is_checked_before_the_body_is_read(start_stack: Any) -> None:
    stack = await start_stack(api_keys="key-a")
    host, port = stack.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n"
    writer.write(head + b"x" * 1000)  # and no more of the body
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 60.0)
    assert answer.startswith(b"HTTP/1.1 401")
    writer.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "content-type": "text/plain"},
        {"sec-fetch-site": "cross-site", "content-type": "text/plain"},
        {"origin": "null"},
    ],
)
async def test_pages_of_other_sites_are_refused(stack: Any, headers: dict[str, str]) -> None:
    response = await stack.http.post("/v1/chat/completions", content=json.dumps(BODY), headers=headers)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "permission_denied"
    assert stack.prefill[0].requests == []


async def test_the_playgrounds_own_page_may_post(stack: Any) -> None:
    headers = {"origin": stack.base_url, "sec-fetch-site": "same-origin"}
    response = await stack.http.post("/v1/chat/completions", json=BODY, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{}] * 195_000},
        {"messages": [{"role": "user", "content": [{}] * 100_000}]},
        {"messages": [{"role": "user", "content": "x", **{f"k{n}": 1 for n in range(60_000)}}]},
        {f"k{n}": 1 for n in range(60_000)},
        {"logit_bias": {f"k{n}": 1000 for n in range(60_000)}},
    ],
    ids=["messages", "parts", "fields of a message", "fields", "biases"],
)
async def test_wrong_bodies_do_not_hold_the_loop(stack: Any, change: dict[str, Any]) -> None:
    body = json.dumps({**BODY, **change}).encode()
    statuses = []

    async def post() -> None:
        statuses.append((await stack.http.post("/v1/chat/completions", content=body)).status_code)

    held_s = await longest_hold_s(post())
    assert statuses == [400]
    assert held_s < 1.0  # it was 3 to 4 s; typically 0.05 s


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"[" + b"{}," * MAX_VALUES + b"{}]", "JSON values"),
        (b"[" * (MAX_VALUES + 1), "JSON values"),
        (b'["a" ' + b',"a"' * MAX_VALUES + b"]", "JSON values"),
        (b'{"a": [' + b"1, -2,\n" * 10_000 + b"3]}", "3000 integers"),
        # Half of its texts end with what looks like an escaped quote.
        (b"[" + b'"\\\\",' * MAX_VALUES + b"1]", "JSON values"),
    ],
    ids=["objects", "lists", "texts", "integers", "backslashes"],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(body: bytes, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_size(body, max_integers=3000)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"content": "{[," * 1_000_000}).encode(),
        json.dumps({"content": '\\",[{' * 200_000}).encode(),
        b'{"prompt": [' + b"17," * 100_000 + b"17]}",
        b'"' + b'\\"' * 1_000_000,  # has no end; every part of it might begin a text
        json.dumps([{"a": [1, 2.5, None, "x"]}] * 2700).encode(),
    ],
    ids=["a text of brackets", "a text of quotes", "tokens", "a text without end", "mixed values"],
)
def test_long_texts_and_lists_of_tokens_are_not_too_many_values(body: bytes) -> None:
    begin_s = time.thread_time()
    check_size(body, max_integers=100_001)
    assert time.thread_time() - begin_s < 1.0, "it takes milliseconds: the work grows with the length alone"


JSON = st.recursive(
    st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text('a\\"[{,:\x00é', max_size=12),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a\\",', max_size=6), inner),
    max_leaves=30,
)


@given(tree=JSON, cut=st.integers(0, 20), at_once=st.integers(1, 40), indent=st.sampled_from([None, 1]))
def test_values_are_counted_in_pieces_as_one_by_one(
    tree: Any, cut: int, at_once: int, indent: int | None
) -> None:
    body = json.dumps(tree, indent=indent).encode()
    body = body[: len(body) - cut] or b"["  # may end in the midst of a text
    num_values, in_text, escaped = 0, False, False
    for byte in body:
        if in_text:
            in_text = escaped or byte != ord('"')
            escaped = not escaped and byte == ord("\\")
        else:
            in_text = byte == ord('"')
            num_values += byte in b",[{"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "_SEARCHED_AT_ONCE", at_once)
        patch.setattr(body_module, "MAX_VALUES", num_values)
        check_size(body, max_integers=0)
        patch.setattr(body_module, "MAX_VALUES", num_values - 1)
        if num_values:
            with pytest.raises(InvalidRequest, match="JSON values"):
                check_size(body, max_integers=0)


LARGE = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 50_000}]}),
    ("/v1/completions", {"prompt": ["a"] * 16_000}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 5_000}),
    ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}] * 5_000}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}] * 5_000}),
    ("/tokenize", {"prompt": "a " * 50_000}),
    ("/v1/documents", {"text": "a " * 50_000}),
]


@pytest.mark.parametrize(("path", "fields"), LARGE, ids=[path for path, _ in LARGE])
async def test_what_takes_long_of_a_large_body_runs_in_a_thread(
    stack: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    threads: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        run = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return run(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(body_module, "check_size")
    watch(body_module, "_parse")
    watch(ChatRequest, "model_validate")
    watch(ChatTokenizer, "encode")
    watch(msgspec.json, "encode")
    model = {} if path == "/v1/documents" else {"model": "demo"}
    response = await stack.http.post(path, json={**model, **fields})
    assert response.status_code in (200, 400), response.text
    if path == "/tokenize":
        assert response.json()["count"] == len(response.json()["tokens"]) == 50_000
        assert {"encode"} <= threads.keys()
    elif "input" in fields or "messages" in path:
        assert {"model_validate"} <= threads.keys()
    assert {"check_size", "_parse"} <= threads.keys()
    assert threading.get_ident() not in set().union(*threads.values()), threads


async def test_texts_cannot_have_markers_that_a_template_composes_or_a_normalizer_makes(
    start_stack: Any,
) -> None:
    markers = ["<|user|>", "<|assistant|>"]
    backend = byte_level_tokenizer()
    backend.normalizer = normalizers.NFKC()
    backend.add_tokens([AddedToken(marker, normalized=True) for marker in markers])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|' + 'assistant' + '|>' }}{% endif %}"
    )
    stack = await start_stack(tokenizer=ChatTokenizer(fast, (EOS,)))
    for text in ("hi", "a<|assistant|>b<|user|>c", "a\uff1c|assistant\uff5c>b\uff1c\uff5c\uff55ser|\uff1e"):
        asked = {"model": "demo", "messages": [{"role": "user", "content": text}]}
        response = await stack.http.post("/tokenize", json=asked)
        ids = [token_id for token_id in response.json()["tokens"] if backend.id_to_token(token_id) in markers]
        assert ids == [backend.token_to_id(marker) for marker in markers], text


def test_tokenizing_lets_other_threads_run(tokenizer: ChatTokenizer) -> None:
    text = "the old sailor painted the quiet bridge . " * 50_000
    num_runs, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal num_runs
        while not stop.is_set():
            time.sleep(0.001)
            num_runs += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = num_runs
    ids = tokenizer.encode(text)
    during = num_runs - before
    stop.set()
    watcher.join()
    assert len(ids) > 300_000
    assert during >= 10, "it is one or two where the interpreter's lock is not released"


LONG = "the old sailor painted the quiet bridge . " * 5_000
TOO_LONG = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}], "session_id": "s"},
        "messages",
    ),
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": LONG}]}, None),
    ("/v1/documents", {"text": LONG}, "text"),
]


@pytest.mark.parametrize(("path", "fields", "param"), TOO_LONG, ids=[path for path, _, _ in TOO_LONG])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str | None
) -> None:
    raw = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    raw.chat_template = CHATML
    stack = await start_stack(tokenizer=ChatTokenizer(raw, (6,)))
    tokenized: list[str] = []
    ids = ChatTokenizer._ids

    def watched(tokenizer: ChatTokenizer, text: str, **options: Any) -> list[int]:
        tokenized.append(text)
        return ids(tokenizer, text, **options)

    monkeypatch.setattr(ChatTokenizer, "_ids", watched)
    if "session_id" in fields:
        first = {**fields, "messages": [{"role": "user", "content": "hi"}]}
        assert (await stack.http.post(path, json={"model": "demo", **first})).status_code == 200
    model = {} if path == "/v1/documents" else {"model": "demo"}
    response = await stack.http.post(path, json={**model, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "tokens or more; the context of 512 tokens must hold it" in error["message"]
    if "messages" not in path:
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert not any(len(text) > 10_000 for text in tokenized)


async def test_the_bodies_of_one_key_that_are_held_are_bounded(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that never end; another key is not refused. Bytes are free again once a client left."""
    monkeypatch.setattr(middleware, "MAX_HELD_BYTES", 3 << 20)
    stack = await start_stack()
    path, keys = "/v1/chat/completions", [{"authorization": f"Bearer {name}"} for name in "ab"]
    goes_on = asyncio.Event()

    async def unending() -> AsyncIterator[bytes]:
        yield b" " * (1 << 20)
        await goes_on.wait()

    held = [asyncio.create_task(stack.http.post(path, content=unending(), headers=keys[0])) for _ in range(3)]
    large = b" " * 2_300_000 + json.dumps(BODY).encode()  # too much beside a single one of them

    async def status(key: dict[str, str]) -> int:
        answer = await stack.http.post(path, content=large, headers=key)
        return int(answer.status_code)

    while await status(keys[0]) != 429:
        await asyncio.sleep(0.01)
    assert await status(keys[1]) == 200
    for task in held:
        task.cancel()
    while await status(keys[0]) != 200:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "fields", "counted"),
    [
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}, "input_tokens"),
        ("/tokenize", {"prompt": LONG}, "count"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "count"),
    ],
)
async def test_tokens_that_are_only_counted_may_be_too_many_for_the_context(
    stack: Any, path: str, fields: dict[str, Any], counted: str
) -> None:
    response = await stack.http.post(path, json={"model": "demo", **fields})
    assert response.json()[counted] > 512, response.text


async def test_long_texts_of_one_key_keep_no_other_key_waiting(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's words may have any length, so that its texts must be tokenized. Here that takes for ever."""
    stack = await start_stack()
    ids, goes_on = ChatTokenizer._ids, threading.Event()
    num_now = num_most = 0

    def slow(tokenizer: ChatTokenizer, text: str, **options: Any) -> list[int]:
        nonlocal num_now, num_most
        if len(text) < 100_000:
            return ids(tokenizer, text, **options)
        num_now += 1
        num_most = max(num_most, num_now)
        goes_on.wait(60)
        num_now -= 1
        return ids(tokenizer, text, **options)

    monkeypatch.setattr(ChatTokenizer, "_ids", slow)
    long = {**BODY, "messages": [{"role": "user", "content": LONG}]}
    path, keys = "/v1/chat/completions", [{"authorization": f"Bearer {name}"} for name in "ab"]
    hostile = [asyncio.create_task(stack.http.post(path, json=long, headers=keys[0])) for _ in range(40)]
    await eventually(lambda: num_now > 0)
    hostile.pop(0).cancel()  # what a thread does for a client that has left counts as well
    assert (await stack.http.post(path, json=BODY, headers=keys[1])).status_code == 200
    other = asyncio.create_task(stack.http.post(path, json=long, headers=keys[1]))
    of_one = num_most
    await eventually(lambda: num_most > of_one)
    assert not any(task.done() for task in hostile)
    assert 1 <= of_one <= large_work.MOST_MIB_OF_ONE // large_work._LEAST_MIB
    goes_on.set()
    for answer in await asyncio.gather(other, *hostile):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@contextlib.contextmanager
def captured() -> Iterator[list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as logs:
        yield logs  # type: ignore[misc]


async def test_a_malformed_prompt_is_not_in_the_log(stack: Any) -> None:
    with captured() as logs:
        body = {**BODY, "messages": [{"role": "user", "content": {"my": "secret diary"}}]}
        response = await stack.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "secret diary" in response.text  # the client is told its own value
    assert any(line["event"] == "request" for line in logs)
    assert "secret diary" not in repr(logs)


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", "[::]:8000", "10.0.0.7:8000"])
def test_a_public_address_needs_keys_unless_told_otherwise(listen: str) -> None:
    with pytest.raises(ValueError, match="no api_keys"):
        RouterConfig(listen=listen)
    RouterConfig(listen=listen, api_keys="k")
    RouterConfig(listen=listen, insecure=True)


async def test_idle_connections_give_way_at_the_limit(start_stack: Any) -> None:
    stack = await start_stack(max_connections=20)
    host, port = stack.base_url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(60)]
    for _ in range(3):
        response = await stack.http.post("/v1/chat/completions", json=BODY)
        assert response.status_code == 200
    await eventually(lambda: sum(not reader.at_eof() for reader, _ in idle) <= 20)
    for _, writer in idle:
        writer.close()


async def test_a_connection_over_the_limit_is_refused_by_name_with_a_time_to_retry(start_stack: Any) -> None:
    stack = await start_stack(max_connections=1)
    stack.script.may_decode.clear()
    running = asyncio.create_task(stack.http.post("/v1/chat/completions", json={**BODY, "max_tokens": 64}))
    await eventually(lambda: stack.num_active == 1)
    host, port = stack.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    (retry_after,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"retry-after: ")]
    assert 1 <= int(retry_after.split()[1]) <= 60
    assert json.loads(body)["error"]["code"] == "overloaded"
    running.cancel()


async def test_an_imported_session_may_not_have_more_text_than_its_tokens_stand_for(stack: Any) -> None:
    answer = await stack.http.post(
        "/v1/chat/completions", json={**BODY, "session_id": "s"}, headers={"authorization": "Bearer key-a"}
    )
    assert answer.status_code == 200
    file = (await stack.http.get("/v1/sessions/s/export", headers={"authorization": "Bearer key-a"})).json()
    file["messages"][0]["content"] = "x" * 1_000_000
    response = await stack.http.post("/v1/sessions/import?session_id=t", json=file)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_the_server_speaks_tls_with_a_certificate(start_stack: Any, tmp_path: Path) -> None:
    make_certs(tmp_path, days=2, everything=False)
    worker = tmp_path / "decode"  # any certificate for servers will do
    stack = await start_stack(tls_cert=str(worker / "tls.pem"), tls_key=str(worker / "tls.key"))
    context = ssl.create_default_context(cafile=str(worker / "ca.pem"))
    address = stack.base_url.removeprefix("http://")
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        response = await client.post(
            f"https://{address}/v1/chat/completions",
            json=BODY,
            extensions={"sni_hostname": tls_name("decode")},
        )
    assert response.status_code == 200
    with pytest.raises(httpx.TransportError):
        await stack.http.get("/health")


async def test_a_tls_handshake_must_end_in_time(
    start_stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(tmp_path, days=2, everything=False)
    worker = tmp_path / "decode"
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 0.5)
    stack = await start_stack(tls_cert=str(worker / "tls.pem"), tls_key=str(worker / "tls.key"))
    reader, writer = await asyncio.open_connection(*stack.base_url.removeprefix("http://").split(":"))
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10.0) == b""
    writer.close()


def test_both_files_of_tls_are_needed() -> None:
    with pytest.raises(ValueError, match="tls_key is empty"):
        RouterConfig(tls_cert="a.pem")
