"""What browsers and clients with untidy base URLs ask: other origins, HEAD, OPTIONS, slashes."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "the red castle ."}],
    "max_tokens": 2,
    "user": "u",
}
PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_other_origins_are_refused_unless_they_are_listed(start_stack: Any) -> None:
    closed, listed = await start_stack(), await start_stack(cors_origins="https://app.example, http://b")
    anyone = await start_stack(cors_origins="*")
    origin = {"Origin": "https://app.example"}
    for stack, is_allowed in ((closed, False), (listed, True), (anyone, True)):
        before = await stack.http.options(CHAT, headers=PREFLIGHT)
        assert before.status_code in (200, 204)
        assert ("access-control-allow-origin" in before.headers) is is_allowed
        answer = await stack.http.post(CHAT, json=BODY, headers=origin)
        assert answer.status_code == (200 if is_allowed else 403)
        assert ("access-control-allow-origin" in answer.headers) is is_allowed
        if is_allowed:
            assert "x-ignored-fields" in answer.headers["access-control-expose-headers"].lower()
            wrong = await stack.http.post(CHAT, json={**BODY, "temperature": 9}, headers=origin)
            assert (wrong.status_code, "access-control-allow-origin" in wrong.headers) == (400, True)
    other = {"Origin": "https://other.example"}
    refused = await listed.http.post(CHAT, json=BODY, headers=other)
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)


async def test_options_without_an_origin_is_answered_with_nothing(stack: Any) -> None:
    answer = await stack.http.options(CHAT)
    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/demo"])
async def test_head_is_get_without_a_body(stack: Any, path: str) -> None:
    got, head = await stack.http.get(path), await stack.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    assert (await stack.http.head("/nothing")).status_code == 404
    assert (await stack.http.head(CHAT)).status_code == 405


async def test_slashes_too_many_are_passed_over(stack: Any) -> None:
    for path in ("/v1/models/", "//v1/models", "/v1//models//"):
        assert (await stack.http.get(f"{stack.base_url}{path}")).json()["object"] == "list"
    for path in (f"{CHAT}/", f"/{CHAT}"):
        assert (await stack.http.post(f"{stack.base_url}{path}", json=BODY)).status_code == 200
    # What an empty name would delete is not what was meant.
    assert (await stack.http.delete(f"{stack.base_url}/v1/sessions//")).status_code in (400, 404)


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("evil.example", False),
        ("evil.example:80", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("", True),
        ("localhost:1", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("192.168.0.7:8000", True),
        ("[::1]:8000", True),
        ("[fe80::1]", True),
        ("router:8000", True),
        ("gpu-box.local", True),
        ("router.kvferry.svc", True),
        ("chat.example.com", False),
    ],
)
async def test_without_keys_a_name_of_elsewhere_is_not_this_server_s(
    stack: Any, host: str, is_answered: bool
) -> None:
    """A page can have its own name point here, and its browser lets it read what this server answers."""
    for path in ("/v1/models", "/", "/health"):
        answer = await stack.http.get(path, headers={"Host": host})
        assert (answer.status_code == 200) is is_answered, path
    answer = await stack.http.post(CHAT, json=BODY, headers={"Host": host, "Origin": f"http://{host}"})
    assert answer.status_code == (200 if is_answered else 403)
    if not is_answered:
        assert "--allowed-hosts" in answer.json()["error"]["message"]


async def test_listed_names_and_servers_with_keys_take_any_host(start_stack: Any) -> None:
    listed, any_name = (
        await start_stack(allowed_hosts="chat.example.com"),
        await start_stack(allowed_hosts="*"),
    )
    keyed = await start_stack(api_keys="k")
    hosts = {"Host": "chat.example.com"}, {"Host": "other.example.com"}
    for stack, statuses in ((listed, (200, 403)), (any_name, (200, 200)), (keyed, (200, 200))):
        headers = {"authorization": "Bearer k"} if stack is keyed else {}
        found = [await stack.http.get("/v1/models", headers={**headers, **host}) for host in hosts]
        assert tuple(reply.status_code for reply in found) == statuses


@pytest.mark.parametrize("framing", ["Content-Length: 8388608", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_nobody_waits_for_a_body_of_what_is_no_post(stack: Any, method: str, framing: str) -> None:
    """It would be kept before a key was asked for."""
    host, port = stack.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} /health HTTP/1.1\r\nHost: {host}\r\n{framing}\r\n\r\n".encode())
    status = await asyncio.wait_for(reader.readline(), 10)
    assert status.split()[1] == (b"200" if method == "GET" else b"405")
    writer.close()


async def test_a_body_of_what_is_no_post_changes_nothing(start_stack: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nname = "a"\nhash = "sha256:{hashlib.sha256(b"a").hexdigest()}"\n')
    stack = await start_stack(api_keys_file=str(path))
    for headers, status in (({}, 401), ({"authorization": "Bearer a"}, 200)):
        answer = await stack.http.request("GET", "/v1/models", content=b"{}" * 1000, headers=headers)
        assert answer.status_code == status
