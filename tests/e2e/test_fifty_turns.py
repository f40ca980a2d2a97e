"""Fifty turns over the real services: every answer is the one-process conversation's, every token is run
once, every byte that is kept is accounted for, and deleting gives all of them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from kvtest import redis_server as redis_servers
from kvtest.answers import chat, chat_body, said, user
from kvtest.lanes import some
from kvtest.waiting import until

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.history.stored_format import CHUNK_HEADER_BYTES
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.question import find_question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

NUM_TURNS = 50
MAX_TOKENS = 6
BUDGET = 64


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with redis_servers.RedisServer.running() as running:
        yield running


@pytest.fixture(scope="module")
def fifty_stack(start_stack: Callable[..., Any], server: Any) -> Iterator[Any]:
    # long timeouts, so that no history is given up on a slow machine
    with start_stack("--history-redis", server.url, "--history-redis-timeout-s", "60") as running:
        yield running


@pytest.fixture(scope="module")
def model(demo_model_dir: Any) -> LanguageModel:
    return load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)


def prefill_figures(client: httpx.Client, stack: Any) -> tuple[float, float, float]:
    """Tokens run so far; bytes of history in memory and in Redis. In one scrape, for there are many."""
    text = client.get(stack.prefill_metrics_url).raise_for_status().text
    value = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"
    }
    return (
        value.get('kvferry_prefill_tokens_total{model="demo"}', 0.0),
        value['kvferry_history_bytes{tier="memory"}'],
        value['kvferry_history_bytes{tier="redis"}'],
    )


def bytes_in_redis(server: Any, session_id: str) -> tuple[int, int, int]:
    """Of the session's rows without their headers, of the headers, and of the record."""
    with server.client() as admin:
        names = admin.keys(f"kvferry:history:*/{session_id}}}:*")
        values = {name: admin.get(name) for name in names if admin.type(name) == b"string"}
    (record_bytes,) = (len(value) for name, value in values.items() if name.endswith(b":record"))
    chunks = [len(value) for name, value in values.items() if not name.endswith(b":record")]
    header_bytes = CHUNK_HEADER_BYTES * len(chunks)
    return sum(chunks) - header_bytes, header_bytes, record_bytes


@pytest.mark.parametrize("method", some(["rocketkv", "snapkv", "compactor"], "rocketkv"))
def test_fifty_turns_equal_one_process_and_leave_nothing_behind(
    fifty_stack: Any,
    server: Any,
    model: LanguageModel,
    tokenizer: ChatTokenizer,
    make_document: Callable[..., Any],
    method: str,
) -> None:
    stack, session_id = fifty_stack, f"fifty-{method}"
    generator, oracle = OneProcessGenerator(model), OracleSession()
    plan = plan_for(method, budget=Budget(tokens=BUDGET))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    document = make_document(51, num_words=150, num_facts=8)
    history: list[int] = []
    num_known = 0
    with httpx.Client(base_url=stack.base_url, timeout=240) as client:
        tokens_run_before, _, _ = prefill_figures(client, stack)
        for turn in range(NUM_TURNS):
            question = document.questions[turn * 3 % 8][0]
            messages = [user(question if turn else f"{document.text} {question}")]
            compression = {"method": method, "token_budget": BUDGET}
            fields = {"session_mode": "append", "max_tokens": MAX_TOKENS, "kv_compression": compression}
            answer = chat(stack.base_url, chat_body(messages, session_id, **fields))
            rendered = tokenizer.render(messages)
            prompt = history + rendered[1:] if turn else rendered
            asked = find_question(tokenizer, messages, prompt)
            tokens = generator.generate(prompt, plan=plan, sampling=sampling, session=oracle, question=asked)
            ids = [token.token_id for token in tokens]
            assert said(answer) == tokenizer.decode(ids), turn
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            assert answer["usage"]["completion_tokens"] == len(ids)
            # every token of the prompt that has no KV yet is run, and no other
            assert answer["kv"]["reused_tokens"] == num_known
            num_new = len(prompt) - num_known
            num_known = len(prompt) + len(ids) - 1
            end = model.spec.eos_token_ids[0]
            history = prompt + ids + ([] if ids[-1] == end else [end])
            stack.wait_kept(session_id)
            held_bytes = model.spec.kv_token_bytes * num_known
            tokens_run, memory_bytes, _ = prefill_figures(client, stack)
            assert tokens_run - tokens_run_before == num_new
            tokens_run_before = tokens_run
            assert memory_bytes == held_bytes
            if turn % 10 == 9:
                until(lambda: not stack.prefill_metric("kvferry_history_waiting", tier="redis"))
                _, _, redis_bytes = prefill_figures(client, stack)
                row_bytes, header_bytes, record_bytes = bytes_in_redis(server, session_id)
                assert row_bytes == held_bytes
                assert redis_bytes == row_bytes + header_bytes + record_bytes
        assert client.delete(f"/v1/sessions/{session_id}").status_code == 200
    assert num_known > 10 * BUDGET
    assert stack.prefill_metric("kvferry_history_miss_total") == 0
    # a worker that is busy deletes after the answer
    until(lambda: stack.prefill_metric("kvferry_history_bytes") == 0)
    until(lambda: stack.decode_metric("kvferry_arena_bytes", state="retained") == 0)
    with server.client() as admin:
        until(lambda: not admin.keys("kvferry:history:*/fifty*"))
