"""A worker that stops answering costs its streams seconds if another one is idle: real processes, SIGSTOP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from kvtest.processes import START_TIMEOUT_S, Process, started
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.xdist_group("stack")

LONGEST_SILENCE_S = 8.0


@dataclass
class Cluster:
    """A router, two prefill and two decode workers."""

    router: Process
    prefill: list[Process]
    decode: list[Process]

    def stream(self, body: dict[str, Any], on_token: Callable[[int], None]) -> tuple[str, float]:
        """The completion's text and the longest time without a token."""
        pieces: list[str] = []
        longest_s, last_s = 0.0, time.monotonic()
        url = f"http://{self.router.addresses['address']}"
        with (
            httpx.Client(base_url=url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                assert '"error"' not in line, line
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    if choice["text"]:
                        now_s = time.monotonic()
                        longest_s, last_s = max(longest_s, now_s - last_s), now_s
                        pieces.append(choice["text"])
                        on_token(len(pieces))
        return "".join(pieces), longest_s

    def ready(self) -> None:
        """Wait until every worker is up at the router."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        url = f"http://{self.router.addresses['address']}/metrics"
        while time.monotonic() < deadline_s:
            families = text_string_to_metric_families(httpx.get(url, timeout=10).text)
            up = [
                sample.value for its in families for sample in its.samples if sample.name == "kvferry_ready"
            ]
            if up == [1.0]:
                return
            time.sleep(0.1)
        raise AssertionError("the router is not ready")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
        waits = [stack.enter_context(started(folder, name, "--threads", "1")) for name in names]
        workers = [wait() for wait in waits]
        prefill, decode = workers[:2], workers[2:]
        router = stack.enter_context(
            started(
                folder,
                "router",
                *("--listen", "127.0.0.1:0"),
                *("--prefill-workers", ",".join(its.addresses["address"] for its in prefill)),
                *("--decode-workers", ",".join(its.addresses["address"] for its in decode)),
            )
        )()
        cluster = Cluster(router=router, prefill=prefill, decode=decode)
        cluster.ready()
        yield cluster


def last_used(workers: list[Process], metric: str, run: Callable[[], Any]) -> Process:
    """The worker whose counter a turn moves."""
    before = [its.metric(metric) for its in workers]
    run()
    (used,) = [its for its, count in zip(workers, before, strict=True) if its.metric(metric) > count]
    return used


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_frozen_worker_silences_its_stream_for_a_few_seconds(
    cluster: Cluster, make_document: Callable[..., Any], role: str
) -> None:
    cluster.ready()
    time.sleep(1.5)  # so that every worker that was frozen before has been asked for its status
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
    with victim.frozen() as freeze:
        if role == "prefill":
            freeze()
        text, silence_s = cluster.stream(body, lambda count: freeze() if count == 20 else None)
        assert text == undisturbed
        assert silence_s <= LONGEST_SILENCE_S
