"""Three routers on a Redis Cluster of six processes, with two workers of each role.

A session's turns go to its workers, whichever router runs them. Under load, while a master is killed, every
answer is the undisturbed one, every committed turn is there, and nobody waits for long.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from kvtest.answers import chat_body, said
from kvtest.documents import make_document
from kvtest.processes import Process, started
from kvtest.redis_cluster import NODE_TIMEOUT_MS, RedisCluster
from kvtest.waiting import until

KEYS = ("key-0", "key-1", "key-2", "key-3")
DOCUMENT = make_document(5, num_words=150, num_facts=8)
NUM_ROUNDS = 2
"""Of the questions, so that turns run before, during and after the failover."""
LONGEST_PAUSE_S = 60.0
"""It takes a few seconds where the machine has nothing else to do."""
WHOLE: dict[str, Any] = {"session_mode": "append", "kv_compression": {"method": "full"}}
HISTORY_BYTES = 8 << 20
"""Of a prefill worker's memory: 2048 of the demo model's tokens."""


@dataclass(kw_only=True)
class Routers:
    processes: list[Process]
    workers: dict[str, list[Process]]
    turn: Any = field(default_factory=itertools.count)
    """Each request goes to the next router."""
    num_answers: int = 0

    def request(self, method: str, path: str, key: str, **options: Any) -> Any:
        router = self.processes[next(self.turn) % len(self.processes)]
        url = f"http://{router.addresses['address']}{path}"
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.request(method, url, headers=headers, timeout=120, **options)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()

    def converse(self, key: str, session_id: str) -> tuple[list[str], float]:
        """A whole conversation; returns its answers and the longest wait for one."""
        texts, longest_s = [], 0.0
        for turn, (question, _) in enumerate(NUM_ROUNDS * DOCUMENT.questions):
            fields = {"document_ids": ["d"]} if turn == 0 else {}
            body = chat_body(question, session_id, max_tokens=5, **WHOLE, **fields)
            begin_s = time.monotonic()
            answer = self.request("POST", "/v1/chat/completions", key, json=body)
            longest_s = max(longest_s, time.monotonic() - begin_s)
            texts.append(said(answer))
            self.num_answers += 1
        return texts, longest_s


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisCluster]:
    with RedisCluster.running() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def routers(redis: RedisCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    folder = tmp_path_factory.mktemp("routers")
    with ExitStack() as stack:
        store = ("--history-redis", redis.url, "--history-bytes", str(HISTORY_BYTES))
        store += ("--history-redis-timeout-s", "10")
        waits = {
            role: [
                stack.enter_context(started(folder, f"{role}-{index}", "--threads", "1", *options))
                for index in range(2)
            ]
            for role, options in (("prefill", store), ("decode", ()))
        }
        workers = {role: [wait() for wait in pending] for role, pending in waits.items()}
        options = ["--listen", "127.0.0.1:0", "--history-redis", redis.url, "--api-keys", ",".join(KEYS)]
        for role, role_workers in workers.items():
            # names, as of a headless service
            names = [worker.addresses["address"].replace("127.0.0.1", "localhost") for worker in role_workers]
            options += [f"--{role}-workers", ",".join(names)]
        routers = [stack.enter_context(started(folder, f"router-{index}", *options)) for index in range(3)]
        processes = [wait() for wait in routers]
        for router in processes:
            url = f"http://{router.addresses['address']}/ready"
            until(lambda url=url: httpx.get(url, timeout=60).status_code == 200)
        yield Routers(processes=processes, workers=workers)


def test_turns_of_a_session_go_to_its_workers_whichever_router_runs_them(routers: Routers) -> None:
    """The pin of one router is obeyed in the turns of the others, too."""
    counters = {"prefill": "kvferry_prefill_tokens_total", "decode": "kvferry_decode_tokens_total"}

    def counts() -> dict[str, float]:
        return {
            worker.addresses["address"]: worker.metric(counters[role])
            for role, workers in routers.workers.items()
            for worker in workers
        }

    def ask(session_id: str, text: str, **fields: Any) -> tuple[set[str], dict[str, Any]]:
        """A turn at the next router; returns the addresses of the workers that ran it, and its `kv`."""
        body = chat_body(text, session_id, max_tokens=4, ignore_eos=True, **WHOLE, **fields)
        before = counts()
        answer = routers.request("POST", "/v1/chat/completions", KEYS[0], json=body)
        return {address for address, count in counts().items() if count > before[address]}, answer["kv"]

    for name, fields in (("plain", {}), ("pinned", {"session_pin": True})):
        first, kv = ask(name, make_document(7, num_words=200).text, **fields)
        assert len(first) == 2, first  # one of each role
        for question, _ in DOCUMENT.questions[:3]:
            ran, kv = ask(name, question)
            assert ran == first
            assert (kv["history"], kv["history_tier"]) == ("delta", "memory"), kv
    begun = dict.fromkeys((worker.addresses["address"] for worker in routers.workers["prefill"]), 0)
    for index in range(100):  # until each worker had more than its memory
        ran, _ = ask(f"large-{index}", make_document(20 + index, num_words=550).text)
        for address in ran & begun.keys():
            begun[address] += 1
        if min(begun.values()) >= 5:
            break
    _, kv = ask("plain", "what is the pin ?")
    assert kv["history_tier"] == "redis", kv
    _, kv = ask("pinned", "what is the pin ?")
    assert kv["history_tier"] == "memory", kv


def test_no_turn_is_lost_when_a_master_is_killed_under_load(routers: Routers, redis: RedisCluster) -> None:
    for key in KEYS:
        routers.request("POST", "/v1/documents", key, json={"id": "d", "text": DOCUMENT.text})
    calm, _ = routers.converse(KEYS[0], "calm")
    assert len(set(calm)) > 1, calm
    owner = hashlib.sha256(KEYS[0].encode()).hexdigest()
    master = redis.master_of(f"kvferry:router:{{{owner}}}:session:s")
    with ThreadPoolExecutor(2 * len(KEYS)) as pool:
        running = {
            (key, name): pool.submit(routers.converse, key, name) for key in KEYS for name in ("s", "t")
        }
        before = routers.num_answers
        until(lambda: routers.num_answers >= before + 2 * len(running))
        master.kill()
        for conversation in running.values():
            assert conversation.result()[0] == calm
    assert NODE_TIMEOUT_MS / 1000 < max(future.result()[1] for future in running.values()) < LONGEST_PAUSE_S
    for key, name in running:
        session = routers.request("GET", f"/v1/sessions/{name}", key)
        assert session["turns"] == len(calm)
    listed = routers.request("GET", "/v1/documents", KEYS[0])["data"]
    assert [document["id"] for document in listed] == ["d"]
