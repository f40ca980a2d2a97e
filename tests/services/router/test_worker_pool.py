"""Which worker is chosen, and how workers come, go and restart."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from kvtest.router import SPEC, scripted_token
from kvtest.scripted_workers import Script, ScriptedDecode, Wire
from kvtest.waiting import eventually

from kvferry.services.router.turn import worker_pool
from kvferry.services.router.turn.runner import served_model, shared_version
from kvferry.services.router.turn.worker_pool import NUM_COMPARED, NUM_NEAR, WorkerPool, resolve_address
from kvferry.shared.errors import ConfigurationError, DeadlineExceeded, WorkerUnavailable


class Pool:
    """A pool over scripted workers whose addresses can change."""

    def __init__(self, *names: str) -> None:
        script = Script(spec=SPEC, token=scripted_token, new_assembler=lambda stop: None)  # type: ignore[arg-type,return-value]
        wire = Wire()
        self.workers = {name: ScriptedDecode(script, wire) for name in ("a", "b", "c")}
        self.names = names
        self.closed: list[str] = []

        self.num_resolved = 0

        async def resolve(_: str) -> tuple[str, ...]:
            self.num_resolved += 1
            return self.names

        async def disconnect(client: ScriptedDecode) -> None:
            self.closed.append(next(name for name, it in self.workers.items() if it is client))

        self.pool: WorkerPool[Any] = WorkerPool(
            "decode",
            ("workers:1",),
            connect=self.workers.__getitem__,
            disconnect=disconnect,
            resolve=resolve,
            status_interval_s=0.02,
            status_timeout_s=0.2,
            resolve_interval_s=0.02,
        )

    async def resolved(self) -> None:
        """Wait until the name was resolved again, and the answer was used."""
        before = self.num_resolved
        await eventually(lambda: self.num_resolved >= before + 2)

    async def __aenter__(self) -> Pool:
        await self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()

    def chosen(self, **options: Any) -> str:
        address: str = self.pool.choose(fingerprint=SPEC.fingerprint, **options).address
        return address


async def test_least_loaded_worker_is_chosen() -> None:
    async with Pool("a", "b") as it:
        it.workers["a"].active = {"x", "y"}
        it.workers["b"].active = {"z"}
        await asyncio.gather(it.workers["a"].asked(), it.workers["b"].asked())
        assert it.chosen() == "b"
        worker = it.pool.worker("b")
        with worker.busy(), worker.busy(), worker.busy():
            assert it.chosen() == "a"
        assert it.chosen() == "b"


async def test_equally_idle_workers_share_the_work() -> None:
    async with Pool("a", "b", "c") as it:
        assert {it.chosen() for _ in range(100)} == {"a", "b", "c"}


async def test_preference_is_followed_and_avoidance_where_there_is_a_choice() -> None:
    async with Pool("a", "b") as it:
        it.workers["a"].active = {"x"}
        await it.workers["a"].asked()
        assert it.chosen(prefer=("gone", "a")) == "a"
        assert it.chosen(avoid={"b"}) == "a"
        assert it.chosen(prefer=("a",), avoid={"a"}) == "b"
        assert it.chosen(avoid={"a", "b"}) == "b"


async def test_only_ready_workers_of_the_model_and_protocol_are_chosen() -> None:
    async with Pool("a") as it:
        worker = it.workers["a"]
        with pytest.raises(WorkerUnavailable):
            it.pool.choose(fingerprint="another")
        worker.ready = False
        await eventually(lambda: not it.pool.ready_workers())
        with pytest.raises(WorkerUnavailable) as none:
            it.chosen()
        assert none.value.retry_after_s == it.pool.status_interval_s, "the next status call"
        worker.ready = True
        await it.pool.wait_ready(SPEC.fingerprint, timeout_s=60.0)
        assert it.chosen() == "a"


async def test_workers_of_several_block_protocols_are_told_apart() -> None:
    async with Pool("a", "b", "c") as it, Pool("a", "b", "c") as other:
        assert shared_version(it.pool, other.pool, "another") is None
        it.workers["a"].version = it.workers["b"].version = other.workers["a"].version = 9
        for name in ("b", "c"):
            other.workers[name].version = 8
        await eventually(lambda: it.pool.versions(SPEC.fingerprint)[9] == 2)
        await eventually(lambda: other.pool.versions(SPEC.fingerprint) == {9: 1, 8: 2})
        assert shared_version(it.pool, other.pool, SPEC.fingerprint) == 9
        assert {it.chosen(version=9) for _ in range(40)} == {"a", "b"}
        assert it.chosen(version=9, prefer=("c", "b")) == "b"
        it.workers["b"].version = it.workers["c"].version = 8
        await eventually(lambda: it.pool.versions(SPEC.fingerprint) == {9: 1, 8: 2})
        assert shared_version(it.pool, other.pool, SPEC.fingerprint) == 8  # two pairs rather than one
        assert shared_version(it.pool, other.pool, SPEC.fingerprint, prefer=("gone", "a")) == 9
        for worker in it.workers.values():
            worker.version = 7
        await eventually(lambda: it.pool.versions(SPEC.fingerprint) == {7: 3})
        assert shared_version(it.pool, other.pool, SPEC.fingerprint) is None
        assert served_model(it.pool, other.pool, ready_only=True) is None


async def test_workers_that_hang_or_fail_are_down_and_come_back() -> None:
    async with Pool("a", "b") as it:
        status = it.workers["a"].status

        async def hang(*, timeout_s: float) -> Any:
            await asyncio.sleep(60)

        it.workers["a"].status = hang  # type: ignore[method-assign]
        it.workers["b"].status_error = WorkerUnavailable("refused")
        await eventually(lambda: not it.pool.ready_workers())
        it.workers["a"].status = status  # type: ignore[method-assign]
        await eventually(lambda: len(it.pool.ready_workers()) == 1)
        assert it.chosen() == "a"


@pytest.mark.parametrize("error", [TimeoutError(), DeadlineExceeded("late")])
async def test_a_worker_is_not_down_for_one_late_status(error: Exception) -> None:
    async with Pool("a") as it:
        worker, status = it.pool.worker("a"), it.workers["a"].status
        late, was_ready = 0, []

        async def every_other_time(*, timeout_s: float) -> Any:
            nonlocal late
            was_ready.append(worker.ready_for is not None)
            if len(was_ready) % 2:
                late += 1
                raise error
            return await status(timeout_s=timeout_s)

        it.workers["a"].status = every_other_time  # type: ignore[method-assign]
        await eventually(lambda: late == 5)
        assert all(was_ready)

        async def never(*, timeout_s: float) -> Any:
            raise error

        it.workers["a"].status = never  # type: ignore[method-assign]
        await eventually(lambda: worker.ready_for is None)


@pytest.mark.parametrize("sign", ["heard", "stood still"])
async def test_a_worker_with_late_statuses_is_not_down_where_the_machine_is_busy(
    sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams say something, or this router itself does not run."""
    async with Pool("a") as it:
        worker, loop = it.pool.worker("a"), asyncio.get_running_loop()
        monkeypatch.setattr(worker_pool, "_STOOD_STILL_S", 0.05)
        num_late, is_busy = 0, True

        async def late(*, timeout_s: float) -> Any:
            nonlocal num_late
            num_late += 1
            if is_busy and sign == "stood still":
                time.sleep(timeout_s + 0.1)
            raise DeadlineExceeded("late")

        if sign == "heard":
            monkeypatch.setattr(it.pool, "_heard_s", lambda _: loop.time() if is_busy else 0.0)
        it.workers["a"].status = late  # type: ignore[method-assign]
        with worker.busy():
            await eventually(lambda: num_late >= 6)
            assert worker.ready_for is not None
            assert it.closed == []
            is_busy = False
            await eventually(lambda: it.closed == ["a"])  # its turns are given up
            assert worker.ready_for is None


