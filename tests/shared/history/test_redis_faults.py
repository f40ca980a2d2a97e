"""Redis killed, paused, emptied, full, evicting or slow at any moment of a turn: the turn completes with the
right rows, the miss is counted, and what is stored is whole again once Redis is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from kvtest import redis_server as redis_servers
from kvtest.history import tokens

from kvferry.shared.control.messages import SessionKey

if TYPE_CHECKING:
    from kvtest.history import Worker

A = SessionKey(owner="key-a", session_id="s")
FAULTS = ["killed", "paused", "emptied", "full"]
MOMENTS = ["before", "first layer", "last layer", "commit"]


def strike(server: Any, fault: str) -> None:
    if fault == "killed":
        server.kill()
    elif fault == "paused":
        server.pause()
    elif fault == "emptied":
        with server.client() as admin:
            admin.flushall()
    elif fault == "full":
        with server.client() as admin:
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", "1")


def heal(server: Any, fault: str) -> None:
    if fault == "killed":
        server.start()
    elif fault == "paused":
        server.resume()
    elif fault == "full":
        with server.client() as admin:
            admin.config_set("maxmemory", "0")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_turn_survives_and_the_history_recovers(
    make_worker: Callable[..., Worker], redis_server: Any, fault: str, moment: str
) -> None:
    said = tokens(30)
    make_worker().turn(A, said)
    # a worker that has the session in Redis alone
    worker = make_worker(timeout_s=1.0 if fault == "paused" else 20.0)
    prompt = (*said, 1, 2)

    def at(name: str) -> None:
        if name == moment:
            strike(redis_server, fault)

    at("before")
    names = {0: "first layer", 2: "last layer"}
    reused = worker.turn(
        A, prompt, (3, 4), at_layer=lambda layer: at(names.get(layer, "")), before_commit=lambda: at("commit")
    )
    lost = moment == "before" and fault != "full"
    if fault == "full" or moment == "commit":
        assert reused == 30
        assert not worker.misses
    elif lost:
        assert reused == 0
        if fault != "emptied":  # nobody is left who knows that there was a session
            assert worker.misses == {"redis_unavailable": 1}
    elif reused == 0:
        assert worker.misses.total() == 1
        assert set(worker.misses) <= {"redis_unavailable", "evicted"}
    else:  # the layer was on its way already
        assert reused == 30
    if fault != "emptied":
        assert worker.failures
    heal(redis_server, fault)
    time.sleep(0.01)  # longer than the breaker leaves Redis alone
    said = (*prompt, 3, 4)
    while worker.link.breaker.is_open:
        worker.store.info(SessionKey(owner="key-a", session_id="other"))
        time.sleep(0.01)
    worker.failures.clear()
    worker.misses.clear()
    assert worker.turn(A, (*said, 5)) == len(said) - 1
    assert not worker.failures
    assert not worker.misses
    fresh = make_worker()
    assert fresh.turn(A, (*said, 5, 6)) == len(said) + 1
    fresh.store.drop(A)
    with redis_server.client() as admin:
        assert admin.dbsize() == 0


def test_values_evicted_at_random_are_computed_again_and_written_again(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    generator = random.Random(5)
    said = tokens(12)
    make_worker(value_bytes=160).turn(A, said)
    misses = 0
    with redis_server.client() as admin:
        for number in range(12):
            worker = make_worker(value_bytes=160)
            keys = sorted(admin.keys("*"))
            values = [key for key in keys if b"/s}:" in key and key[-1:].isdigit()]
            indexes = [key for key in keys if key not in values and not key.endswith(b":record")]
            admin.delete(generator.choice(values))
            for key in generator.sample(indexes, generator.randrange(len(indexes))):
                admin.delete(key)
            said = (*said, *tokens(3, seed=number))
            worker.turn(A, said)
            misses += worker.misses.total()
            assert not worker.failures
            # what was written is whole
            checked = make_worker(value_bytes=160)
            assert checked.turn(A, (*said, 1)) == len(said)
            said = (*said, 1)
        assert misses == 12
        checked.store.drop(A)
        assert admin.dbsize() == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "swap"])
def test_damaged_values_are_misses_and_give_way(
    make_worker: Callable[..., Worker], redis_server: Any, damage: str
) -> None:
    said = tokens(30)
    make_worker().turn(A, said)
    with redis_server.client() as admin:
        values = sorted(key for key in admin.keys("*s}:*:*") if admin.type(key) == b"string")
        value = bytearray(admin.get(values[1]))
        if damage == "flip":
            value[-3] ^= 1
        elif damage == "cut":
            del value[-4:]
        else:
            value = bytearray(admin.get(values[0]))
        admin.set(values[1], bytes(value))
    worker = make_worker()
    assert worker.turn(A, (*said, 1)) == 0
    assert worker.misses == {"corrupt": 1}
    assert make_worker().turn(A, (*said, 1, 2)) == 31


def test_a_damaged_record_is_a_miss_and_gives_way(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    said = tokens(30)
    make_worker().turn(A, said)
    with redis_server.client() as admin:
        (key,) = admin.keys("*:record")
        admin.setrange(key, 60, b"\xff\xff")
    worker = make_worker()
    assert worker.turn(A, (*said, 1)) == 0
    assert worker.misses == {"corrupt": 1}
    assert make_worker().turn(A, (*said, 1, 2)) == 31


def test_a_session_that_every_tier_lost_is_a_counted_miss(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    worker = make_worker()
    worker.turn(A, tokens(30))
    worker.evict(A)
    with redis_server.client() as admin:
        admin.flushall()
    assert worker.turn(A, (*tokens(30), 1)) == 0
    assert worker.misses == {"evicted": 1}


def test_rows_that_come_too_slowly_are_computed(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    gate = redis_servers.Gate(redis_server.port)
    make_worker().turn(A, tokens(30))
    slow = make_worker(gate.url, turn_timeout_s=0.1)
    prompt = (*tokens(30), 1)
    turn = slow.begin(A, prompt)
    assert turn.reused_tokens == 30
    gate.hold()
    assert slow.run(turn, prompt, lambda layer: None) == 0
    assert slow.misses == {"redis_slow": 1}
    gate.release()
    turn.commit(prompt)
    assert not slow.failures
    assert make_worker().turn(A, (*prompt, 2)) == 31
    gate.close()
