"""How a turn gets at its history is chosen by what that was measured to cost, and the answer is the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from kvtest import redis_server as redis_servers

pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.timeout(600)]

MAX_TOKENS = 8
NUM_TURNS = 4


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
    wait_kept(stack, session_id, response.json()["usage"])
    return response.json()  # type: ignore[no-any-return]


def wait_kept(stack: Any, session_id: str, usage: dict[str, int]) -> None:
    """A turn is committed just after its answer; until then it keeps its place in memory."""
    deadline_s = time.monotonic() + 120
    while True:
        reply = httpx.get(
            f"{stack.base_url}/v1/sessions/{session_id}",
            headers={"Authorization": f"Bearer {session_id}"},
            timeout=60,
        )
        if reply.status_code == 200 and reply.json()["tokens"] >= usage["total_tokens"] - 1:
            return
        assert time.monotonic() < deadline_s, reply.text
        time.sleep(0.02)


def choices(stack: Any, way: str, reason: str) -> float:
    return stack.prefill_metric("kvferry_history_choices_total", way=way, reason=reason)


@pytest.fixture
def gate(redis_server: Any) -> Iterator[Any]:
    gate = redis_servers.Gate(redis_server.port)
    yield gate
    gate.close()


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


def test_a_redis_that_takes_seconds_loses_to_a_model_that_takes_milliseconds(
    stack: Any, start_stack: Callable[..., Any], gate: Any, make_document: Callable[..., Any]
) -> None:
    documents = {name: make_document(42 + index, num_words=120) for index, name in enumerate("ab")}
    lines = {
        name: [f"{document.text} {document.questions[0][0]}", *(text for text, _ in document.questions[1:])]
        for name, document in documents.items()
    }
    options = (
        # room for one conversation: each turn finds the other one's in Redis alone
        *("--in-process", "--history-bytes", str(1_000_000), "--history-redis", gate.url),
        *("--history-redis-timeout-s", "60", "--history-redis-turn-timeout-s", "1"),
        *("--history-cost-half-life-s", "100000", "--retain-s", "0"),
    )
    answers: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
    with start_stack(*options) as slow:
        for name in "ab":
            answers[name].append(ask(slow, lines[name][0], f"slow-{name}"))
        gate.throttle(50_000)  # the KV of 120 words are 500 kB
        for turn in range(1, NUM_TURNS):
            for name in "ab":
                answers[name].append(ask(slow, lines[name][turn], f"slow-{name}"))
        # three turns gave up waiting; those after them did not begin to
        assert slow.prefill_metric("kvferry_history_miss_total", reason="redis_slow") == 3
        assert choices(slow, "fetch", "order") == choices(slow, "recompute", "miss") == 3
        assert choices(slow, "recompute", "cost") == 2 * (NUM_TURNS - 1) - 3
        gate.throttle(0)
    for name in "ab":
        assert [answer["kv"].get("history") for answer in answers[name]] == [None, *["recompute"] * 3]
        assert all(answer["kv"]["reused_tokens"] == 0 for answer in answers[name])
        quick = [ask(stack, text, f"quick-{name}") for text in lines[name][:NUM_TURNS]]
        assert [answer["kv"]["reused_tokens"] > 0 for answer in quick] == [False, True, True, True]
        assert [answer["choices"] for answer in answers[name]] == [answer["choices"] for answer in quick]
