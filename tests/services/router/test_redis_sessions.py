"""Session records in a real Redis: two routers' stores on one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kvtest.clock import Clock
from kvtest.session_routers import KEY, NOW_S, RECORD, TURN_2, Router

from kvferry.services.router.sessions import redis_store
from kvferry.services.router.sessions.store import document_key
from kvferry.shared.errors import CapacityExceeded, InvalidRequest, SessionBusy, SessionNotFound


async def test_another_router_goes_on_with_the_session(router: Callable[..., Router]) -> None:
    one, other = router(), router()
    assert await one.turn() is None
    found = await other.turn(TURN_2)
    assert found is not None
    assert replace(found, commit_id="", expires_at_s=0.0) == RECORD
    assert found.expires_at_s == NOW_S + 600.0
    assert await one.turns() == 2
    ((key, summary),) = await one.store.owned_by(KEY.owner, documents=False)
    assert (key, summary.num_tokens, summary.turns) == (KEY, 4, 2)
    # A router that starts later knows it all the same; nobody else does.
    assert await router().turns() == 2
    assert await other.store.owned_by("ffff", documents=False) == []
    assert await other.turns(replace(KEY, owner="ffff")) is None
    assert one.events == other.events == []


async def test_a_session_has_one_turn_at_a_time_over_all_routers(router: Callable[..., Router]) -> None:
    one, other = router(), router(wait_s=0.05)
    async with one.store.lease(KEY) as lease:
        with pytest.raises(SessionBusy):
            await other.turn()
        await other.turn(key=replace(KEY, session_id="another"))
        assert await lease.commit(RECORD)
    assert (await other.turn(TURN_2)) is not None


async def test_waiting_turns_of_many_routers_are_each_run_once(router: Callable[..., Router]) -> None:
    routers = [router() for _ in range(3)]
    seen: list[int] = []

    async def turn(one: Router) -> None:
        async with one.store.lease(KEY) as lease:
            turns = lease.record.turns if lease.record is not None else 0
            seen.append(turns)
            await asyncio.sleep(0)
            assert await lease.commit(replace(RECORD, turns=turns + 1))

    await asyncio.gather(*(turn(one) for one in routers * 4))
    assert sorted(seen) == list(range(12))
    assert await routers[0].turns() == 12


async def test_a_turn_whose_lease_ran_out_does_not_commit_over_its_successor(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await one.turn()
    async with one.store.lease(KEY) as late:
        with redis_server.client() as client:  # as if this router had been away for longer than its lease
            (name,) = client.keys("kvferry:router:*:session:*")
            client.hset(name, "until", 0)
        await other.turn(TURN_2)
        assert not await late.is_current()
        with pytest.raises(SessionBusy, match="continued by another router"):
            await late.commit(replace(RECORD, turns=99))
    assert await one.turns() == 2
    assert (await one.turn(replace(RECORD, turns=3))) is not None


async def test_a_lease_is_renewed_while_its_turn_runs(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router(lease_s=0.3)
    async with one.store.lease(KEY):
        with redis_server.client() as client:
            (name,) = client.keys("kvferry:router:*:session:*")
            first = client.hget(name, "until")
            async with asyncio.timeout(30.0):
                while client.hget(name, "until") == first:
                    await asyncio.sleep(0.02)


async def test_delete_at_another_router_wins_over_a_turn_under_way(router: Callable[..., Router]) -> None:
    one, other = router(), router()
    await one.turn()
    async with one.store.lease(KEY) as lease:
        await other.store.delete(KEY)
        assert not await lease.is_current()
        assert await other.turn() is None  # a new session of that name need not wait
        with pytest.raises(SessionBusy):  # of the new session
            await lease.commit(TURN_2)
    assert await one.turns() == 1
    await one.store.delete(KEY)
    for store in (one.store, other.store):
        with pytest.raises(SessionNotFound):
            await store.delete(KEY)


async def test_delete_during_a_first_turn_wins_too(router: Callable[..., Router]) -> None:
    one, other = router(), router()
    async with one.store.lease(KEY) as lease:
        await other.store.delete(KEY)
        assert not await lease.commit(RECORD)
    assert await one.turns() is None
    assert await one.turn() is None


async def test_nothing_of_a_deleted_session_stays_but_its_marker(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await one.turn(replace(RECORD, text="secret words"))
    await one.store.delete(KEY)
    with redis_server.client() as client:
        for name in client.keys("kvferry:router:{0a1b}*"):
            assert set(client.hkeys(name)) <= {b"generation", b"committed"}
            assert 0 < client.pttl(name) <= 600_000


async def test_sessions_expire_in_redis_and_here(router: Callable[..., Router], redis_server: Any) -> None:
    one = router()
    await one.turn()
    await one.turn(key=document_key(KEY.owner, "d"))
    with redis_server.client() as client:
        for index, name, ttl_s in (("sessions", "s", 600), ("documents", "document/d", 900)):
            assert client.pttl(f"kvferry:router:{{0a1b}}:session:{name}") == -1  # never evicted by Redis
            assert client.zscore(f"kvferry:router:{{0a1b}}:{index}", name) == (NOW_S + ttl_s) * 1000
    one.clock.turn(601.0)
    assert await one.turns() is None
    assert await one.store.owned_by(KEY.owner, documents=False) == []
    assert len(await one.store.owned_by(KEY.owner, documents=True)) == 1
    with redis_server.client() as client:
        client.delete("kvferry:router:{0a1b}:session:s")
    assert list(await one.store.remove_stale()) == [KEY]


async def test_usage_counts_what_a_key_keeps(router: Callable[..., Router]) -> None:
    one, other = router(), router()
    await one.turn()
    await other.turn(TURN_2, key=replace(KEY, session_id="t"))
    await other.turn(key=document_key(KEY.owner, "d"))
    usage = await one.store.usage(KEY.owner, documents=False, excluding=replace(KEY, session_id="new"))
    assert (usage.num_records, usage.num_tokens) == (2, 7)
    usage = await one.store.usage(KEY.owner, documents=False, excluding=KEY)
    assert (usage.num_records, usage.num_tokens) == (1, 4)
    # Redis's clock is the real one.
    assert usage.first_expires_in_s == pytest.approx(NOW_S + 600 - time.time(), abs=60)
    await one.store.delete(KEY)
    usage = await other.store.usage(KEY.owner, documents=False, excluding=KEY)
    assert (usage.num_records, usage.num_tokens) == (1, 4)
    await other.turn(RECORD, key=replace(KEY, session_id="t"))
    await one.turn(TURN_2, key=replace(KEY, session_id="u"))
    usage = await one.store.usage(KEY.owner, documents=False, excluding=KEY)
    assert (usage.num_records, usage.num_tokens) == (2, 7)


async def test_bytes_of_what_is_gone_are_free_again(router: Callable[..., Router], redis_server: Any) -> None:
    max_bytes, keys = 600, [replace(KEY, session_id=name) for name in "stuv"]
    expired = router(clock=Clock(lambda: time.time() - 600.0), max_bytes=max_bytes)
    one, other = router(max_bytes=max_bytes), router(max_bytes=max_bytes)
    large = replace(RECORD, text="x" * 150)
    await expired.turn(large, key=keys[0])
    await one.turn(large, key=keys[1])
    size_bytes = (await one.store.get(keys[1])).size_bytes
    assert max_bytes / 2 < size_bytes < max_bytes
    message = rf"with {size_bytes} bytes and this one would be with {size_bytes}; the limit for all is 600"
    with pytest.raises(CapacityExceeded, match=message) as refused:
        await other.turn(large, key=keys[2])
    assert refused.value.reason == "sessions_bytes_quota"
    assert await one.turns(keys[2]) is None
    with pytest.raises(InvalidRequest, match="all sessions of a key may have 600 together"):
        await other.turn(replace(RECORD, text="x" * 600), key=keys[2])
    await one.turn(large, key=replace(KEY, owner="0a1c"))
    await one.turn(large, key=document_key(KEY.owner, "d"))
    await other.turn(replace(large, text=""), key=keys[1])  # what shrinks is not refused
    await other.store.delete(keys[1])
    await other.turn(large, key=keys[2])
    with redis_server.client() as client:  # as a router of an earlier release deletes
        client.delete("kvferry:router:{0a1b}:session:u")
        client.zrem("kvferry:router:{0a1b}:sessions", "u")
        client.hdel("kvferry:router:{0a1b}:sessions:tokens", "u")
    await one.store.remove_stale()
    await one.turn(large, key=keys[3])
    usage = await one.store.usage(KEY.owner, documents=False, excluding=KEY)
    assert (usage.num_records, usage.size_bytes) == (1, (await one.store.get(keys[3])).size_bytes)


async def test_many_copies_are_compared_with_redis_in_turn(
    router: Callable[..., Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_COMPARED_AT_ONCE", 2)
    one, other = router(), router()
    keys = [replace(KEY, session_id=f"s{number}") for number in range(5)]
    for key in keys:
        await one.turn(key=key)
        await other.store.delete(key)
    left = []
    for _ in range(3):
        await one.store.remove_stale()
        left.append(sum(one.store.peek(key) is not None for key in keys))
    assert left == [3, 1, 0]


async def test_what_has_expired_is_removed(router: Callable[..., Router], redis_server: Any) -> None:
    began_s = time.time() - 600.0  # so that a turn of 600 s has just expired by Redis's clock
    clock = Clock(lambda: began_s)
    one, document = router(clock=clock), document_key("0a1b", "d")
    await one.turn()
    await one.turn(key=document)
    assert (await one.store.usage("0a1b", documents=False, excluding=document)).num_records == 0
    await one.store.remove_stale()
    with redis_server.client() as client:
        left = {name.decode() for name in client.keys("kvferry:router:*")}
    assert not any(name.endswith(":session:s") for name in left)
    assert any(name.endswith("document/d") for name in left)  # documents have 900 s
