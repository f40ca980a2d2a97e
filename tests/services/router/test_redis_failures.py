"""What failures of a real Redis do to sessions: turns that it does not take, and records that it lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kvtest.session_routers import KEY, RECORD, TURN_2, Router

from kvferry.services.router.sessions.record import SessionRecord
from kvferry.shared.errors import SessionNotStored, StoreUnavailable

TURN_3 = replace(RECORD, turns=3)


async def refuse(*routers: Router) -> None:
    for router in routers:
        with pytest.raises(SessionNotStored):
            await router.turn()


async def whole_turn(router: Router, record: SessionRecord) -> None:
    async with router.store.lease(KEY, needs_record=False) as lease:
        assert await lease.commit(record)


async def unstored_turn(router: Router, redis_server: Any) -> None:
    """A turn that is answered although Redis is full."""
    async with router.store.lease(KEY) as lease:
        with redis_server.client() as client:
            client.config_set("maxmemory", 1)  # every write is refused from here on
            with pytest.raises(StoreUnavailable):
                await lease.commit(TURN_2)
            client.config_set("maxmemory", 0)
        lease.note_unstored()


async def test_without_redis_only_a_whole_conversation_runs_and_it_is_not_stored(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await one.turn()
    redis_server.kill()
    for key in (KEY, replace(KEY, session_id="unknown")):
        with pytest.raises(StoreUnavailable):
            await one.turn(TURN_2, key=key)
    assert await one.turns() == 1
    with pytest.raises(StoreUnavailable):
        await one.store.delete(KEY)
    async with one.store.lease(KEY, needs_record=False) as lease:
        assert await lease.is_current()
        with pytest.raises(StoreUnavailable):
            await lease.commit(TURN_2)
        lease.note_unstored()
    await refuse(one)
    assert one.events[-2:] == ["not_stored", "offline"]
    redis_server.start()  # empty: it keeps nothing on disk
    await one.store.remove_stale()
    other = router()
    await refuse(one, other)
    await whole_turn(other, TURN_3)
    found = await one.turn(replace(RECORD, turns=4))
    assert found is not None
    assert found.turns == 3


async def test_a_redis_that_dies_during_a_turn_leaves_the_session_refused_until_it_is_whole(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await one.turn()
    async with one.store.lease(KEY) as lease:
        redis_server.kill()
        assert await lease.is_current()
        with pytest.raises(StoreUnavailable):
            await lease.commit(TURN_2)
        lease.note_unstored()
    redis_server.start()
    await refuse(one)
    assert one.events[0] == "not_stored"
    await whole_turn(one, TURN_3)
    assert await other.turns() == 3
    assert (await other.turn(replace(RECORD, turns=4))) is not None


async def test_a_paused_redis_holds_a_turn_up_for_a_bounded_time_and_a_late_commit_changes_nothing(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await one.turn()
    async with one.store.lease(KEY) as lease:
        one.has_patience(0.2)
        redis_server.pause()
        try:
            with pytest.raises(StoreUnavailable):
                await lease.commit(TURN_2)
        finally:
            redis_server.resume()  # it may run the commit now
        one.has_patience(30.0)
        lease.note_unstored()
    await refuse(one)
    await one.store.remove_stale()
    await refuse(one, other, router())
    await whole_turn(other, TURN_3)
    assert await one.turns() == 3


async def test_a_mark_ends_the_lease_of_its_turn(router: Callable[..., Router]) -> None:
    one, other = router(), router()
    await one.turn()
    async with one.store.lease(KEY) as late:
        late.note_unstored()
        await one.store.remove_stale()
        await refuse(other)
        assert not await late.is_current()
        assert await one.store._records.commit(KEY, late.token or "", late.commit_id, TURN_2) is None
    await refuse(one, other)


@pytest.mark.parametrize("was_deleted", [False, True])
async def test_a_first_turn_that_is_not_stored_is_missed_until_the_session_is_deleted(
    router: Callable[..., Router], redis_server: Any, was_deleted: bool
) -> None:
    one, other = router(), router()
    if was_deleted:
        await one.turn()
        await one.store.delete(KEY)
    await unstored_turn(one, redis_server)
    await one.store.remove_stale()
    await refuse(one, other, router())
    with redis_server.client() as client:
        assert 0 < client.pttl("kvferry:router:{0a1b}:session:s") <= 600_000
    await other.store.delete(KEY)
    assert await one.turn() is None


async def test_delete_forgets_a_missing_turn_that_is_not_marked_yet(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await unstored_turn(one, redis_server)
    await one.store.delete(KEY)
    assert await one.turn() is None


@pytest.mark.parametrize("is_swept", [False, True])
async def test_a_session_that_another_router_went_on_with_is_not_refused(
    router: Callable[..., Router], redis_server: Any, is_swept: bool
) -> None:
    one, other = router(), router()
    await one.turn()
    await unstored_turn(one, redis_server)
    await whole_turn(other, replace(RECORD, turns=7))
    if is_swept:
        await one.store.remove_stale()
    found = await one.turn(replace(RECORD, turns=8))
    assert found is not None
    assert found.turns == 7


async def test_a_router_marks_what_it_missed_before_it_ends(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await one.turn()
    await unstored_turn(one, redis_server)
    await one.store.close()
    await refuse(other)


@pytest.mark.parametrize("during_turn", [False, True])
async def test_an_emptied_redis_gets_its_sessions_back(
    during_turn: bool, router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await one.turn()
    if during_turn:
        async with one.store.lease(KEY) as lease:
            with redis_server.client() as client:
                client.flushall()
            assert await lease.is_current()
            assert await lease.commit(TURN_2)
    else:
        with redis_server.client() as client:
            client.flushall()
        found = await one.turn(TURN_2)
        assert found is not None
        assert found.turns == 1
        assert "restored" in one.events
    assert await router().turns() == 2


async def test_a_lost_record_is_an_error_where_it_matters(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await one.turn()
    with redis_server.client() as client:
        client.delete("kvferry:router:{0a1b}:session:s")
    restarted = router()
    with pytest.raises(StoreUnavailable, match="lost") as refused:
        await restarted.turn()
    assert refused.value.reason == "lost"
    async with restarted.store.lease(KEY, needs_record=False) as lease:  # the whole conversation
        assert await lease.commit(TURN_2)
    assert await restarted.turns() == 2


async def test_a_copy_of_what_was_deleted_elsewhere_is_dropped_at_the_next_sweep(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await one.turn()
    await other.store.delete(KEY)
    await one.store.remove_stale()
    with redis_server.client() as client:
        client.flushall()
    assert await one.turn() is None


async def test_records_are_not_evicted_for_kv(router: Callable[..., Router], redis_server: Any) -> None:
    one, num_sessions = router(), 50
    keys = [replace(KEY, session_id=f"s{number}") for number in range(num_sessions)]
    for key in keys:
        await one.turn(key=key)
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "volatile-lru")  # as deploy/redis/redis.conf has it
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (4 << 20))
        for number in range(2000):
            client.set(f"kvferry:history:{number}", bytes(16 << 10), px=86_400_000)
        assert client.info("stats")["evicted_keys"] > 0
    other = router()
    assert [await other.turns(key) for key in keys] == [1] * num_sessions
    assert (await other.store.usage("0a1b", documents=False, excluding=KEY)).num_records == num_sessions
