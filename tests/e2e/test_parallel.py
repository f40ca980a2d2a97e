"""Both workers in two ranks each, real processes: a rank's death costs latency, not the conversation."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtest.recovery import stream_tokens

pytestmark = pytest.mark.xdist_group("stack")


def rank_of(pid: int) -> int:
    """The process of a worker's second rank."""
    ranks = []
    children = " ".join(its.read_text() for its in Path(f"/proc/{pid}/task").glob("*/children"))
    for child in children.split():
        if b"kvferry.shared.model.parallel.follower" in Path(f"/proc/{child}/cmdline").read_bytes():
            ranks.append(int(child))
    assert len(ranks) == 1, ranks
    return ranks[0]


def await_end(pid: int) -> None:
    """A rank ends with its worker, also with one that was killed."""
    deadline_s = time.monotonic() + 10
    status = Path(f"/proc/{pid}/status")
    # a zombie is left where nobody waits for orphans
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline_s, pid
        time.sleep(0.05)


def test_no_turn_is_lost_with_a_rank(
    start_stack: Callable[..., Any], make_document: Callable[..., Any]
) -> None:
    body = {
        "model": "demo",
        "prompt": make_document(31, num_words=300).text,
        "max_tokens": 60,
        "temperature": 0,
        "logit_bias": {"6": -100},
    }
    with start_stack("--tensor-parallel", "2", "--recovery-wait-s", "100") as stack:
        undisturbed = stream_tokens(stack.base_url, body, lambda _: None)
        killed = threading.Event()

        def kill_once(count: int) -> None:
            if count == 10 and not killed.is_set():
                killed.set()
                os.kill(rank_of(int(stack.addresses["decode_pid"])), signal.SIGKILL)

        assert stream_tokens(stack.base_url, body, kill_once) == undisturbed
        assert killed.is_set()
        assert stack.router_metric("kvferry_recoveries_total", role="decode") == 1
        ranks = [rank_of(int(stack.addresses["prefill_pid"]))]
        # the pid of the decode worker that was started again
        decode_pid = int(json.loads(stack.ready_path.read_text())["decode_pid"])
        ranks.append(rank_of(decode_pid))
        os.kill(decode_pid, signal.SIGKILL)
        await_end(ranks[1])
    await_end(ranks[0])
