"""What a key keeps, over the real stack: documents run once, system prompts shared, and conversations that
outlive every process as long as Redis is up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.answers import assistant, chat, chat_body, said, user

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.question import find_question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

MAX_TOKENS = 8
BUDGET = 96


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(
    stack: Any,
    messages: list[dict[str, str]],
    session_id: str,
    key: str,
    method: str = "rocketkv",
    **extra: Any,
) -> dict[str, Any]:
    compression: dict[str, Any] = {"method": method}
    if method != "full":
        compression["token_budget"] = BUDGET
    body = chat_body(messages, session_id, max_tokens=MAX_TOKENS, kv_compression=compression, **extra)
    return chat(stack.base_url, body, key=key)


def tokens_run(stack: Any) -> float:
    return stack.prefill_metric("kvferry_prefill_tokens_total")


def forget(stack: Any, key: str) -> None:
    for kind in ("sessions", "documents"):
        listed = httpx.get(f"{stack.base_url}/v1/{kind}", headers=headers(key), timeout=30).json()
        for entry in listed["data"]:
            reply = httpx.delete(
                f"{stack.base_url}/v1/{kind}/{entry['id']}", headers=headers(key), timeout=30
            )
            assert reply.status_code == 200


@pytest.mark.parametrize("method", ["rocketkv", "compactor"])
def test_a_document_is_run_once_for_a_key_and_answers_as_an_earlier_turn_would(
    method: str, stack: Any, make_document: Callable[..., Any], tokenizer: ChatTokenizer, demo_model_dir: Path
) -> None:
    key, other = f"documents-{method}", f"documents-{method}-other"
    document = make_document(31, num_words=400, num_facts=6)
    held_before = stack.prefill_metric("kvferry_history_bytes")
    before = tokens_run(stack)
    created = httpx.post(
        f"{stack.base_url}/v1/documents",
        headers=headers(key),
        json={"text": document.text, "id": "d"},
        timeout=120,
    ).json()
    assert tokens_run(stack) - before == created["tokens"]

    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    generator = OneProcessGenerator(model)
    for index in range(2):
        question = document.questions[index][0]
        before = tokens_run(stack)
        answer = ask(stack, [user(question)], f"s{index}", key, method, document_ids=["d"])
        messages = [{"role": "system", "content": document.text}, user(question)]
        prompt = tokenizer.render(messages)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["kv"]["reused_tokens"] == created["tokens"]
        assert tokens_run(stack) - before == len(prompt) - created["tokens"]
        # The oracle reads the document as a turn of its own, in the same process.
        plan, oracle = plan_for(method, budget=Budget(tokens=BUDGET)), OracleSession()
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        generator.generate(prompt[: created["tokens"]], plan=plan, sampling=sampling, session=oracle)
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        asked = find_question(tokenizer, messages, prompt)
        tokens = generator.generate(prompt, plan=plan, sampling=sampling, session=oracle, question=asked)
        assert said(answer) == tokenizer.decode([t.token_id for t in tokens])
        stack.wait_kept(f"s{index}", key)

    # Another key's same words are run from the first token on.
    before = tokens_run(stack)
    text = [{"role": "system", "content": document.text}, user(document.questions[0][0])]
    answer = ask(stack, text, "s0", other, method)
    assert answer["kv"]["reused_tokens"] == 0
    assert tokens_run(stack) - before == answer["usage"]["prompt_tokens"]
    stack.wait_kept("s0", other)
    forget(stack, key)
    forget(stack, other)
    assert stack.prefill_metric("kvferry_history_bytes") == held_before


def test_sessions_of_a_key_share_their_system_prompt_and_say_the_same(
    stack: Any, make_document: Callable[..., Any]
) -> None:
    document = make_document(32, num_words=300, num_facts=4)
    system = {"role": "system", "content": document.text}
    conversation = [system, user(document.questions[0][0])]
    alone = ask(stack, conversation, "s", "shares-nothing")
    for name in ("first", "second"):
        before = tokens_run(stack)
        answer = ask(stack, conversation, name, "shares")
        assert answer["choices"] == alone["choices"]
        run = tokens_run(stack) - before
        assert run == answer["usage"]["prompt_tokens"] - answer["kv"]["reused_tokens"]
        # The queries that RocketKV's selection reads are run again with the template's two marks behind them,
        # and no more.
        assert run == (answer["usage"]["prompt_tokens"] if name == "first" else 32 + 2)
        stack.wait_kept(name, "shares")
    assert stack.router_metric("kvferry_prompt_tokens_reused_total", source="prefix") > 0
    # Compactor's scores come of all queries, so it shares no prefix that was not named.
    assert ask(stack, conversation, "third", "shares", "compactor")["kv"]["reused_tokens"] == 0


def test_an_edited_message_branches_and_the_next_answer_is_the_branchs_own(
    stack: Any, make_document: Callable[..., Any]
) -> None:
    document = make_document(33, num_words=300, num_facts=4)
    first = user(f"{document.text} {document.questions[0][0]}")
    answer = ask(stack, [first], "s", "branches", "full")
    reply = assistant(said(answer))
    ask(stack, [first, reply, user(document.questions[1][0])], "s", "branches", "full")
    edited = [first, reply, user(document.questions[2][0])]
    branch = ask(stack, edited, "s", "branches", "full")
    assert branch["kv"]["reused_tokens"] >= answer["usage"]["prompt_tokens"]
    unshared = ask(stack, edited, "s", "branches-other", "full")
    assert branch["choices"] == unshared["choices"]
    regenerated = ask(stack, edited, "s", "branches", "full")
    assert regenerated["choices"] == branch["choices"]


def typed(stack: Any, session: str, line: str) -> str:
    """One message typed into `kvferry chat`; returns what it printed."""
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("kvferry"), "chat", "--url", stack.base_url),
            *("--session", session, "--max-tokens", "12", "--method", "full"),
        ],
        input=f"{line}\n".encode(),
        capture_output=True,
        timeout=240,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return done.stdout.decode()


@pytest.mark.timeout(900)  # seven processes start one after another
def test_chat_resumes_yesterdays_session_after_every_service_was_restarted(
    start_stack: Callable[..., Any], redis_server: Any, make_document: Callable[..., Any]
) -> None:
    document = make_document(34, num_words=60, num_facts=2)
    (question, digits), (second, more_digits) = document.questions[:2]
    options = ("--history-redis", redis_server.url, "--history-redis-timeout-s", "20")
    with start_stack(*options) as yesterday:
        assert digits in typed(yesterday, "diary", f"{document.text} {question}")
        tokens_yesterday = yesterday.wait_kept("diary")["tokens"]
    with start_stack(*options, "--in-process") as today:
        # Only the new question is sent: the document is yesterday's.
        assert more_digits in typed(today, "diary", second)
        assert today.wait_kept("diary")["tokens"] > tokens_yesterday
        assert httpx.delete(f"{today.base_url}/v1/sessions/diary", timeout=30).status_code == 200
    with redis_server.client() as client:
        (name,) = client.keys("kvferry:router:*:session:diary")
        assert set(client.hkeys(name)) == {b"generation", b"committed"}
