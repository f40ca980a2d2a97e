"""Host memory over a real Redis: what workers share, what they take, who may commit, what is deleted. What is
the same over a folder is tried with both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from kvtest import redis_server as redis_servers
from kvtest.history import LAYERS, TOKEN_BYTES, fifty_turns, tokens
from kvtest.waiting import until

from kvferry.shared.control.messages import IMPLICIT_PREFIX, SessionKey
from kvferry.shared.errors import SessionBusy
from kvferry.shared.history.redis_history import record_key
from kvferry.shared.history.stored_format import CHUNK_HEADER_BYTES

if TYPE_CHECKING:
    from kvtest.history import Worker

A = SessionKey(owner="key-a", session_id="s")


def test_another_worker_continues_where_the_first_left(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    first, second = make_worker(), make_worker()
    prompt, answer = tokens(70), tokens(5, seed=1)
    assert first.turn(A, prompt, answer) == 0
    longer = prompt + answer + tokens(9, seed=2)
    turn = second.begin(A, longer)
    assert turn.reused_by_tier == {"memory": 0, "redis": 74}
    assert second.run(turn, longer, lambda layer: None) == 74
    assert turn.commit(longer).num_tokens == 84
    # the first one has 74 tokens itself and gets the other 10
    turn = first.begin(A, (*longer, 7, 7))
    assert turn.reused_by_tier == {"memory": 74, "redis": 10}
    assert first.run(turn, (*longer, 7, 7), lambda layer: None) == 84
    turn.commit((*longer, 7, 7))
    assert first.store.info(A).num_tokens == 86
    assert first.store.info(A).tier == "memory"
    info = make_worker().store.info(A)
    assert (info.num_tokens, info.tier) == (86, "redis")
    record = first.remote.record(A)
    assert record is not None
    assert (record.body.turn, record.body.method, record.body.fingerprint) == (3, "rocketkv", "model-a")
    assert not first.misses
    assert not second.misses


def test_what_redis_has_of_a_session_is_not_written_again(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    first, second = make_worker(), make_worker()
    prompt = tokens(84)
    first.turn(A, prompt[:74])
    second.turn(A, prompt)
    longer = (*prompt, 7, 7)
    turn = first.begin(A, longer)
    assert turn.reused_by_tier == {"memory": 74, "redis": 10}
    with redis_server.client() as admin:
        before = set(admin.keys("*"))
        assert first.run(turn, longer, lambda layer: None) == 84
        assert turn.commit(longer).num_tokens == 86
        # the two new tokens join the values that are there
        assert before <= set(admin.keys("*"))
    assert make_worker().turn(A, (*longer, 8)) == 86
    assert not first.misses


def test_a_session_that_both_tiers_have_lost_at_once_is_a_miss(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    make_worker().turn(A, tokens(20))
    with redis_server.client() as admin:
        admin.flushall()
    worker = make_worker()
    worker.begin(SessionKey(owner="key-a", session_id="new"), tokens(20)).abort()
    assert not worker.misses
    assert worker.turn(A, (*tokens(20), 1), has_history=True) == 0
    assert worker.misses == {"absent": 1}
    assert worker.turn(A, (*tokens(20), 1, 2), has_history=True) == 21
    assert worker.misses == {"absent": 1}


def test_the_bytes_in_redis_are_the_formulas_and_deleting_returns_every_one(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    worker = make_worker(value_bytes=10 * 2 * 2 * 4 * 4)  # ten tokens a value
    assert worker.turn(A, tokens(34), (1, 2)) == 0
    with redis_server.client() as admin:
        record_bytes = admin.strlen(record_key(A))
        held = sum(admin.strlen(key) for key in admin.keys("*") if admin.type(key) == b"string")
        num_values = LAYERS * (4 + 1)  # 34 tokens of the prompt, one generated
        expected = 35 * TOKEN_BYTES + num_values * CHUNK_HEADER_BYTES + record_bytes
        assert held == expected
        assert worker.remote.size_bytes == expected
        assert all(admin.pttl(key) > 0 for key in admin.keys("*"))
        assert worker.store.tier_bytes["redis"]() == expected
        assert worker.store.tier_bytes["memory"]() == 35 * TOKEN_BYTES
        assert worker.store.drop(A).num_tokens == 35
        assert admin.dbsize() == 0
    assert worker.remote.size_bytes == 0
    assert worker.store.size_bytes == 0


@pytest.mark.parametrize("waits", [True, False], ids=["through", "behind"])
def test_fifty_turns_over_two_workers_with_branches_keep_every_row(
    make_worker: Callable[..., Worker], redis_server: Any, waits: bool
) -> None:
    options = {"commit_timeout_s": 60.0 if waits else 0.0, "max_bytes": 400 * TOKEN_BYTES}
    workers = [make_worker(**options) for _ in range(2)]
    said = fifty_turns(A, workers if waits else workers[:1])
    for worker in workers:
        assert not worker.misses
        assert not worker.failures
        worker.store.close()
    fresh = make_worker()
    assert fresh.turn(A, (*said, 1)) == len(said) - 1
    fresh.store.drop(A)
    with redis_server.client() as admin:
        assert admin.dbsize() == 0


def test_two_workers_cannot_both_commit_a_turn(make_any_worker: Callable[..., Worker]) -> None:
    first, second = make_any_worker(), make_any_worker()
    base, one, other = tokens(20), (*tokens(20), 1, 2, 3), (*tokens(20), 4, 5)
    first.turn(A, base)
    turns = [(worker, worker.begin(A, prompt), prompt) for worker, prompt in ((first, one), (second, other))]
    for worker, turn, prompt in turns:
        worker.run(turn, prompt, lambda layer: None)
    turns[0][1].commit(one)
    with pytest.raises(SessionBusy):
        turns[1][1].commit(other)
    assert second.failures == {"fenced": 1}
    assert second.store.size_bytes == 0
    record = second.lowest.record(A)
    assert record is not None
    assert record.token_ids == one
    # it goes on from the other's turn
    assert second.turn(A, (*one, 9)) == len(one)


def test_two_first_turns_are_fenced_too(make_any_worker: Callable[..., Worker]) -> None:
    first, second = make_any_worker(), make_any_worker()
    turns = [(worker, worker.begin(A, tokens(9))) for worker in (first, second)]
    for worker, turn in turns:
        worker.run(turn, tokens(9), lambda layer: None)
    turns[1][1].commit(tokens(9))
    with pytest.raises(SessionBusy):
        turns[0][1].commit(tokens(9))


@pytest.mark.parametrize("goes_on", [False, True], ids=["first turns", "later turns"])
def test_a_turn_that_is_committed_while_another_is_written_is_fenced(
    make_any_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """The other turn comes after the base is read; what writes the record compares it once more."""
    first, second = make_any_worker(), make_any_worker()
    said = tokens(9) if goes_on else ()
    if goes_on:
        first.turn(A, said)
    record = first.lowest.record
    bases = [record(A)]
    turn, prompt = first.begin(A, (*said, 1, 2)), (*said, 1, 2)
    first.run(turn, prompt, lambda layer: None)
    second.turn(A, (*said, 3))
    monkeypatch.setattr(first.lowest, "record", lambda session: bases.pop() if bases else record(session))
    with pytest.raises(SessionBusy):
        turn.commit(prompt)
    assert first.failures == {"fenced": 1}
    kept = second.lowest.record(A)
    assert kept is not None
    assert kept.token_ids == (*said, 3)


def test_a_session_that_is_deleted_as_its_turn_begins_to_be_written_is_gone(
    make_any_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has taken the commit from the queue, where the deletion does not find it any more."""
    worker = make_any_worker()
    (tier,) = worker.store._tiers
    delete, pending = tier._delete, [A]

    def delete_late(*arguments: Any) -> bool:
        while pending:
            tier.delete(pending.pop())
        return delete(*arguments)

    monkeypatch.setattr(tier, "_delete", delete_late)
    worker.turn(A, tokens(20))
    worker.store.write_behind(60.0)
    assert worker.lowest.record(A) is None
    assert worker.lowest.size_bytes == 0
    assert not tier.wrote(A)
    # what comes after the deletion stays
    worker.turn(A, tokens(20))
    worker.store.write_behind(60.0)
    assert worker.lowest.record(A) is not None


