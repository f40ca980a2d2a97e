"""What a running stack writes down of users' text: nothing in logs, traces and metrics; in Redis and on disk
nothing that can be read without the keys, and nothing at all once it is deleted."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from kvtest.collector import Collector
from kvtest.redis_server import RedisServer
from kvtest.waiting import until

from kvferry.tools.operate.command import keys
from kvferry.tools.operate.config import KeysConfig

WORD = "zyxquillfern"
"""In every text that users send here."""
KEY = "kvf-secret-of-alice"
METHOD = {"method": "rocketkv", "token_budget": 128}
WINDOW_BYTES = 32


def stored_text(document: str) -> str:
    return f"{document} the code of {WORD} is 4 7 1 1 ."


def post(stack: Any, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{stack.base_url}{path}", json=body, timeout=120, **options)


def chat(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "messages": messages, "max_tokens": 8, "kv_compression": METHOD, **fields}


# ---- at rest ---------------------------------------------------------------------------------------------


def redis_bytes(server: RedisServer) -> Iterator[bytes]:
    """Every key of the server and everything that is stored under it."""
    with server.client() as client:
        for key in client.scan_iter():
            kind = client.type(key).decode()
            yield key
            if kind == "string":
                yield client.get(key)
            elif kind == "hash":
                yield from (part for pair in client.hgetall(key).items() for part in pair)
            elif kind == "set":
                yield from client.smembers(key)
            else:
                assert kind == "zset", key
                yield from client.zrange(key, 0, -1)


def disk_bytes(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        yield str(path).encode()
        if path.is_file():
            yield path.read_bytes()


def store_all(stack: Any, server: RedisServer, text: str) -> None:
    """A document, a session that begins with it, and a session with the same text of its own."""
    assert post(stack, "/v1/documents", {"id": "doc", "text": text}).status_code == 200
    named = chat(f"what is the code of {WORD} ?", session_id="named", document_ids=["doc"])
    assert post(stack, "/v1/chat/completions", named).status_code == 200
    assert post(stack, "/v1/chat/completions", chat(text, session_id="own")).status_code == 200
    for session_id in ("named", "own"):
        stack.wait_kept(session_id)
    for name in ("doc", "named", "own"):
        wait_written(stack, server, name)


def wait_written(stack: Any, server: RedisServer, name: str) -> None:
    deadline_s = time.monotonic() + 180
    while True:
        waiting = [stack.prefill_metric("kvferry_history_waiting", tier=tier) for tier in ("disk", "redis")]
        with server.client() as client:
            if client.keys(f"kvferry:history:*{name}*:record") and not any(waiting):
                return
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def delete_all(stack: Any) -> None:
    for path in ("sessions/named", "sessions/own", "documents/doc"):
        assert httpx.delete(f"{stack.base_url}/v1/{path}", timeout=60).status_code == 200


def windows(folder: Path) -> list[bytes]:
    """Pieces of the K and V in a folder of history that is not encrypted."""
    found = []
    for path in folder.rglob("*.safetensors"):
        data = path.read_bytes()
        pieces = (data[at : at + WINDOW_BYTES] for at in range(4096, len(data) - WINDOW_BYTES, 4096))
        found += [piece for piece in pieces if len(set(piece)) > 8]
    return found


def test_stored_text_and_kv_need_the_keys_and_deletion_leaves_nothing(
    start_stack: Callable[..., Any], make_document: Callable[..., Any], tmp_path: Path
) -> None:
    text = stored_text(make_document(7, num_words=250).text)
    key_file = tmp_path / "keys"
    key_file.write_bytes(base64.b64encode(b"k" * 32))
    secrets: list[bytes] = []
    for options in ((), ("--at-rest-keys", str(key_file))):
        folder = tmp_path / f"kv{len(options)}"
        options += ("--history-disk", str(folder), "--history-disk-bytes", "1GiB", "--in-process")
        with RedisServer.running() as server, start_stack(*options, "--history-redis", server.url) as stack:
            store_all(stack, server, text)
            if not secrets:
                secrets = [WORD.encode(), text[-80:].encode(), *windows(folder)]
                assert len(secrets) > 20
            for tier, stored in (("redis", redis_bytes(server)), ("disk", disk_bytes(folder))):
                data = b"".join(stored)
                seen = [secret in data for secret in secrets[2 * (tier == "disk") :]]
                assert len(data) > 100_000
                # As a control, a stack without keys has all of it.
                assert seen == ["--at-rest-keys" not in options] * len(seen), tier
            if "--at-rest-keys" in options:
                # As when the key is revoked, with a prompt that has no session as well.
                assert post(stack, "/v1/chat/completions", chat(text)).status_code == 200
                keys(KeysConfig(url=stack.base_url, forget=f"sha256:{hashlib.sha256(b'').hexdigest()}"))
            else:
                delete_all(stack)
            # a tier that is busy deletes after the answer
            with server.client() as client:
                until(lambda client=client: client.keys("kvferry:history:*") == [])
            until(lambda folder=folder: [path.name for path in folder.rglob("*")] == ["lock"])
            left = b"".join(redis_bytes(server))
            assert not any(secret in left for secret in secrets)
            until(lambda stack=stack: stack.prefill_metric("kvferry_history_bytes") == 0)
            assert stack.decode_metric("kvferry_arena_bytes", state="retained") == 0


# ---- logs, traces, metrics -------------------------------------------------------------------------------


def requests(stack: Any) -> Iterator[httpx.Response]:
    """Requests with the word in every field that has users' text, right ones and wrong ones."""
    tool = {"name": WORD, "description": WORD, "parameters": {"type": "object", "title": WORD}}
    message = {"role": "user", "content": WORD}
    good = chat(WORD, session_id="s", stop=[WORD], user=WORD)
    for path, body in [
        ("chat/completions", good),
        ("chat/completions", chat(f"{WORD} again", session_id="s", stream=True)),
        ("chat/completions", chat(WORD, tools=[{"type": "function", "function": tool}])),
        ("chat/completions", chat(WORD, response_format={"type": "json_schema", "json_schema": tool})),
        ("chat/completions", chat(WORD, response_format={"type": WORD})),
        ("chat/completions", chat(WORD, temperature=WORD)),
        ("chat/completions", chat(WORD, **{WORD: WORD})),
        ("chat/completions", chat(WORD, logit_bias={WORD: 1})),
        ("chat/completions", chat(WORD, logit_bias={WORD: WORD}, metadata={WORD: 1})),
        ("chat/completions", chat(WORD, kv_compression={"method": "full", WORD: 1})),
        ("chat/completions", chat(WORD, messages=[{"role": "user", "content": WORD, WORD: 1}])),
        ("chat/completions", chat(WORD, stream_options={WORD: 1})),
        ("chat/completions", chat(WORD * 3000, max_tokens=1)),
        ("chat/completions", chat(WORD, kv_compression={"method": WORD})),
        ("chat/completions", {"model": "demo", "messages": [{"role": WORD, "content": WORD}]}),
        ("chat/completions", {"model": "demo", "messages": [{"role": "user", "content": {"a": WORD}}]}),
        ("chat/completions", {"model": "demo", "messages": WORD}),
        ("completions", {"model": "demo", "prompt": WORD, "max_tokens": 3, "suffix": WORD}),
        ("completions", {"model": "demo", "prompt": [WORD, 3], "max_tokens": 3}),
        ("messages", {"model": "demo", "messages": [message], "system": WORD, "max_tokens": 3}),
        ("responses", {"model": "demo", "input": WORD, "instructions": WORD, "max_output_tokens": 3}),
        ("responses", {"model": "demo", "input": [{"type": WORD, "content": WORD}]}),
        ("documents", {"id": "d", "text": WORD}),
        ("documents", {"id": WORD + " ", "text": WORD}),
        ("sessions/import", {"format": "kvferry.session", "messages": [message], "text": WORD}),
    ]:
        yield post(stack, f"/v1/{path}", body, headers={"authorization": f"Bearer {KEY}"})
    for content in (json.dumps(chat(WORD))[:-9].encode(), f'{{"prompt": "\xff{WORD}'.encode("latin1")):
        yield httpx.post(
            f"{stack.base_url}/v1/chat/completions",
            content=content,
            headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
            timeout=60,
        )


