"""A model with states behind the API: conversations go on from the ends of turns, also when a worker dies,
and documents are run once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.answers import chat_body, said
from kvtest.families import FAMILIES

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def stack(start_stack: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    family = FAMILIES["qwen3_next"]
    settings = {**family.settings, "max_position_embeddings": 4096}
    folder: Path = replace(family, settings=settings).save(tmp_path_factory.mktemp("model"))
    options = ("--model", str(folder), "--model-name", "hybrid", "--recovery-wait-s", "100")
    with start_stack(
        *options, "--history-disk", str(folder / "history"), "--history-disk-bytes", "1GB"
    ) as running_stack:
        yield running_stack


def post(stack: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    """As a client does that honours Retry-After, while a worker is started again."""
    deadline_s = time.monotonic() + 180
    while True:
        response = httpx.post(f"{stack.base_url}{path}", json=body, timeout=120)
        if response.status_code != 503 or time.monotonic() > deadline_s:
            return response
        time.sleep(float(response.headers["retry-after"]))


def ask(stack: Any, session: str, content: str, **fields: object) -> dict[str, Any]:
    whole = {"model": "hybrid", "ignore_eos": True, "kv_compression": {"method": "full"}}
    body = chat_body(content, session, **{"max_tokens": NUM_TOKENS, **whole, **fields})
    response = post(stack, "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    stack.wait_kept(session)
    return answer


def test_a_conversation_runs_only_what_follows_its_last_turn(stack: Any) -> None:
    questions = ["the red castle", "where is the green tower ?", "and the lake ?"]
    num_stored = 0
    for question in questions:
        answer = ask(stack, "plain", question)
        assert answer["kv"]["reused_tokens"] == num_stored
        num_stored = answer["usage"]["prompt_tokens"] + NUM_TOKENS - 1
    models = httpx.get(f"{stack.base_url}/v1/models", timeout=30).json()["data"]
    assert "rocketkv" in models[0]["methods"]


def test_a_decode_worker_that_dies_in_the_second_turn_changes_no_answer(stack: Any) -> None:
    questions = ["the red castle", "where is the green tower ?", "and the lake ?"]
    long = {"max_tokens": 300}  # so that the answer is not over before the worker is killed
    expected = [said(ask(stack, "undisturbed", question, **long)) for question in questions]
    answers = [said(ask(stack, "killed", questions[0], **long))]
    steps = stack.decode_metric("kvferry_decode_tokens_total")

    def kill() -> None:
        while stack.decode_metric("kvferry_decode_tokens_total") < steps + 5:
            time.sleep(0.001)
        os.kill(int(stack.addresses["decode_pid"]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    answers += [said(ask(stack, "killed", question, **long)) for question in questions[1:]]
    killer.join()
    assert answers == expected
    assert stack.router_metric("kvferry_recoveries_total", role="decode") == 1


def test_a_documents_states_are_continued_from(stack: Any) -> None:
    text = " ".join(f"word {number} of the castle ." for number in range(60))
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "what is there ?"}]
    expected = said(ask(stack, "without", "", messages=messages))
    request = {"id": "castle", "text": text, "kv_compression": {"method": "full"}}
    created = post(stack, "/v1/documents", request)
    assert created.status_code in (200, 201), created.text
    for number in range(2):
        answer = ask(stack, f"reader-{number}", "what is there ?", document_ids=["castle"])
        assert answer["kv"]["reused_tokens"] == created.json()["tokens"]
        assert said(answer) == expected
