"""A worker's death costs latency, not the conversation: real processes, killed in the middle of a turn."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kvtest.recovery import stream_tokens, wait_until_served

NUM_TOKENS = 300


@pytest.mark.parametrize(
    ("role", "compression", "n"),
    [
        pytest.param("decode", {"method": "full"}, 1, marks=pytest.mark.full),
        pytest.param("prefill", {"method": "full"}, 1, marks=pytest.mark.full),
        ("decode", {"method": "rdkv", "token_budget": 64}, 2),
    ],
)
def test_a_turn_survives_the_death_of_a_worker_and_the_next_one_works(
    start_stack: Callable[..., Any],
    make_document: Callable[..., Any],
    role: str,
    compression: dict[str, Any],
    n: int,
) -> None:
    document = make_document(31, num_words=300)
    body = {
        "model": "demo",
        "prompt": document.text,
        "max_tokens": NUM_TOKENS,
        "temperature": n - 1,
        "seed": 5,
        "n": n,
        "logit_bias": {"6": -100},
        "kv_compression": compression,
    }
    # A worker's start takes several processor seconds, which is long on a busy machine.
    with start_stack("--recovery-wait-s", "100") as stack:
        undisturbed = stream_tokens(stack.base_url, body, lambda _: None)
        killed = threading.Event()

        def kill_once(count: int) -> None:
            if count == 20 and not killed.is_set():
                killed.set()
                os.kill(int(stack.addresses[f"{role}_pid"]), signal.SIGKILL)

        assert stream_tokens(stack.base_url, body, kill_once) == undisturbed
        assert killed.is_set()
        recoveries = stack.router_metric("kvferry_recoveries_total", role="decode")
        assert recoveries == (n if role == "decode" else 0)
        wait_until_served(stack.base_url, body)
        assert stream_tokens(stack.base_url, body, lambda _: None) == undisturbed
