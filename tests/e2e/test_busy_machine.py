"""On a busy machine what is slow is not thrown away, and what stands still is found: real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from kvtest import disturbed
from kvtest.processes import Process, started
from kvtest.recovery import listen
from kvtest.waiting import until

LEASE_S = 2.0
"""A reservation's; the long prompt takes more than twice as long, and another one waits behind it."""


class Cluster:
    """A router, a prefill and two decode workers."""

    def __init__(self, router: Process, decode: list[Process]) -> None:
        self.router, self.decode = router, decode
        self.url = f"http://{router.addresses['address']}"

    def count(self, metric: str) -> float:
        """Return a counter's sum over all processes that have it."""
        return sum(process.metric(metric) for process in (self.router, *self.decode))

    def decodes(self, body: dict[str, Any]) -> Process:
        """Return the worker that decodes a completion."""
        before = [worker.metric("kvferry_decode_tokens_total") for worker in self.decode]
        listen(self.url, body, lambda _: None)
        after = [worker.metric("kvferry_decode_tokens_total") for worker in self.decode]
        (used,) = [worker for worker, b, a in zip(self.decode, before, after, strict=True) if a > b]
        return used


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("busy")
    with ExitStack() as stack:
        options = ("--threads", "1", "--lease-s", f"{LEASE_S}")
        wait_prefill = stack.enter_context(
            started(folder, "prefill", "--threads", "1", main=disturbed.prefill)
        )
        waits = [
            stack.enter_context(started(folder, f"decode-{number}", *options, main=disturbed.decode))
            for number in range(2)
        ]
        prefill, decode = wait_prefill(), [wait() for wait in waits]
        router = stack.enter_context(
            started(
                folder,
                "router",
                *("--listen", "127.0.0.1:0", "--status-interval-s", "0.2"),
                *("--prefill-workers", prefill.addresses["address"]),
                *("--decode-workers", ",".join(worker.addresses["address"] for worker in decode)),
                main=disturbed.router,
            )
        )()
        cluster = Cluster(router, decode)
        until(lambda: httpx.get(f"{cluster.url}/ready", timeout=60).status_code == 200)
        yield cluster


@contextmanager
def sent(process: Process, number: signal.Signals) -> Iterator[Callable[[], None]]:
    """Give what sends a signal to a process; it is sent again at the end."""
    num_sent = 0

    def send() -> None:
        nonlocal num_sent
        num_sent += 1
        os.kill(process.popen.pid, number)

    try:
        yield send
    finally:
        if num_sent % 2:
            send()


@pytest.fixture
def body(make_document: Callable[..., Any]) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": make_document(31, num_words=40).text,
        "max_tokens": 60,
        "temperature": 0,
        "logit_bias": {"6": -100},
        "kv_compression": {"method": "full"},
        "session_id": "busy",
        "session_mode": "replace",
    }


def test_prompts_that_wait_or_run_for_longer_than_a_lease_are_answered_at_the_first_try(
    cluster: Cluster, body: dict[str, Any], make_document: Callable[..., Any]
) -> None:
    metrics = ("kvferry_leases_expired_total", "kvferry_recoveries_total")
    before = [cluster.count(metric) for metric in metrics]
    texts = [make_document(number, num_words=400).text for number in range(2)]
    bodies = [
        {**body, "prompt": text, "max_tokens": 4, "session_id": f"s-{number}"}
        for number, text in enumerate(texts)
    ]
    with ThreadPoolExecutor(2) as pool:
        heard = list(pool.map(lambda payload: listen(cluster.url, payload, lambda _: None), bodies))
    assert all(answer.text for answer in heard)
    assert min(answer.longest_s for answer in heard) > LEASE_S
    assert [cluster.count(metric) for metric in metrics] == before


def test_a_worker_whose_statuses_are_late_keeps_the_turn_whose_tokens_come(
    cluster: Cluster, body: dict[str, Any]
) -> None:
    undisturbed = listen(cluster.url, {**body, "session_id": "calm"}, lambda _: None).text
    worker = cluster.decodes({**body, "max_tokens": 2})
    before, recoveries = cluster.router.log.read_text(), cluster.count("kvferry_recoveries_total")
    with sent(worker, signal.SIGUSR1) as make_busy:
        heard = listen(cluster.url, body, lambda count: make_busy() if count == 10 else None)
    assert heard.text == undisturbed
    assert "given up" not in cluster.router.log.read_text().removeprefix(before)
    assert cluster.count("kvferry_recoveries_total") == recoveries


def test_an_engine_that_stands_still_while_it_waits_for_work_loses_its_requests_to_another_worker(
    cluster: Cluster, body: dict[str, Any]
) -> None:
    undisturbed = listen(cluster.url, {**body, "session_id": "calm"}, lambda _: None).text
    worker = cluster.decodes({**body, "max_tokens": 2})
    with sent(worker, signal.SIGUSR2) as freeze:
        freeze()
        heard = listen(cluster.url, body, lambda _: None)
        assert heard.text == undisturbed
        assert heard.longest_s < 20
        assert "the decode engine is wedged" in worker.log.read_text()
    until(lambda: "the decode engine works again" in worker.log.read_text())
