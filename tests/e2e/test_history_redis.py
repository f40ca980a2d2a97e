"""Conversations whose history lies in Redis: workers restart between turns, Redis itself fails, and the
answers stay those of an undisturbed conversation."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from kvtest import redis_server as redis_servers
from kvtest.answers import assistant, chat, chat_body, known_tokens, said, stored_tokens, user
from kvtest.lanes import some
from kvtest.waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with redis_servers.RedisServer.running() as running:
        yield running


@pytest.fixture(scope="module")
def redis_stack(start_stack: Callable[..., Any], server: Any) -> Iterator[Any]:
    with start_stack("--history-redis", server.url, "--history-redis-timeout-s", "5") as running:
        yield running


def ask(
    stack: Any, text: str | list[dict[str, str]], session_id: str, method: dict[str, Any]
) -> dict[str, Any]:
    """One turn; waits while a worker restarts. Args: text: the next message, or the whole conversation."""
    mode = "append" if isinstance(text, str) else "replace"
    body = chat_body(text, session_id, session_mode=mode, max_tokens=12, kv_compression=method)
    return chat(stack.base_url, body, is_patient=True)


def kill_prefill(stack: Any) -> None:
    """SIGKILL, then wait until another process has taken its place."""
    ready = stack.log_path.with_name("ready.json")
    pid = json.loads(ready.read_text())["prefill_pid"]
    os.kill(int(pid), signal.SIGKILL)
    until(lambda: json.loads(ready.read_text())["prefill_pid"] != pid)


def wait_stored(server: Any, session_id: str, num_tokens: int) -> None:
    """A turn is committed just after its answer: wait until Redis has that many of the session's tokens."""
    until(lambda: stored_tokens(server, session_id) == num_tokens)


def test_a_restarted_prefill_worker_does_not_compute_again(
    redis_stack: Any, server: Any, make_document: Callable[..., Any]
) -> None:
    method = {"method": "rocketkv", "token_budget": 128}
    document = make_document(17, num_words=400, num_facts=6)
    questions = document.turns(3)
    undisturbed = [ask(redis_stack, text, "whole", method) for text in questions]
    first = ask(redis_stack, questions[0], "restarted", method)
    wait_stored(server, "restarted", known_tokens(first))
    kill_prefill(redis_stack)
    second = ask(redis_stack, questions[1], "restarted", method)
    assert second["kv"]["reused_tokens"] == known_tokens(first)
    assert (second["kv"]["history"], second["kv"]["history_tier"]) == ("fetch", "redis")
    assert redis_stack.prefill_metric("kvferry_history_reused_tokens_total", tier="redis") == known_tokens(
        first
    )
    # Known to this worker once it has written itself.
    until(lambda: redis_stack.prefill_metric("kvferry_history_bytes", tier="redis") > 0)
    third = ask(redis_stack, questions[2], "restarted", method)
    assert third["kv"]["reused_tokens"] == known_tokens(second)
    assert redis_stack.prefill_metric("kvferry_history_reused_tokens_total", tier="memory") == known_tokens(
        second
    )
    assert redis_stack.prefill_metric("kvferry_history_miss_total") == 0
    assert [said(answer) for answer in (first, second, third)] == [said(answer) for answer in undisturbed]


def test_history_lost_everywhere_at_once_is_a_miss_and_is_computed_again(
    redis_stack: Any, server: Any, make_document: Callable[..., Any]
) -> None:
    method = {"method": "full"}
    document = make_document(19, num_words=60, num_facts=3)
    questions = document.turns(3)
    undisturbed = [ask(redis_stack, text, "whole-lost", method) for text in questions]
    first = ask(redis_stack, questions[0], "lost", method)
    wait_stored(server, "lost", known_tokens(first))
    with server.client() as admin:
        for key in admin.keys("kvferry:history:*"):
            admin.unlink(key)
    kill_prefill(redis_stack)
    second = ask(redis_stack, questions[1], "lost", method)
    assert second["kv"]["reused_tokens"] == 0
    assert second["kv"]["history"] == "recompute"
    assert redis_stack.prefill_metric("kvferry_history_miss_total", reason="absent") == 1
    third = ask(redis_stack, questions[2], "lost", method)
    assert third["kv"]["reused_tokens"] == known_tokens(second)
    assert redis_stack.prefill_metric("kvferry_history_miss_total") == 1
    assert [said(answer) for answer in (first, second, third)] == [said(answer) for answer in undisturbed]


@pytest.fixture(scope="module")
def conversation(
    redis_stack: Any, make_document: Callable[..., Any]
) -> tuple[list[str], dict[str, Any], list[str]]:
    """Questions, their method, and the answers where nothing fails."""
    method = {"method": "full"}
    document = make_document(23, num_words=150, num_facts=6)
    questions = document.turns(4)
    return questions, method, [said(ask(redis_stack, text, "whole-faulty", method)) for text in questions]


@pytest.mark.parametrize("fault", some(["paused", "killed"], "killed"))
def test_a_whole_conversation_is_answered_without_redis_and_is_kept_again_after_it(
    redis_stack: Any, server: Any, conversation: tuple[list[str], dict[str, Any], list[str]], fault: str
) -> None:
    questions, method, undisturbed = conversation
    session = f"faulty-{fault}"
    answers = [ask(redis_stack, questions[0], session, method)]
    whole = [user(questions[0]), assistant(said(answers[0])), user(questions[1])]
    wait_stored(server, session, known_tokens(answers[0]))
    strike, heal = (server.pause, server.resume) if fault == "paused" else (server.kill, server.start)
    strike()
    try:
        kill_prefill(redis_stack)
        answers.append(ask(redis_stack, whole, session, method))
        assert answers[1]["kv"]["session"] == "not_stored"
        # neither tier could be asked
        assert answers[1]["kv"]["reused_tokens"] == 0
        assert answers[1]["kv"]["history"] == "recompute"
        assert redis_stack.prefill_metric("kvferry_history_miss_total", reason="redis_unavailable") >= 1
    finally:
        heal()
    with server.client() as admin:
        # the worker leaves Redis alone for a moment: another session shows when it no longer does
        deadline = time.monotonic() + 60
        while not admin.keys(f"kvferry:history:*/nudge-{fault}}}:record"):
            assert time.monotonic() < deadline
            ask(redis_stack, "hello", f"nudge-{fault}", method)
        whole += [assistant(said(answers[1])), user(questions[2])]
        answers.append(ask(redis_stack, whole, session, method))
        wait_stored(server, session, known_tokens(answers[2]))
    kill_prefill(redis_stack)
    answers.append(ask(redis_stack, questions[3], session, method))
    assert answers[3]["kv"]["reused_tokens"] == known_tokens(answers[2])
    # the ids of a restated answer may be others
    assert [said(answer) for answer in answers[:2]] == undisturbed[:2]
    response = httpx.delete(f"{redis_stack.base_url}/v1/sessions/{session}", timeout=60)
    assert response.status_code == 200
    with server.client() as admin:
        until(lambda: not admin.keys(f"kvferry:history:*/{session}}}*"))
