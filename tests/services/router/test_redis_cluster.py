"""Routers on a real Redis Cluster of six processes: a killed master loses no turn; keys count together."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvtest.redis_cluster import NODE_TIMEOUT_MS, RedisCluster

from kvferry.services.router.http import access
from kvferry.services.router.http.access import KeyFile, KeyLimits
from kvferry.services.router.sessions.record import SessionRecord
from kvferry.services.router.sessions.redis_records import RedisRecords
from kvferry.services.router.sessions.redis_store import RedisSessionStore
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import CapacityExceeded, StoreUnavailable
from kvferry.shared.history import redis_client
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions

LONGEST_PAUSE_S = 45.0
"""It takes two or three seconds where the machine has nothing else to do."""
RECORD = SessionRecord(
    kind="chat",
    model_fingerprint="f",
    token_ids=(1, 2, 3),
    messages=(),
    assistant_ends=(3,),
    turns=1,
    last_plan={},
    prefill_addresses=("a:1",),
    pin=True,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster.running() as cluster:
        yield cluster


class Router:
    """One router's store, and what it was told."""

    def __init__(self, url: str, name: str) -> None:
        self.events: list[str] = []
        options = RedisOptions(url=url, timeout_s=10.0, failover_s=60.0)
        records = RedisRecords(
            AsyncRedisLink(options),
            clock=time.time,
            name=name,
            on_unreplicated=lambda: self.events.append("unreplicated"),
        )
        self.store = RedisSessionStore(
            records,
            lease_s=30.0,
            on_event=self.events.append,
            ttl_s=600.0,
            document_ttl_s=600.0,
            wait_s=30.0,
            max_sessions=100,
            clock=time.time,
        )

    async def turn(self, key: SessionKey) -> int:
        """Add a turn to the session; returns how many it has now."""
        async with self.store.lease(key) as lease:
            turns = (lease.record.turns if lease.record is not None else 0) + 1
            assert lease.record is None or lease.record.token_ids == tokens_after(turns - 1)
            assert await lease.commit(replace(RECORD, turns=turns, token_ids=tokens_after(turns)))
        return turns


def tokens_after(turns: int) -> tuple[int, ...]:
    return tuple(range(3 * turns))


@asynccontextmanager
async def routers(cluster: RedisCluster, count: int) -> Any:
    async with AsyncExitStack() as stack:
        started = [Router(cluster.url, f"router {index}") for index in range(count)]
        for one in started:
            stack.push_async_callback(one.store.close)
        yield started


async def test_a_killed_master_loses_no_turn_and_makes_nobody_wait_for_long() -> None:
    with RedisCluster.running() as cluster:
        async with routers(cluster, 3) as three:
            keys = [SessionKey(owner=f"{index:04x}", session_id="s") for index in range(12)]
            master = cluster.master_of(f"kvferry:router:{{{keys[0].owner}}}:session:s")
            done, pauses_s = dict.fromkeys(keys, 0), []
            stop = asyncio.Event()

            async def converse(key: SessionKey) -> None:
                while not stop.is_set():
                    begin_s = time.monotonic()
                    assert await random.choice(three).turn(key) == done[key] + 1
                    done[key] += 1
                    pauses_s.append(time.monotonic() - begin_s)
                    await asyncio.sleep(0.01)

            async with asyncio.TaskGroup() as group:
                for key in keys:
                    group.create_task(converse(key))
                async with asyncio.timeout(90.0):
                    while min(done.values()) < 2:
                        await asyncio.sleep(0.05)
                before = dict(done)
                master.kill()
                async with asyncio.timeout(120.0):
                    while any(done[key] < before[key] + 10 for key in keys):
                        await asyncio.sleep(0.05)
                stop.set()
            assert NODE_TIMEOUT_MS / 1000 < max(pauses_s) < LONGEST_PAUSE_S
            for key in keys:
                stored = await random.choice(three).store.get(key)
                assert (stored.turns, stored.pin, stored.prefill_addresses) == (done[key], True, ("a:1",))
                assert stored.token_ids == tokens_after(done[key])
                assert len(stored.parts) > 1
            assert {event for one in three for event in one.events} <= {"unreplicated"}


async def test_a_turn_survives_a_lost_lease_unless_another_router_committed(cluster: RedisCluster) -> None:
    async with routers(cluster, 2) as (one, other):
        key = SessionKey(owner="ab", session_id="lease")
        name = f"kvferry:router:{{{key.owner}}}:session:{key.session_id}"
        assert await one.turn(key) == 1
        with cluster.master_of(name).client() as admin:
            async with one.store.lease(key) as lease:
                admin.hdel(name, "holder", "until")  # as in a replica that had not heard of the lease
                assert await lease.commit(replace(RECORD, turns=2, token_ids=tokens_after(2)))
            async with one.store.lease(key, needs_record=False) as lease:
                admin.hdel(name, "holder", "until")
                assert await other.turn(key) == 3
                assert not await lease.commit(replace(RECORD, turns=9))
        assert (await one.store.get(key)).turns == 3


async def test_a_commit_that_no_replica_confirms_is_counted_and_does_not_wait_long(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routers(cluster, 1) as (router,):
        key = SessionKey(owner="cd", session_id="s")
        with monkeypatch.context() as patient:
            patient.setattr(redis_client, "_REPLICATION_TIMEOUT_MS", 30_000)
            await router.turn(key)
        assert router.events == []
        replica = cluster.replica_of(cluster.master_of("kvferry:router:{cd}:session:s"))
        replica.pause()
        try:
            assert await router.turn(key) == 2
        finally:
            replica.resume()
        assert router.events == ["unreplicated"]


async def test_routers_count_a_key_together(
    cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_REDIS_TIMEOUT_S", 60.0)  # a router that has waited counts alone
    owner = hashlib.sha256(b"k").hexdigest()
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nname = "k"\nhash = "sha256:{owner}"\nrequests_per_minute = 4\n')
    waits_s: list[float] = []
    three = [KeyLimits(KeyFile(path), redis_url=cluster.url) for _ in range(3)]

    async def ask(limits: KeyLimits) -> bool:
        try:
            async with limits.admitted(owner):
                return True
        except CapacityExceeded as refused:
            waits_s.append(refused.retry_after_s or 0.0)
            return False

    try:
        assert [await ask(three[turn % 3]) for turn in range(6)] == [True] * 4 + [False] * 2
        assert all(0 < wait_s <= 60 for wait_s in waits_s)
    finally:
        for limits in three:
            await limits.close()


async def test_a_cluster_that_is_away_is_unavailable_and_no_unexpected_error() -> None:
    link = AsyncRedisLink(RedisOptions(url="redis+cluster://127.0.0.1:1", timeout_s=30.0, failover_s=0.5))
    begin_s = time.monotonic()
    with pytest.raises(StoreUnavailable) as refused:
        await link.call(lambda client: client.get("k"))
    assert refused.value.reason == "unreachable"
    assert time.monotonic() - begin_s >= 0.5
    await link.close()
