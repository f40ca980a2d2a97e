"""How session records are in Redis: parts, earlier releases' records, what is sent, encryption."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from kvtest.session_routers import KEY, NOW_S, RECORD, TURN_2, Router

from kvferry.services.router.sessions.record import SessionRecord
from kvferry.services.router.sessions.stored_record import write_whole
from kvferry.shared.errors import StoreUnavailable
from kvferry.shared.model.chat_template import ChatMessage
from kvferry.shared.trust.at_rest import AtRestKeys


async def test_redis_sends_a_record_to_a_router_that_has_no_current_copy(
    router: Callable[..., Router], redis_server: Any
) -> None:
    one, other = router(), router()
    long = replace(RECORD, messages=(ChatMessage("user", "x" * 100_000),))
    await one.turn(long)

    async def sent_bytes(reader: Router) -> int:
        with redis_server.client() as client:
            before = client.info("stats")["total_net_output_bytes"]
            async with reader.store.lease(KEY) as lease:
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


async def converse(router: Router, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await router.turn(after_turns(number))


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
    for reader in (one, other):
        with redis_server.client() as client:
            before = client.info("stats")["total_net_output_bytes"]
            assert await reader.turns() == 50
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
        committed = await records.commit(KEY, "r.1", stored.commit_id, turn, before=stored.record)
        assert committed is not None
    await records.release(KEY, "r.1")
    with redis_server.client() as client:
        assert client.hget("kvferry:router:{0a1b}:session:s", "parts") == b"4"
    assert the_same(await one.turn(after_turns(5)), after_turns(4))


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
    assert [len(await each.store.owned_by("0a1b", documents=False)) for each in (writer, rotated)] == [1, 1]
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
