"""An operator deletes all that an API key stored, when the key is revoked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from kvtest.waiting import eventually

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "the red castle . " * 20}],
    "temperature": 0,
    "max_tokens": 2,
}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def entry(name: str, scope: str) -> str:
    return f'[[key]]\nname = "{name}"\nhash = "sha256:{digest(name)}"\nscopes = ["{scope}"]\n'


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", "chat") + entry("bob", "chat") + entry("root", "admin"))
    return str(path)


async def store(stack: Any, key: str) -> None:
    for session_id in ("s", "t", None):
        # Another text, because what a session has is not stored once more.
        other = {"messages": [{"role": "user", "content": "the old sailor painted . " * 20}]}
        body = {**BODY, **(other if session_id is None else {"session_id": session_id})}
        assert (await stack.http.post(CHAT, json=body, headers=with_key(key))).status_code == 200
    document = {"id": "d", "text": "the old mill . " * 20}
    assert (await stack.http.post("/v1/documents", json=document, headers=with_key(key))).status_code == 200
    await eventually(lambda: stack.num_active == 0)
    await eventually(
        lambda: any(
            session.is_implicit and session.owner == digest(key) for session in stack.prefill[0].history
        )
    )


async def forget(stack: Any, key: str, by: str) -> Any:
    return await stack.http.delete(f"/v1/keys/sha256:{digest(key)}/data", headers=with_key(by))


async def test_all_of_the_key_is_deleted_and_nothing_of_another(start_stack: Any, file: str) -> None:
    stack = await start_stack(api_keys_file=file)
    for key in ("alice", "bob"):
        await store(stack, key)
    answer = await forget(stack, "alice", by="root")
    assert answer.json() == {
        "object": "key.forgotten",
        "hash": f"sha256:{digest('alice')}",
        "sessions": 2,
        "documents": 1,
    }
    for key, left in (("alice", []), ("bob", ["s", "t"])):
        found = (await stack.http.get("/v1/sessions", headers=with_key(key))).json()["data"]
        assert sorted(session["id"] for session in found) == left
    dropped = {key.owner for worker in (*stack.prefill, *stack.decode) for key in worker.dropped}
    assert dropped == {digest("alice")}
    for worker in (*stack.prefill, *stack.decode):
        assert {"s", "t", "document/d"} <= {key.session_id for key in worker.dropped}
        assert any(key.is_implicit for key in worker.dropped), "the prompt without a session, too"
    assert (await forget(stack, "alice", by="root")).json()["sessions"] == 0


async def test_only_a_key_for_admin_may(start_stack: Any, file: str) -> None:
    stack = await start_stack(api_keys_file=file)
    assert (await forget(stack, "alice", by="alice")).status_code == 403
    assert (await forget(stack, "alice", by="nobody")).status_code == 401
    wrong = await stack.http.delete("/v1/keys/alice/data", headers=with_key("root"))
    assert wrong.status_code == 400
    assert "sha256" in wrong.text


async def test_without_a_key_for_admin_nobody_may(start_stack: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", "chat"))
    stack = await start_stack(api_keys_file=str(path))
    assert (await forget(stack, "alice", by="alice")).status_code == 403