def cut_stream(stack: Any) -> None:
    """A client that goes away in mid-answer."""
    body = chat(WORD, stream=True, max_tokens=400, ignore_eos=True)
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{stack.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        next(answer.iter_bytes())


def test_no_text_and_no_key_is_in_logs_traces_or_metrics(start_stack: Callable[..., Any]) -> None:
    collector = Collector()
    options = ("--log-level", "debug", "--otlp-endpoint", f"http://127.0.0.1:{collector.port}")
    with start_stack(*options, "--api-keys", KEY, "--in-process") as stack:
        statuses = [answer.status_code for answer in requests(stack)]
        assert {200, 400} <= set(statuses)
        assert statuses[0] == 200
        assert max(statuses) < 500
        cut_stream(stack)
        headers = {"authorization": f"Bearer {KEY}"}
        urls = (f"{stack.base_url}/metrics?all=1", stack.prefill_metrics_url, stack.decode_metrics_url)
        metrics = [httpx.get(url, headers=headers, timeout=30).content for url in urls]
        spans = [span.SerializeToString() for _, span in collector.wait_for("", 100)]
        log = stack.log_path.read_bytes()
    collector.close()
    written = {"log": log, "metrics": b"".join(metrics), "traces": b"".join(spans)}
    for name, sign in (("log", b"request"), ("metrics", b"kvferry_requests"), ("traces", b"ship")):
        assert sign in written[name]
        found = [line for line in written[name].splitlines() if WORD.encode() in line or KEY.encode() in line]
        assert found == []