async def test_lost_worker_is_down_until_its_next_status() -> None:
    async with Pool("a", "b") as it:
        worker = it.pool.worker("a")
        it.pool.report_lost("a", "an earlier instance")
        assert worker.status is not None
        it.pool.report_lost("a", worker.instance_id)
        assert worker.status is None
        assert it.chosen() == "b"
        await eventually(lambda: worker.status is not None)


async def test_restart_is_noticed() -> None:
    async with Pool("a") as it:
        before = it.pool.worker("a").instance_id
        it.workers["a"].instance_id = "restarted"
        await eventually(lambda: it.pool.worker("a").instance_id == "restarted")
        assert before != "restarted"


async def test_workers_come_and_go_with_their_name() -> None:
    async with Pool("a") as it:
        it.names = ("a", "b")
        await eventually(lambda: len(it.pool.ready_workers()) == 2)
        with it.pool.worker("a").busy():
            it.names = ("b",)
            await it.resolved()
            assert it.pool.worker("a") is not None  # a turn is in flight there
        await eventually(lambda: it.pool.worker("a") is None)
        assert it.closed == ["a"]
        it.names = ()  # the name does not resolve for a moment
        await it.resolved()
        assert it.chosen() == "b"
    assert it.closed == ["a", "b"]


async def test_served_model_is_one_that_both_roles_hold() -> None:
    async with Pool("a", "b") as one, Pool("c") as other:
        changed = replace(SPEC, fingerprint="changed")
        one.workers["a"].script = replace(one.workers["a"].script, spec=changed)
        await eventually(lambda: len(one.pool.models(ready_only=True)) == 2)
        assert served_model(one.pool, other.pool) == SPEC
        other.workers["c"].script = replace(other.workers["c"].script, spec=changed)
        await eventually(lambda: served_model(one.pool, other.pool) == changed)
        other.workers["c"].ready = False
        await eventually(lambda: served_model(one.pool, other.pool, ready_only=True) is None)
        assert served_model(one.pool, other.pool) == changed


