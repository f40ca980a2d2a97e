"""Session records in a real Redis: two routers' stores on one server, and what its failures do to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from kvtest.clock import Clock
from kvtest.scripted_workers import Announced

from kvferry.services.router.sessions import redis_store
from kvferry.services.router.sessions.record import SessionRecord
from kvferry.services.router.sessions.redis_records import RedisRecords
from kvferry.services.router.sessions.redis_store import RedisSessionStore
from kvferry.services.router.sessions.store import document_key
from kvferry.services.router.sessions.stored_record import write_whole
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import (
    CapacityExceeded,
    InvalidRequest,
    SessionBusy,
    SessionNotFound,
    StoreUnavailable,
)
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions
from kvferry.shared.model.chat_template import ChatMessage
from kvferry.shared.trust.at_rest import AtRestKeys

KEY = SessionKey(owner="0a1b", session_id="s")
RECORD = SessionRecord(
    kind="chat",
    model_fingerprint="f",
    token_ids=(1, 2, 300_000),
    messages=(ChatMessage("user", "grüße"), ChatMessage("assistant", "\x00 yes", '{"tool_calls": []}')),
    assistant_ends=(3,),
    turns=1,
    last_plan={"method": "full", "prefill_ms": 0.5},
    prefill_addresses=("a:1",),
)
NOW_S = 1_900_000_000.0
TURN_2 = replace(RECORD, turns=2, token_ids=(1, 2, 300_000, 4))


class Router:
    """One router's store, and what it was told."""

    def __init__(self, url: str, **options: Any) -> None:
        self.events: list[str] = []
        self.clock = options.pop("clock", None) or Clock(lambda: NOW_S)
        settings: dict[str, Any] = {"lease_s": 30.0, "wait_s": 30.0, "ttl_s": 600.0, **options}
        # The breaker is impatient so that tests need not wait for it.
        link = AsyncRedisLink(
            RedisOptions(url=url, timeout_s=settings.get("timeout_s", 30.0), breaker_open_s=0.001)
        )
        self.store = RedisSessionStore(
            RedisRecords(
                link,
                clock=self.clock,
                name=options.get("name", f"router {id(self)}"),
                keys=options.get("keys"),
            ),
            lease_s=settings["lease_s"],
            on_event=self.events.append,
            workers=Announced(),
            ttl_s=settings["ttl_s"],
            wait_s=settings["wait_s"],
            max_sessions=100,
            clock=self.clock,
            document_ttl_s=900.0,
            max_bytes_per_key=options.get("max_bytes", 0),
        )

    async def turn(self, record: SessionRecord = RECORD, key: SessionKey = KEY) -> SessionRecord | None:
        """A whole turn; returns the record that it found."""
        async with self.store.lease(key) as lease:
            found = lease.record
            assert await lease.commit(record)
        return found

    def has_patience(self, timeout_s: float) -> None:
        """Set how long the store waits for Redis from now on."""
        link = self.store._records._link
        link._options = replace(link._options, timeout_s=timeout_s)

    def count_waits(self) -> list[bool]:
        """Return a list that grows whenever the store looks whether it must wait for other routers."""
        looked, is_settled = [], self.store._is_settled

        async def counted(key: SessionKey) -> bool:
            looked.append(await is_settled(key))
            return looked[-1]

        self.store._is_settled = counted  # type: ignore[method-assign]
        return looked

    async def turns(self, key: SessionKey = KEY) -> int | None:
        try:
            return (await self.store.get(key)).turns
        except SessionNotFound:
            return None


@pytest.fixture
async def router(redis_server: Any) -> AsyncIterator[Callable[..., Router]]:
    started: list[Router] = []

    def start(**options: Any) -> Router:
        started.append(Router(redis_server.url, **options))
        return started[-1]

    yield start
    for one in started:
        await one.store.close()


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
        for name in client.keys("kvferry:router:{*"):
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


