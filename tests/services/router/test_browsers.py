"""What browsers and clients with untidy base URLs ask: other origins, HEAD, OPTIONS, slashes."""

from __future__ import annotations

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
