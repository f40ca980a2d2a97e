"""A worker that stops answering costs its streams seconds if another one is idle: real processes, SIGSTOP."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from kvtest.lanes import some
from kvtest.processes import Process, started
from kvtest.recovery import LONGEST_SILENCE_S, NOTICED, listen
from kvtest.waiting import until

LONGEST_TURN_S = 8.0
"""A turn takes a small part of a second then, and a worker's silence is borne for ten."""


@dataclass
class Cluster:
    """A router, two prefill and two decode workers."""

    router: Process
    prefill: list[Process]
    decode: list[Process]

    def stream(self, body: dict[str, Any], on_token: Callable[[int], None]) -> tuple[str, float]:
        """The completion's text and the longest time without a token."""
        heard = listen(f"http://{self.router.addresses['address']}", body, on_token)
        return heard.text, heard.longest_s

    def logged(self, event: str) -> int:
        """Return how often the router has logged an event."""
        return self.router.log.read_text().count(event)

    def ready(self) -> None:
        """Wait until every worker is up at the router."""
        url = f"http://{self.router.addresses['address']}/ready"
        until(lambda: httpx.get(url, timeout=60).status_code == 200)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        # Of equally busy workers the one with more free bytes gets a session, so both have the same memory.
        roles = {"prefill": ("--threads", "1", "--history-bytes", "1GiB"), "decode": ("--threads", "1")}
        waits = [
            stack.enter_context(started(folder, f"{role}-{number}", *options))
            for role, options in roles.items()
            for number in range(2)
        ]
        workers = [wait() for wait in waits]
        prefill, decode = workers[:2], workers[2:]
        router = stack.enter_context(
            started(
                folder,
                "router",
                *("--listen", "127.0.0.1:0"),
                *("--prefill-workers", ",".join(worker.addresses["address"] for worker in prefill)),
                *("--decode-workers", ",".join(worker.addresses["address"] for worker in decode)),
            )
        )()
        cluster = Cluster(router=router, prefill=prefill, decode=decode)
        cluster.ready()
        yield cluster


def last_used(workers: list[Process], metric: str, run: Callable[[], Any]) -> Process:
    """The worker whose counter a turn moves."""
    before = [worker.metric(metric) for worker in workers]
    run()
    (used,) = [worker for worker, count in zip(workers, before, strict=True) if worker.metric(metric) > count]
    return used


@pytest.mark.parametrize("role", some(["decode", "prefill"], "decode"))
def test_a_frozen_worker_silences_its_stream_for_a_few_seconds(
    cluster: Cluster, make_document: Callable[..., Any], role: str
) -> None:
    document = make_document(31, num_words=120)
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": document.text,
        "max_tokens": 300 if role == "decode" else 8,
        "temperature": 0,
        "logit_bias": {"6": -100},
        "kv_compression": {"method": "full"},
        "session_id": f"frozen-{role}",
        "session_mode": "replace",
    }
    undisturbed, _ = cluster.stream({**body, "session_id": f"calm-{role}"}, lambda _: None)
    workers, metric = {
        "decode": (cluster.decode, "kvferry_decode_tokens_total"),
        "prefill": (cluster.prefill, "kvferry_prefill_tokens_total"),
    }[role]
    # A session's next turn goes to the workers of its last one.
    first_turn = {**body, "max_tokens": 2}
    victim = last_used(workers, metric, lambda: cluster.stream(first_turn, lambda _: None))
    num_noticed, num_up = cluster.logged(NOTICED[role]), cluster.logged("worker up")
    with victim.frozen() as freeze:
        if role == "prefill":
            freeze()
        text, silence_s = cluster.stream(body, lambda count: freeze() if count == 20 else None)
        assert text == undisturbed
        assert cluster.logged(NOTICED[role]) > num_noticed
        assert silence_s <= LONGEST_SILENCE_S
    until(lambda: cluster.logged("worker up") > num_up)


def test_a_frozen_prefill_worker_delays_no_session_of_the_other(
    cluster: Cluster, make_document: Callable[..., Any]
) -> None:
    """The rows of its sessions' answers wait for it; those of others do not wait behind them."""
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": make_document(33, num_words=60).text,
        "max_tokens": 4,
        "temperature": 0,
        "logit_bias": {"6": -100},
        "session_mode": "replace",
    }
    sessions: dict[int, list[str]] = {0: [], 1: []}
    number = 0
    while min(map(len, sessions.values())) < 4:
        assert number < 40, sessions
        session_id = f"stalled-{number}"
        # A prompt of its own, so that no other session's worker is preferred.
        first = {**body, "prompt": f"{number} {body['prompt']}", "session_id": session_id}
        used = last_used(
            cluster.prefill,
            "kvferry_prefill_tokens_total",
            lambda first=first: cluster.stream(first, lambda _: None),
        )
        sessions[cluster.prefill.index(used)].append(session_id)
        number += 1
    victim = cluster.prefill[0]
    longer = {**body, "max_tokens": 200}
    with victim.frozen() as freeze, ThreadPoolExecutor(4) as pool:
        begun = threading.Barrier(5, timeout=60)

        def stalled(session_id: str) -> None:
            # What becomes of these streams is the other tests' matter.
            with contextlib.suppress(AssertionError, httpx.HTTPError):
                cluster.stream(
                    {**longer, "session_id": session_id}, lambda count: begun.wait() if count == 5 else None
                )

        running = [pool.submit(stalled, session_id) for session_id in sessions[0][:4]]
        begun.wait()
        freeze()
        for _ in range(2):
            for session_id in sessions[1][:4]:
                begin_s = time.monotonic()
                cluster.stream({**body, "session_id": session_id}, lambda _: None)
                assert time.monotonic() - begin_s <= LONGEST_TURN_S
        for future in running:
            future.result(120)