async def test_redis_sends_a_record_to_a_router_that_has_no_current_copy(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    long = replace(RECORD, messages=(ChatMessage("user", "x" * 100_000),))
    await one.turn(long)

    async def sent_bytes(its: Router) -> int:
        with redis_server.client() as client:
            before = client.info("stats")["total_net_output_bytes"]
            async with its.store.lease(KEY) as lease:
                assert lease.record is not None
                assert len(lease.record.messages[0].content) == 100_000
            return int(client.info("stats")["total_net_output_bytes"]) - before

    assert await sent_bytes(one) < 20_000
    assert await sent_bytes(other) > 100_000
    assert await sent_bytes(other) < 20_000
    await other.turn(replace(long, turns=2))
    assert await sent_bytes(one) > 100_000


def after_turns(number: int) -> SessionRecord:
    """A conversation with 100 tokens and 400 characters a turn."""
    return replace(
        RECORD,
        token_ids=tuple(range(100_000, 100_000 + 100 * number)),
        messages=tuple(
            ChatMessage(role, f"{turn:200d}") for turn in range(number) for role in ("user", "assistant")
        ),
        assistant_ends=tuple(100 * (turn + 1) for turn in range(number)),
        turns=number,
    )


async def converse(its: Router, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await its.turn(after_turns(number))


def the_same(one: SessionRecord | None, other: SessionRecord) -> bool:
    return one is not None and replace(one, commit_id="", expires_at_s=0.0) == other


async def test_a_turn_sends_redis_as_many_bytes_after_fifty_others_as_after_one(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    sent: dict[int, int] = {}
    with redis_server.client() as client:
        for number in range(1, 51):
            async with one.store.lease(KEY) as lease:
                before = client.info("stats")["total_net_input_bytes"]
                assert await lease.commit(after_turns(number))
                after = client.info("stats")["total_net_input_bytes"]
            client.config_resetstat()
            sent[number] = after - before
    # a turn's own 500 bytes of ids and 400 of text are there, and no others
    assert sent[2] > 900
    assert sent[50] < 1.1 * sent[2]
    del sent[1]
    assert max(sent.values()) < 1.1 * min(sent.values())
    assert the_same(await other.store.get(KEY), after_turns(50))
    await other.turn(after_turns(51))
    assert the_same(await one.turn(after_turns(52)), after_turns(51))
    with redis_server.client() as client:
        assert client.hget("kvferry:router:{0a1b}:session:s", "parts") == b"52"
    assert the_same(await other.store.get(KEY), after_turns(52))


async def test_a_record_that_is_shown_is_not_sent_to_a_router_that_has_it(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await converse(one, 1, 50)
    sent = []
    for its in (one, other):
        with redis_server.client() as client:
            before = client.info("stats")["total_net_output_bytes"]
            assert await its.turns() == 50
            sent.append(client.info("stats")["total_net_output_bytes"] - before)
    assert sent[0] < 20_000 < 40_000 < sent[1]


async def test_what_a_turn_replaces_is_not_in_redis_any_more(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await converse(one, 1, 5)
    words = [f"secret {turn}" for turn in range(3)]
    long = after_turns(5)
    for word in words:
        await one.turn(replace(long, messages=(*long.messages, ChatMessage("user", word))))
    with redis_server.client() as client:
        values = client.hvals("kvferry:router:{0a1b}:session:s")
    assert [sum(word.encode() in value for value in values) for word in words] == [0, 0, 1]
    await one.turn(replace(long, messages=(*long.messages[:1], ChatMessage("user", "another way"))))
    with redis_server.client() as client:
        fields = client.hgetall("kvferry:router:{0a1b}:session:s")
    assert sum(name.startswith(b"part:") for name in fields) == int(fields[b"parts"]) < 5
    assert not any(b"secret" in value for value in fields.values())
    await one.store.delete(KEY)
    with redis_server.client() as client:
        assert set(client.hkeys("kvferry:router:{0a1b}:session:s")) == {b"generation", b"committed"}


def write_as_earlier_release(redis_server: Any, record: SessionRecord) -> None:
    with redis_server.client() as client:
        client.hset(
            "kvferry:router:{0a1b}:session:s",
            mapping={"record": write_whole(record).head, "summary": b"", "committed": record.commit_id},
        )


async def test_a_record_of_an_earlier_release_goes_on_in_parts(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    earlier = replace(after_turns(3), commit_id="c3", expires_at_s=NOW_S + 60.0)
    write_as_earlier_release(redis_server, earlier)
    assert the_same(await one.store.get(KEY), after_turns(3))
    assert the_same(await one.turn(after_turns(4)), after_turns(3))
    await one.turn(after_turns(5))
    with redis_server.client() as client:
        assert client.hget("kvferry:router:{0a1b}:session:s", "parts") == b"2"
    assert the_same(await router().store.get(KEY), after_turns(5))


async def test_records_are_written_whole_while_a_router_of_an_earlier_release_is_there(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router(lease_s=0.2)
    await converse(one, 1, 3)
    with redis_server.client() as client:
        fields = partial(client.hmget, "kvferry:router:{0a1b}:session:s", "record", "parts", "part:0")
        client.zadd("kvferry:router:routers", {"earlier": int(time.time() * 1000)})
        await one.store.remove_stale()
        await one.turn(after_turns(4))
        whole = replace(after_turns(4), commit_id="", expires_at_s=0.0)
        record, *parts = fields()
        assert len(record) > len(write_whole(whole).head)
        assert parts == [b"0", None]
        # another one that starts then does so from its first turn on
        other = router(lease_s=0.2)
        await other.turn(after_turns(5))
        assert fields()[1:] == [b"0", None]
        client.zrem("kvferry:router:routers", "earlier")
        await other.store.remove_stale()
        await other.turn(after_turns(6))
        assert fields()[1] == b"1"
        # the name of a router that read parts, at an earlier release again
        client.zadd("kvferry:router:routers", {f"router {id(other)}": int(time.time() * 1000) + 1})
        await one.store.remove_stale()
        assert the_same(await one.turn(after_turns(7)), after_turns(6))
        assert fields()[1] == b"0"
    assert the_same(await router(lease_s=0.2).store.get(KEY), after_turns(7))


@pytest.mark.parametrize("during_turn", [False, True])
async def test_a_copy_whose_parts_redis_lost_is_written_whole(
    during_turn: bool, router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await converse(one, 1, 3)
    async with other.store.lease(KEY) as lease:
        assert lease.record is not None
    with redis_server.client() as client:
        if during_turn:
            async with one.store.lease(KEY) as lease:
                client.flushall()
                assert await lease.commit(after_turns(4))
        else:
            client.flushall()
            async with other.store.lease(KEY):  # which restores it, in parts of its own
                assert client.hget("kvferry:router:{0a1b}:session:s", "parts") == b"1"
            await one.turn(after_turns(4))
    assert the_same(await router().store.get(KEY), after_turns(4))
    assert the_same(await one.turn(after_turns(5)), after_turns(4))
    assert the_same(await other.turn(after_turns(6)), after_turns(5))
    assert the_same(await router().store.get(KEY), after_turns(6))


async def test_a_commit_that_is_repeated_is_there_once(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, records = router(), router().store._records
    await converse(one, 1, 3)
    stored = await records.acquire(KEY, "r.1", 30.0)
    assert stored is not None
    turn = replace(after_turns(4), commit_id="c4", expires_at_s=NOW_S + 60.0)
    for _ in range(2):
        its = await records.commit(KEY, "r.1", (stored.commit_id,), turn, before=stored.record)
        assert its is not None
    await records.release(KEY, "r.1")
    with redis_server.client() as client:
        assert client.hget("kvferry:router:{0a1b}:session:s", "parts") == b"4"
    assert the_same(await one.turn(after_turns(5)), after_turns(4))


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


async def test_a_session_goes_on_while_redis_is_dead_and_is_written_back(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await one.turn()
    redis_server.kill()
    found = await one.turn(TURN_2)
    assert found is not None
    assert found.turns == 1
    assert await one.turns() == 2
    with pytest.raises(StoreUnavailable):  # an unknown session might have turns that nobody here knows
        await one.turn(key=replace(KEY, session_id="unknown"))
    async with one.store.lease(replace(KEY, session_id="whole"), needs_record=False) as lease:
        assert await lease.commit(RECORD)
    with pytest.raises(StoreUnavailable):
        await one.store.delete(KEY)
    assert "offline" in one.events
    redis_server.start()  # empty: it keeps nothing on disk
    other = router()
    await one.store.remove_stale()
    assert await other.turns() == 2
    assert await other.turns(replace(KEY, session_id="whole")) == 1
    assert one.events.count("written_back") == 2


async def test_a_redis_that_dies_during_a_turn_loses_nothing(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await one.turn()
    async with one.store.lease(KEY) as lease:
        redis_server.kill()
        assert await lease.is_current()
        assert await lease.commit(TURN_2)
    redis_server.start()
    found = await one.turn(replace(RECORD, turns=3))
    assert found is not None
    assert found.turns == 2
    assert await other.turns() == 3


async def test_a_redis_that_is_paused_holds_a_turn_up_for_a_bounded_time(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await one.turn()
    one.has_patience(0.2)
    redis_server.pause()
    try:
        assert (await one.turn(TURN_2)) is not None
    finally:
        redis_server.resume()
    one.has_patience(30.0)
    other = router()
    async with asyncio.timeout(60.0):
        while "written_back" not in one.events:
            await one.store.remove_stale()
            await asyncio.sleep(0.05)
    assert await other.turns() == 2


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


async def test_a_turn_without_redis_in_a_deleted_sessions_place_is_written_back(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one = router()
    await one.turn()
    await one.store.delete(KEY)
    async with one.store.lease(KEY) as lease:
        with redis_server.client() as client:
            client.config_set("maxmemory", 1)  # every write is refused from here on
            assert await lease.commit(TURN_2)
            client.config_set("maxmemory", 0)
    await one.store.remove_stale()
    assert one.events == ["written_back"]
    assert await router(lease_s=1.0).turns() == 2


async def test_turns_made_without_redis_yield_to_those_made_with_it(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await one.turn()
    async with one.store.lease(KEY) as lease:
        with redis_server.client() as client:
            client.config_set("maxmemory", 1)  # every write is refused from here on
            assert await lease.commit(TURN_2)
            client.config_set("maxmemory", 0)
            client.hset("kvferry:router:{0a1b}:session:s", "until", 0)
    await other.turn(replace(RECORD, turns=7))
    await one.store.remove_stale()
    assert "conflict" in one.events
    assert await one.turns() == 7
    found = await one.turn(replace(RECORD, turns=8))
    assert found is not None
    assert found.turns == 7


@pytest.mark.parametrize("outage_s", [0.0, 0.5])
async def test_a_turn_that_ended_without_redis_is_not_overtaken(
    router: Callable[..., Router], redis_server: Any, outage_s: float
) -> None:
    one, other = router(), router()
    await one.turn()
    assert await other.turns() == 1
    for each in (one, other, one):
        await each.store.remove_stale()
    # the turn's lease is over before Redis is back, as after a long outage
    lease_s, one.store._lease_s = one.store._lease_s, 0.1
    async with one.store.lease(KEY) as lease:
        for each in (one, other):
            each.has_patience(0.2)
        redis_server.pause()
        assert await lease.commit(TURN_2)
    one.store._lease_s = lease_s
    with pytest.raises(StoreUnavailable):
        await other.turn(replace(RECORD, turns=7))
    assert (await one.turn(replace(TURN_2, turns=3))) is not None  # its own turns wait here: it is the last
    await asyncio.sleep(outage_s)
    redis_server.resume()
    for each in (one, other):
        each.has_patience(30.0)
    looked = other.count_waits()
    reading = asyncio.create_task(other.turns())
    async with asyncio.timeout(60.0):
        while len(looked) < 4 and not reading.done():
            await asyncio.sleep(0.01)
    assert not any(looked)
    assert not reading.done()
    async with asyncio.timeout(60.0):
        while "written_back" not in one.events:
            await one.store.remove_stale()
            await asyncio.sleep(0.05)
    assert await reading == 3
    found = await other.turn(replace(RECORD, turns=4))
    assert found is not None
    assert found.turns == 3
    assert "conflict" not in one.events


async def test_with_another_router_a_session_does_not_go_on_from_an_old_copy(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    await one.turn()
    for each in (other, one):
        await each.store.remove_stale()
    await other.turn(TURN_2)
    redis_server.kill()
    with pytest.raises(StoreUnavailable):  # the copy here is of the first turn
        await one.turn(replace(RECORD, turns=7))
    async with one.store.lease(KEY, needs_record=False) as lease:  # the whole conversation
        assert await lease.commit(replace(RECORD, turns=3))


async def test_a_router_that_is_gone_is_waited_for_as_long_as_a_lease(
    router: Callable[..., Router], redis_server: Any
) -> None:
    gone = router()
    await gone.turn()
    await gone.store.remove_stale()
    begin_s = time.monotonic()
    one = router(lease_s=1.0)
    looked = one.count_waits()
    assert (await one.turn(TURN_2)) is not None
    assert time.monotonic() - begin_s >= 1.0
    assert [looked[0], looked[-1]] == [False, True]


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


async def test_records_are_encrypted_with_the_keys(router: Callable[..., Router], redis_server: Any) -> None:
    old, new = AtRestKeys((b"1" * 32,)), AtRestKeys((b"2" * 32, b"1" * 32))
    secrets = ("grüße".encode(), b"prefill_ms", b"a:1")
    for keys, is_plain in ((None, True), (old, False)):
        await router(keys=keys).turn()
        with redis_server.client() as client:
            fields = [
                value
                for key in client.scan_iter(b"*:session:*")
                for value in (*client.hgetall(key).keys(), *client.hgetall(key).values())
            ]
            client.flushall()
        assert [any(secret in field for field in fields) for secret in secrets] == [is_plain] * 3
    writer = router(keys=old)
    await writer.turn()
    rotated = router(keys=new)
    assert await rotated.turns() == 1
    assert [len(await its.store.owned_by("0a1b", documents=False)) for its in (writer, rotated)] == [1, 1]
    await rotated.turn(TURN_2)
    # the turn has encrypted all of the record anew, and goes on in parts
    await rotated.turn(replace(TURN_2, turns=3, token_ids=(*TURN_2.token_ids, 5)))
    assert await router(keys=AtRestKeys((b"2" * 32,))).turns() == 3
    with redis_server.client() as client:
        assert client.hget("kvferry:router:{0a1b}:session:s", "parts") == b"2"


@pytest.mark.parametrize("keys", [None, AtRestKeys((b"3" * 32,))], ids=["none", "another"])
async def test_a_record_of_another_key_is_a_named_error_and_can_be_deleted(
    router: Callable[..., Router], keys: AtRestKeys | None
) -> None:
    await router(keys=AtRestKeys((b"1" * 32,))).turn()
    other = router(keys=keys)
    for attempt in (other.turn, other.turns, partial(other.store.owned_by, "0a1b", documents=False)):
        with pytest.raises(StoreUnavailable, match="session 's' cannot be decrypted") as refused:
            await attempt()
        assert refused.value.reason == "key"
    await other.store.delete(KEY)
    assert await other.turns() is None
    assert await other.turn() is None


async def test_a_part_of_another_session_is_refused(router: Callable[..., Router], redis_server: Any) -> None:
    one = router(keys=AtRestKeys((b"1" * 32,)))
    for session_id in ("s", "t"):
        await one.turn(key=replace(KEY, session_id=session_id))
    with redis_server.client() as client:
        part = client.hget("kvferry:router:{0a1b}:session:t", "part:0")
        assert client.hset("kvferry:router:{0a1b}:session:s", "part:0", part) == 0
    with pytest.raises(StoreUnavailable, match="session 's' cannot be decrypted"):
        await router(keys=AtRestKeys((b"1" * 32,))).turns()
