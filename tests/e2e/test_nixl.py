"""Three processes whose blocks go through NIXL: the same tokens, whoever dies in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import kvtest.wire as kit
import pytest

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

pytestmark = kit.needs_nixl

MAX_TOKENS = 24
MAX_ATTEMPTS = 20
"""Of transfers, until one is met in its middle: each lasts about as long as asking for a metric does."""
MAX_STARTS = 3
SLOW_CREDIT_BYTES = 12 << 10
"""More than what goes over the network; so little that a transfer takes a while."""


@pytest.fixture(scope="module")
def nixl_stack(start_stack: Callable[..., Any], prompt: list[int]) -> Iterator[Any]:
    """A stack whose workers are connected. A busy machine may take longer for that than they wait for NIXL;
    then they do without for a while, and another stack is started."""
    options = ("--transport", "nixl", "--credit-bytes", str(SLOW_CREDIT_BYTES), "--recovery-wait-s", "100")
    for _ in range(MAX_STARTS):
        with start_stack(*options) as running:
            complete(running, prompt, {"method": "full"})
            if running.prefill_metric("kvferry_block_connections_total", transport="network") == 0:
                yield running
                return
    pytest.fail(f"in {MAX_STARTS} starts NIXL connected the workers never")


@pytest.fixture(scope="module")
def prompt(make_document: Callable[..., Any], tokenizer: ChatTokenizer) -> list[int]:
    document = make_document(7, num_words=1100)
    return tokenizer.render([{"role": "user", "content": f"{document.text} {document.questions[0][0]}"}])


def complete(stack: Any, prompt: list[int], compression: dict[str, Any]) -> str:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "kv_compression": compression,
    }
    response = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=240)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize(
    ("method", "budget"),
    [
        pytest.param("full", None, marks=pytest.mark.full, id="full"),
        pytest.param("rocketkv", 256, marks=pytest.mark.full, id="rocketkv"),
        pytest.param("rdkv", 256, id="rdkv"),
    ],
)
def test_answers_equal_their_one_process_selves(
    nixl_stack: Any,
    prompt: list[int],
    tokenizer: ChatTokenizer,
    demo_model_dir: Path,
    method: str,
    budget: int | None,
) -> None:
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    plan = plan_for(method, budget=Budget(tokens=budget)) if budget else plan_for(method)
    compression = {"method": method, **({"token_budget": budget} if budget else {})}
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    expected = OneProcessGenerator(model).generate(prompt, plan=plan, sampling=sampling)
    text = tokenizer.decode([token.token_id for token in expected])
    assert complete(nixl_stack, prompt, compression) == text
    assert nixl_stack.prefill_metric("kvferry_block_connections_total", transport="nixl") >= 1
    assert nixl_stack.prefill_metric("kvferry_block_connections_total", transport="network") == 0


def test_what_was_generated_goes_back_through_nixl(nixl_stack: Any) -> None:
    body = {
        "model": "demo",
        "session_id": "through-nixl",
        "messages": [{"role": "user", "content": "remember that the pin of the red castle is 1234 ."}],
        "max_tokens": 8,
    }
    httpx.post(f"{nixl_stack.base_url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    nixl_stack.wait_kept("through-nixl")
    assert nixl_stack.decode_metric("kvferry_history_returned_bytes_total") > 0
    assert nixl_stack.decode_metric("kvferry_block_connections_total", transport="nixl") == 1


def test_a_decode_worker_killed_in_the_middle_of_a_transfer_costs_no_token(
    nixl_stack: Any, prompt: list[int]
) -> None:
    undisturbed = complete(nixl_stack, prompt, {"method": "full"})
    pid, killed, stop = int(nixl_stack.addresses["decode_pid"]), threading.Event(), threading.Event()

    def kill_in_transfer() -> None:
        while not stop.is_set() and not killed.is_set():
            if nixl_stack.decode_metric("kvferry_arena_bytes", state="in_transfer"):
                os.kill(pid, signal.SIGKILL)
                killed.set()
            time.sleep(0.002)

    killer = threading.Thread(target=kill_in_transfer)
    killer.start()
    try:
        for _ in range(MAX_ATTEMPTS):
            assert complete(nixl_stack, prompt, {"method": "full"}) == undisturbed
            if killed.is_set():
                break
    finally:
        stop.set()
        killer.join(30)
    assert killed.is_set()
    assert complete(nixl_stack, prompt, {"method": "full"}) == undisturbed
