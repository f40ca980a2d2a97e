"""Both workers in two ranks each, real processes: the loss of a rank costs latency, not the conversation."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.parallel import same_or_tied
from kvtest.processes import is_running
from kvtest.recovery import stream_tokens
from kvtest.transformers_model import prompt_of
from kvtest.waiting import until

from kvferry.models import DEMO_MODEL
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.parallel import lead
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator


def rank_of(pid: int) -> int:
    """The process of a worker's second rank."""
    ranks = []
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    for child in children.split():
        if b"kvferry.shared.model.parallel.follower" in Path(f"/proc/{child}/cmdline").read_bytes():
            ranks.append(int(child))
    assert len(ranks) == 1, ranks
    return ranks[0]


def await_end(pid: int) -> None:
    """A rank ends with its worker, also with one that was killed."""
    until(lambda: not is_running(pid))


def check_uneven_heads(base_url: str) -> None:
    """`adakv`: two ranks compress heads together, and their rows go to two ranks, to each another number."""
    prompt, num_tokens = prompt_of(300, seed=5), 24
    asked = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_compression": {"method": "adakv", "token_budget": 48},
    }
    answer = httpx.post(f"{base_url}/v1/completions", json=asked, timeout=120).json()
    oracle = OneProcessGenerator(load_model(DEMO_MODEL, name="demo", device="cpu")).generate(
        prompt,
        plan=plan_for("adakv", budget=Budget(tokens=48)),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2),
    )
    assert same_or_tied(answer["choices"][0]["token_ids"], oracle) > 0


def lose_in_mid_transfer(stack: Any, role: str, session_id: str) -> None:
    """A conversation's second turn loses the second rank of `role` when decode's first rank has begun to
    receive its heads, and the second one cannot have got all of its own. Asked again as the answer says, the
    turn is answered as if nothing had happened."""

    def ask(session: str, text: str) -> httpx.Response:
        body = {"session_id": session, "session_mode": "append", "prompt": text, "logit_bias": {"6": -100}}
        body |= {"model": "demo", "max_tokens": 12, "temperature": 0}
        return httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120)

    texts = ["the magic number of the green lighthouse is 8 6 3 9 .", "what is the magic number ?"]
    undisturbed = [ask(f"{session_id}-before", text).json()["choices"][0]["text"] for text in texts]
    assert ask(session_id, texts[0]).json()["choices"][0]["text"] == undisturbed[0]
    stack.wait_kept(session_id)
    pid = int(json.loads(stack.ready_path.read_text())[f"{role}_pid"])
    rank = rank_of(pid)
    os.kill(rank, signal.SIGSTOP)

    def lose() -> None:
        deadline_s = time.monotonic() + lead._HUNG_S
        try:
            while not stack.decode_metric("kvferry_arena_bytes", state="in_transfer"):
                assert time.monotonic() < deadline_s, "no transfer has begun"
                time.sleep(0.02)
        finally:
            os.kill(rank, signal.SIGKILL)

    begin_s = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        losing = pool.submit(lose)
        answer = ask(session_id, texts[1])
        losing.result()
    await_end(pid)
    assert answer.status_code == 200 or "the worker is lost: rank 1 of 2" in answer.text, answer.text
    while answer.status_code == 503 and time.monotonic() - begin_s < 240:
        time.sleep(float(answer.headers["retry-after"]))
        answer = ask(session_id, texts[1])
    assert answer.json()["choices"][0]["text"] == undisturbed[1]


@pytest.mark.full
def test_no_turn_is_lost_with_a_rank_in_mid_transfer(start_stack: Callable[..., Any]) -> None:
    with start_stack("--tensor-parallel", "2", "--recovery-wait-s", "100") as stack:
        check_uneven_heads(stack.base_url)
        for role in ("prefill", "decode"):
            lose_in_mid_transfer(stack, role, role)


@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)], ids=["killed", "hung"]
)
def test_a_stream_goes_on_where_its_rank_is_lost(
    start_stack: Callable[..., Any],
    make_document: Callable[..., Any],
    sign: signal.Signals,
) -> None:
    body = {
        "model": "demo",
        "prompt": make_document(31, num_words=300).text,
        "max_tokens": 60,
        "temperature": 0,
        "logit_bias": {"6": -100},
    }
    lost: list[tuple[int, float]] = []
    with start_stack("--tensor-parallel", "2", "--recovery-wait-s", "100") as stack:
        undisturbed = stream_tokens(stack.base_url, body, lambda _: None)
        decode_pid = int(json.loads(stack.ready_path.read_text())["decode_pid"])

        def lose_once(count: int) -> None:
            if count == 10 and not lost:
                lost.append((rank_of(decode_pid), time.monotonic()))
                os.kill(lost[0][0], sign)
                watch.start()

        def watch_worker() -> None:
            await_end(decode_pid)
            lost.append((decode_pid, time.monotonic()))

        watch = threading.Thread(target=watch_worker)
        assert stream_tokens(stack.base_url, body, lose_once) == undisturbed
        watch.join(120)
        # a ping's interval, what a rank may be silent, and the time to end on a busy machine
        assert lost[1][1] - lost[0][1] < lead._PING_INTERVAL_S + lead._HUNG_S + 30.0
        await_end(lost[0][0])
        assert stack.router_metric("kvferry_recoveries_total", role="decode") == 1
        ranks = [rank_of(int(json.loads(stack.ready_path.read_text())["prefill_pid"]))]
        # the pid of the decode worker that was started again
        decode_pid = int(json.loads(stack.ready_path.read_text())["decode_pid"])
        ranks.append(rank_of(decode_pid))
        os.kill(decode_pid, signal.SIGKILL)
        await_end(ranks[1])
    await_end(ranks[0])
