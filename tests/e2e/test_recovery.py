"""A worker's death costs latency, not the conversation: real processes, killed in the middle of a turn."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.xdist_group("stack")

NUM_TOKENS = 300


def stream_tokens(base_url: str, body: dict[str, Any], on_token: Callable[[int], None]) -> str:
    """The completion's text; `on_token` is told how many chunks with text have come."""
    pieces: list[str] = []
    with (
        httpx.Client(base_url=base_url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            assert '"error"' not in line, line
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if choice["text"]:
                        pieces.append(choice["text"])
                        on_token(len(pieces))
    return "".join(pieces)


def wait_until_served(base_url: str, body: dict[str, Any]) -> None:
    """Ask as a client does that honours Retry-After, until the worker has been started again."""
    deadline = time.monotonic() + 30
    while (response := httpx.post(f"{base_url}/v1/completions", json=body, timeout=60)).status_code != 200:
        assert response.status_code == 503, response.text
        assert time.monotonic() < deadline, response.text
        time.sleep(float(response.headers["retry-after"]))


@pytest.mark.parametrize(
    ("role", "compression"),
    [
        ("decode", {"method": "full"}),
        ("prefill", {"method": "full"}),
        ("decode", {"method": "rdkv", "token_budget": 64}),
    ],
)
def test_a_turn_survives_the_death_of_a_worker_and_the_next_one_works(
    start_stack: Callable[..., Any],
    make_document: Callable[..., Any],
    role: str,
    compression: dict[str, Any],
) -> None:
    document = make_document(31, num_words=300)
    body = {
        "model": "demo",
        "prompt": document.text,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
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
        assert recoveries == (1 if role == "decode" else 0)
        wait_until_served(stack.base_url, body)
        assert stream_tokens(stack.base_url, body, lambda _: None) == undisturbed
