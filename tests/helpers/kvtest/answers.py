"""Chat turns of sessions over HTTP, and what their answers say."""

from __future__ import annotations

import time
from typing import Any

import httpx

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.history.stored_format import read_record
from kvtest.redis_server import RedisServer

WAIT_S = 120.0


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat_body(said: str | list[dict[str, str]], session_id: str, **fields: Any) -> dict[str, Any]:
    """Return a session's greedy request. Args: said: the user's message, or the messages."""
    messages = [user(said)] if isinstance(said, str) else said
    return {"model": "demo", "messages": messages, "session_id": session_id, "temperature": 0, **fields}


def chat(base_url: str, body: dict[str, Any], *, key: str = "", is_patient: bool = False) -> dict[str, Any]:
    """Post a chat request; returns its answer. Args: is_patient: ask again while the answer is 503."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    deadline_s = time.monotonic() + WAIT_S
    while True:
        url = f"{base_url}/v1/chat/completions"
        reply = httpx.post(url, json=body, headers=headers, timeout=2 * WAIT_S)
        if reply.status_code != 503 or not is_patient or time.monotonic() > deadline_s:
            break
        time.sleep(0.2)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def known_tokens(answer: dict[str, Any]) -> int:
    """Return how many tokens have KV after a turn: all but the last generated one."""
    return int(answer["usage"]["total_tokens"] - 1)


def stored_tokens(server: RedisServer, session_id: str) -> int:
    """Return how many tokens of a session Redis has KV of."""
    with server.client() as admin:
        for key in admin.keys(f"kvferry:history:*/{session_id}}}:record"):
            session = SessionKey(owner=key.decode().split("{")[1].split("/")[0], session_id=session_id)
            return len(read_record(admin.get(key), session).token_ids)
    return 0