def test_a_deleted_session_leaves_its_room_to_others(make_worker: Callable[..., Worker]) -> None:
    # as below, a session takes about 4200 bytes
    worker = make_worker(redis_max_bytes=2 * 4200 + 600)
    sessions = [SessionKey(owner="key-a", session_id=name) for name in "xyz"]
    for session in sessions[:2]:
        worker.turn(session, tokens(20))
    worker.store.drop(sessions[0])
    worker.turn(sessions[2], tokens(20))
    assert [worker.remote.record(session) is not None for session in sessions] == [False, True, True]


def test_a_key_over_its_quota_loses_its_own_longest_unused_sessions(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    # a session of 20 tokens takes 3840 bytes of rows, 168 of headers and its record, about 4200 in all
    worker = make_worker(redis_max_bytes=9000 + 4200)
    sessions = [SessionKey(owner="key-a", session_id=name) for name in "xyz"]
    other = SessionKey(owner="key-b", session_id="x")
    worker.turn(other, tokens(20))
    worker.turn(sessions[0], tokens(20, seed=1))
    time.sleep(0.002)
    worker.turn(sessions[1], tokens(20, seed=2))
    time.sleep(0.002)
    worker.turn(sessions[0], (*tokens(20, seed=1), 5))
    time.sleep(0.002)
    worker.turn(sessions[2], tokens(20, seed=3))
    held = [worker.remote.record(session) is not None for session in (*sessions, other)]
    assert held == [True, False, True, True]
    assert not worker.failures
    worker.turn(SessionKey(owner="key-a", session_id="large"), tokens(60))
    assert worker.failures == {"quota": 1}
    held = [worker.remote.record(session) is not None for session in (*sessions, other)]
    assert held == [True, False, True, True]
    for session in (*sessions, other, SessionKey(owner="key-a", session_id="large")):
        worker.store.drop(session)
    with redis_server.client() as admin:
        assert admin.dbsize() == 0


def test_the_total_quota_takes_nothing_from_another_key(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(redis_max_bytes=9000)
    mine = [SessionKey(owner="key-a", session_id=name) for name in "xy"]
    theirs = SessionKey(owner="key-b", session_id="x")
    worker.turn(mine[0], tokens(20))
    worker.turn(theirs, tokens(20))
    worker.turn(mine[1], tokens(20))
    held = [worker.remote.record(session) is not None for session in (*mine, theirs)]
    assert held == [False, True, True]
    worker.turn(SessionKey(owner="key-c", session_id="x"), tokens(20))
    assert worker.failures == {"quota": 1}


def test_another_models_history_is_replaced_and_never_read(
    make_any_worker: Callable[..., Worker], redis_server: Any
) -> None:
    make_any_worker().turn(A, tokens(20))
    other = make_any_worker(fingerprint="model-b")
    assert other.turn(A, (*tokens(20), 1)) == 0
    record = other.lowest.record(A)
    assert record is not None
    assert record.body.fingerprint == "model-b"
    assert make_any_worker(bits="8").begin(A, (*tokens(20), 1, 2)).reused_tokens == 0
    other.store.drop(A)
    with redis_server.client() as admin:
        assert admin.dbsize() == 0


def test_a_session_dropped_while_redis_is_down_is_deleted_when_it_returns(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    worker = make_worker(timeout_s=1.0)
    worker.turn(A, tokens(20))
    redis_server.pause()
    try:
        assert worker.store.drop(A).num_tokens == 20
    finally:
        redis_server.resume()
    # until it is, the session is as if it were not there
    deadline = time.monotonic() + 60
    with redis_server.client() as admin:
        while admin.dbsize():
            assert worker.store.begin(A, "peek", tokens(20)).reused_tokens == 0
            assert time.monotonic() < deadline
            worker.store.sweep()
            time.sleep(0.05)
    assert worker.turn(A, tokens(20)) == 0
    assert worker.remote.record(A) is not None


def test_nothing_is_remembered_of_a_session_that_was_lost_and_dropped_while_redis_was_down(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    worker = make_worker(timeout_s=1.0)
    worker.turn(A, tokens(20))
    worker.evict(A)
    turn = worker.begin(A, tokens(24))
    turn.restart()  # what a miss does
    worker.run(turn, tokens(24), lambda layer: None)
    redis_server.pause()
    try:
        turn.commit(tokens(24))
        worker.store.drop(A)
    finally:
        redis_server.resume()
    (tier,) = worker.store._tiers
    containers = [container for container in vars(tier).values() if isinstance(container, dict | set)]
    assert tier._rebuilds in containers

    def is_forgotten() -> bool:
        worker.store.sweep()
        return not any(A in container for container in containers)

    until(is_forgotten)
    with redis_server.client() as admin:
        assert not admin.dbsize()


def test_commits_behind_the_turn_are_there_after_closing(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    gate = redis_servers.Gate(redis_server.port)
    worker = make_worker(gate.url, commit_timeout_s=0.0)
    worker.turn(A, tokens(10))
    said = tokens(10)
    for number in range(5):
        said = (*said, number + 1)
        worker.turn(A, said)
    worker.store.close()
    gate.close()
    assert make_worker().turn(A, (*said, 99)) == len(said)


def test_a_cluster_keeps_a_session_on_one_node(make_worker: Callable[..., Worker]) -> None:
    with (
        redis_servers.RedisServer.running("--cluster-enabled", "yes") as server,
        server.client() as admin,
    ):
        admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(lambda: b"cluster_state:ok" in admin.execute_command("CLUSTER", "INFO"))
        url = f"redis+cluster://127.0.0.1:{server.port}"
        options = {"value_bytes": 640, "redis_max_bytes": 1 << 20}
        make_worker(url, **options).turn(A, tokens(40), (1, 2))
        slots = {admin.execute_command("CLUSTER", "KEYSLOT", key) for key in admin.keys("*/s}*")}
        assert len(slots) == 1
        reader = make_worker(url, **options)
        assert reader.turn(A, (*tokens(40), 1, 2, 3)) == 41
        reader.store.drop(A)
        assert admin.dbsize() == 0


def test_a_prompt_without_a_session_stays_in_memory(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    worker, prompt = make_worker(), tokens(70)
    first, second = (SessionKey(owner="key-a", session_id=f"{IMPLICIT_PREFIX}{n}") for n in range(2))
    worker.turn(first, prompt)
    assert worker.turn(second, (*prompt, 1), num_observed=1) == 70
    assert worker.store.drop(first).num_tokens == 70
    with redis_server.client() as admin:
        assert admin.keys("*") == []
    assert not worker.misses


@pytest.mark.parametrize("most", [0, 20, 50, 73])
def test_a_turn_may_limit_what_it_continues_from(
    make_worker: Callable[..., Worker], redis_server: Any, most: int
) -> None:
    first, second = make_worker(), make_worker()
    prompt = tokens(74)
    first.turn(A, prompt[:40])
    second.turn(A, prompt)
    turn = first.begin(A, (*prompt, 7), max_reused_tokens=most)
    assert turn.reused_by_tier == {"memory": min(most, 40)} | ({"redis": most - 40} if most > 40 else {})
    assert first.run(turn, (*prompt, 7), lambda layer: None) == most
    assert turn.commit((*prompt, 7)).num_tokens == 75
    assert make_worker().turn(A, (*prompt, 7, 8)) == 75
