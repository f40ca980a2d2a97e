"""The session store by itself: leases, deletion, expiry, eviction."""

from __future__ import annotations

import asyncio

import pytest
from kvtest.clock import Clock

from kvferry.services.router.sessions.record import SessionRecord
from kvferry.services.router.sessions.store import SessionStore, sized
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import CapacityExceeded, SessionBusy, SessionNotFound

RECORD = SessionRecord(kind="chat", model_fingerprint="f", token_ids=(1, 2, 3), turns=1)


def key(name: str = "s", owner: str = "o") -> SessionKey:
    return SessionKey(owner=owner, session_id=name)


def store(
    clock: Clock | None = None, *, wait_s: float = 0.05, max_sessions: int = 100, max_bytes_per_key: int = 0
) -> SessionStore:
    return SessionStore(
        ttl_s=60.0,
        wait_s=wait_s,
        max_sessions=max_sessions,
        max_bytes_per_key=max_bytes_per_key,
        clock=clock or Clock(),
    )


async def waited_for(sessions: SessionStore) -> None:
    """Wait until a second request wants the session."""
    while sessions._entries[key()].users < 2:
        await asyncio.sleep(0)


async def have(sessions: SessionStore, name: str) -> None:
    async with sessions.lease(key(name)) as lease:
        assert await lease.commit(RECORD)


async def test_session_exists_from_its_first_commit() -> None:
    sessions = store()
    async with sessions.lease(key()) as lease:
        assert lease.record is None
        with pytest.raises(SessionNotFound):
            await sessions.get(key())
        await lease.commit(RECORD)
        assert (await sessions.get(key())).token_ids == (1, 2, 3)
    assert (await sessions.owned_by("o", documents=False))[0][0] == key()
    assert await sessions.owned_by("other", documents=False) == []


async def test_bytes_of_what_has_expired_or_was_deleted_are_free_again() -> None:
    clock = Clock()
    sessions = store(clock, max_bytes_per_key=3 * sized(RECORD).size_bytes // 2)
    await have(sessions, "s")
    with pytest.raises(CapacityExceeded, match="delete some") as refused:
        await have(sessions, "t")
    assert (refused.value.reason, refused.value.retry_after_s) == ("sessions_bytes_quota", 60.0)
    assert list(sessions._entries) == [key("s")]
    await have(sessions, "s")  # what does not grow
    clock.turn(60.0)
    await have(sessions, "t")
    await sessions.delete(key("t"))
    await have(sessions, "u")


async def test_session_without_a_commit_leaves_nothing() -> None:
    sessions = store()
    with pytest.raises(ValueError, match="turn failed"):
        async with sessions.lease(key()):
            raise ValueError("turn failed")
    with pytest.raises(SessionNotFound):
        await sessions.delete(key())


async def test_busy_session_is_refused_after_the_wait_and_freed_by_the_first() -> None:
    sessions = store()
    async with sessions.lease(key()):
        with pytest.raises(SessionBusy):
            async with sessions.lease(key()):
                pass
        async with sessions.lease(key(owner="another")):
            pass
    await have(sessions, "s")


async def test_waiter_that_is_cancelled_does_not_block_the_next() -> None:
    sessions = store(wait_s=60.0)

    async def wait() -> None:
        async with sessions.lease(key()):
            pass

    async with sessions.lease(key()):
        waiter = asyncio.create_task(wait())
        await waited_for(sessions)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
    await asyncio.wait_for(have(sessions, "s"), 60.0)


async def test_deleted_session_is_not_brought_back_by_its_turn() -> None:
    sessions = store()
    await have(sessions, "s")
    async with sessions.lease(key()) as lease:
        await sessions.delete(key())
        assert not await lease.is_current()
        await have(sessions, "s")  # a new session of that name need not wait
        assert not await lease.commit(RECORD)
    assert (await sessions.get(key())).turns == 1


async def test_waiter_of_a_deleted_session_begins_a_new_one() -> None:
    sessions = store(wait_s=60.0)
    await have(sessions, "s")
    seen: list[SessionRecord | None] = []

    async def wait() -> None:
        async with sessions.lease(key()) as lease:
            seen.append(lease.record)

    async with sessions.lease(key()):
        waiter = asyncio.create_task(wait())
        await waited_for(sessions)
        await sessions.delete(key())
    await asyncio.wait_for(waiter, 60.0)
    assert seen == [None]


async def test_idle_sessions_expire_and_busy_ones_do_not() -> None:
    clock = Clock()
    sessions = store(clock)
    await have(sessions, "s")
    clock.turn(59.0)
    await have(sessions, "t")
    clock.turn(1.0)
    with pytest.raises(SessionNotFound):
        await sessions.get(key("s"))
    assert (await sessions.get(key("t"))).expires_at_s == 1000.0 + 59.0 + 60.0
    async with sessions.lease(key("t")):
        clock.turn(600.0)
        assert list(await sessions.remove_stale()) == [key("s")]
        assert await sessions.get(key("t"))
    assert list(await sessions.remove_stale()) == [key("t")]


async def test_expired_session_starts_anew() -> None:
    clock = Clock()
    sessions = store(clock)
    await have(sessions, "s")
    clock.turn(60.0)
    async with sessions.lease(key()) as lease:
        assert lease.record is None


async def test_longest_idle_sessions_make_room() -> None:
    clock = Clock()
    sessions = store(clock, max_sessions=2)
    for name in ("a", "b", "c", "d"):
        clock.turn(1.0)
        await have(sessions, name)
    assert [gone.session_id for gone in await sessions.remove_stale()] == ["a", "b"]
    assert [found.session_id for found, _ in await sessions.owned_by("o", documents=False)] == ["c", "d"]
