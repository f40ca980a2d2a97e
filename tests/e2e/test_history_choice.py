"""How a turn gets its history: the answer and the metrics say it. Lost history: test_redis_faults.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtest.answers import chat, chat_body


def ask(stack: Any, text: str, session_id: str) -> dict[str, Any]:
    """One turn that ships every row as computed, of a key of its own: it begins with nobody else's KV."""
    body = chat_body(text, session_id, session_mode="append", max_tokens=8, kv_compression={"method": "full"})
    answer = chat(stack.base_url, body, key=session_id)
    stack.wait_kept(session_id, session_id)
    return answer


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