@asynccontextmanager
async def large_pool(*names: str) -> AsyncIterator[WorkerPool[Any]]:
    """A pool of idle scripted workers that is polled once."""
    script = Script(spec=SPEC, token=scripted_token, new_assembler=lambda stop: None)  # type: ignore[arg-type,return-value]
    clients = {name: ScriptedDecode(script, Wire()) for name in names}
    pool: WorkerPool[Any] = WorkerPool.of_clients("decode", clients, status_interval_s=1000.0)
    await pool.start()
    yield pool
    await pool.close()


async def test_a_worker_that_stays_silent_is_connected_to_anew_though_it_runs_no_turn() -> None:
    """What is at fault may be the connection: this one never answers again, and a second one does."""
    async with Pool("a") as it:
        broken = it.workers["a"]

        async def silent(*, timeout_s: float) -> Any:
            await asyncio.sleep(timeout_s)
            raise WorkerUnavailable("silent")

        broken.status = silent  # type: ignore[method-assign]
        await eventually(lambda: not it.pool.ready_workers())
        it.workers.update(a=it.workers["b"], c=broken)
        await eventually(lambda: [ready.address for ready in it.pool.ready_workers()] == ["a"])
        worker = it.pool.worker("a")
        assert worker is not None
        assert worker.client is it.workers["a"]
        assert worker.missed == 0
        assert it.closed[-1] == "c"


async def test_a_choice_looks_at_a_few_of_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: Counter[str] = Counter()
    load = worker_pool._load

    def counted(worker: Any) -> tuple[int, int]:
        looked[worker.address] += 1
        return load(worker)

    async with large_pool(*(f"w{number}" for number in range(40))) as pool:
        monkeypatch.setattr(worker_pool, "_load", counted)
        avoid = {"w0", "w1"}
        chosen = Counter(pool.choose(fingerprint=SPEC.fingerprint, avoid=avoid).address for _ in range(400))
        assert looked.total() <= 400 * (NUM_COMPARED + len(avoid))
        assert looked.total() >= 400 * NUM_COMPARED
        assert not avoid & set(chosen)
        assert len(chosen) > 30  # equally idle ones take turns
        looked.clear()
        assert pool.choose(fingerprint=SPEC.fingerprint, prefer=("gone", "w7")).address == "w7"
        assert not looked
        busy = pool.worker("w9")
        with busy.busy():
            for _ in range(200):
                assert pool.choose(fingerprint=SPEC.fingerprint) is not busy


async def test_every_router_finds_the_same_workers_near_a_place() -> None:
    names = [f"w{number}" for number in range(20)]

    def near(pool: WorkerPool[Any], place: int) -> set[str]:
        return {worker.address for worker in pool.near(place, fingerprint=SPEC.fingerprint)}

    async with large_pool(*names) as one, large_pool(*reversed(names)) as other:
        places = [number * (1 << 64) // 64 for number in range(64)]
        found = [near(one, place) for place in places]
        assert found == [near(other, place) for place in places]
        assert {len(nearest) for nearest in found} == {NUM_NEAR}
        assert set.union(*found) == set(names)
        one.report_lost("w3", one.worker("w3").instance_id)
        for before, place in zip(found, places, strict=True):
            assert len(near(one, place) & before) == NUM_NEAR - ("w3" in before)
        with one.worker(min(found[0] - {"w3"})).busy():
            least = one.near(places[0], fingerprint=SPEC.fingerprint)
            assert least[-1].address == min(found[0] - {"w3"})
    async with large_pool("a", "b") as few:
        assert sorted(near(few, 0)) == ["a", "b"]


async def test_clients_of_the_caller_have_names_that_are_not_resolved_and_stay_open() -> None:
    it = Pool("a")
    pool: WorkerPool[Any] = WorkerPool.of_clients(
        "decode", {"in-process": it.workers["a"]}, status_interval_s=1.0
    )
    await pool.start()
    assert pool.choose(fingerprint=SPEC.fingerprint).address == "in-process"
    await pool.close()
    assert it.closed == []


async def test_names_resolve_to_addresses_with_their_port() -> None:
    assert await resolve_address("127.0.0.1:9001") == ("127.0.0.1:9001",)
    assert await resolve_address("[::1]:9001") == ("[::1]:9001",)
    assert await resolve_address("localhost:9001") in (("127.0.0.1:9001",), ("[::1]:9001",))
    assert await resolve_address("no-such-host.invalid:1") == ()
    with pytest.raises(ConfigurationError):
        await resolve_address("no-port")
