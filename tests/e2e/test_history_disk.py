"""Conversations whose history lies on disk: every service is killed at once, and the next turn continues from
what was committed, with the answers of an undisturbed conversation and of the oracle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from kvtest.answers import assistant, chat, chat_body, known_tokens, said, user
from kvtest.ports import free_port
from kvtest.processes import is_running
from kvtest.waiting import until

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.question import find_question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

MAX_TOKENS = 12
BUDGET = 128
METHOD = {"method": "rocketkv", "token_budget": BUDGET}


def ask(stack: Any, messages: list[dict[str, str]], session_id: str, mode: str = "auto") -> dict[str, Any]:
    fields = {"session_mode": mode, "max_tokens": MAX_TOKENS, "kv_compression": METHOD}
    return chat(stack.base_url, chat_body(messages, session_id, **fields))


def wait_on_disk(stack: Any, session_id: str) -> None:
    """Wait until a turn is committed, and written."""
    stack.wait_kept(session_id)
    until(lambda: not stack.prefill_metric("kvferry_history_waiting", tier="disk"))


def kill_all(stack: Any) -> None:
    """SIGKILL to every process of the stack at once."""
    addresses = json.loads(stack.log_path.with_name("ready.json").read_text())
    pids = [stack.process.pid, *(int(value) for name, value in addresses.items() if name.endswith("_pid"))]
    assert len(pids) == 4
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    stack.process.wait(60)
    until(lambda: not any(map(is_running, pids)))


def test_a_conversation_goes_on_from_disk_after_every_service_was_killed(
    start_stack: Callable[..., Any],
    make_document: Callable[..., Any],
    tokenizer: ChatTokenizer,
    demo_model_dir: Path,
    tmp_path: Path,
) -> None:
    options = ("--history-disk", str(tmp_path / "kv"), "--history-disk-bytes", "1GiB")
    document = make_document(41, num_words=400, num_facts=4)
    first_question = user(f"{document.text} {document.questions[0][0]}")
    with start_stack(*options) as yesterday:
        first = ask(yesterday, [first_question], "s")
        wait_on_disk(yesterday, "s")
        assert yesterday.prefill_metric("kvferry_history_bytes", tier="disk") > 0
        kill_all(yesterday)
    # The router had no Redis: the client sends the whole conversation.
    conversation = [first_question, assistant(said(first))]
    conversation.append(user(document.questions[1][0]))
    with start_stack(*options) as today:
        second = ask(today, conversation, "s")
        assert second["kv"]["reused_tokens"] == known_tokens(first)
        assert (second["kv"]["history"], second["kv"]["history_tier"]) == ("fetch", "disk")
        assert today.prefill_metric("kvferry_history_reused_tokens_total", tier="disk") == known_tokens(first)
        assert today.prefill_metric("kvferry_history_miss_total") == 0
        wait_on_disk(today, "s")
        assert httpx.delete(f"{today.base_url}/v1/sessions/s", timeout=30).status_code == 200
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["lock"]

    generator = OneProcessGenerator(
        load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32")
    )
    oracle = OracleSession()
    for messages, answer in (([first_question], first), (conversation, second)):
        prompt = tokenizer.render(messages)
        tokens = generator.generate(
            prompt,
            plan=plan_for("rocketkv", budget=Budget(tokens=BUDGET)),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
            session=oracle,
            question=find_question(tokenizer, messages, prompt),
        )
        assert said(answer) == tokenizer.decode([token.token_id for token in tokens])


def test_with_the_routers_sessions_in_redis_only_the_new_question_is_sent_until_redis_is_lost_too(
    start_stack: Callable[..., Any], redis_server: Any, make_document: Callable[..., Any], tmp_path: Path
) -> None:
    options = (
        # the next router takes the place of a killed one at the same address, and waits for none
        *("--listen", f"127.0.0.1:{free_port()}"),
        *("--history-disk", str(tmp_path / "kv"), "--history-disk-bytes", "1GiB"),
        *("--history-redis", redis_server.url, "--history-redis-timeout-s", "20"),
    )
    document = make_document(42, num_words=200, num_facts=4)
    questions = [document.questions[index][0] for index in range(3)]
    questions[0] = f"{document.text} {questions[0]}"
    with start_stack(*options) as yesterday:
        undisturbed = [ask(yesterday, [user(text)], "whole", "append") for text in questions]
        first = ask(yesterday, [user(questions[0])], "s", "append")
        wait_on_disk(yesterday, "s")
        kill_all(yesterday)
    with start_stack(*options) as today:
        second = ask(today, [user(questions[1])], "s", "append")
        assert second["kv"]["reused_tokens"] == known_tokens(first)
        assert second["kv"]["history_tier"] == "disk"
        assert [said(first), said(second)] == [said(answer) for answer in undisturbed[:2]]
        wait_on_disk(today, "s")
        kill_all(today)
    # Now Redis' memory is lost as well, and with it the routers' sessions.
    redis_server.kill()
    redis_server.start()
    assert redis_server.client().dbsize() == 0
    conversation = [user(questions[0]), assistant(said(first)), user(questions[1]), assistant(said(second))]
    with start_stack(*options) as tomorrow:
        third = ask(tomorrow, [*conversation, user(questions[2])], "s")
        assert third["kv"]["reused_tokens"] == known_tokens(second)
        assert third["kv"]["history_tier"] == "disk"
        assert said(third) == said(undisturbed[2])
