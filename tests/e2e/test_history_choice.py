"""How a turn gets its history: the answer and the metrics say it. Lost history: test_redis_faults.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

MAX_TOKENS = 8


def ask(stack: Any, text: str, session_id: str) -> dict[str, Any]:
    """One turn that ships every row as computed, of a key of its own: it begins with nobody else's KV."""
    response = httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {session_id}"},
        json={
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "session_id": session_id,
            "session_mode": "append",
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "kv_compression": {"method": "full"},
        },
        timeout=240,
    )
    assert response.status_code == 200, response.text
    stack.wait_kept(session_id, session_id)
    return response.json()  # type: ignore[no-any-return]


def choices(stack: Any, way: str, reason: str) -> float:
    return stack.prefill_metric("kvferry_history_choices_total", way=way, reason=reason)


def test_a_first_turn_has_no_history_and_the_next_ships_what_decode_lacks(
    stack: Any, make_document: Callable[..., Any]
) -> None:
    document = make_document(41, num_words=60, num_facts=2)
    first = ask(stack, f"{document.text} {document.questions[0][0]}", "choice-default")
    assert not {"history", "history_tier"} & first["kv"].keys()
    before = choices(stack, "delta", "order")
    second = ask(stack, document.questions[1][0], "choice-default")
    assert (second["kv"]["history"], second["kv"]["history_tier"]) == ("delta", "memory")
    assert choices(stack, "delta", "order") == before + 1
