"""Metrics and status: every family moves, probes move nothing that counts, readiness means work."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from kvtest.clock import Clock
from kvtest.disturbed import FreezingCondition
from kvtest.prefill import make_prompt
from kvtest.waiting import eventually
from torch import Tensor

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import method_names, plan_for
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import TransferFailed, WorkerUnavailable
from kvferry.shared.process import heartbeat
from kvferry.shared.wire.messages import PROTOCOL_VERSION, BlockHeader

if TYPE_CHECKING:
    from kvtest.prefill import Harness

A = SessionKey(owner="key-a", session_id="s")


def moved(harness: Harness) -> dict[str, float]:
    """Every sample that is not zero, timestamps of creation aside."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in harness.metrics.registry.collect()
        for sample in family.samples
        if sample.value != 0 and not sample.name.endswith("_created")
    }


async def test_every_family_is_moved(harness: Harness) -> None:
    plan = plan_for("rocketkv", budget=Budget(tokens=48))
    prompt = make_prompt(150)
    request = harness.request(prompt, session=A, plan=plan)
    await harness.run(request)
    await harness.commit(request)
    more = prompt + make_prompt(40, seed=1)  # more than the queries that the method observes
    next_request = harness.request(more, session=A, plan=plan)
    ticket = replace(
        next_request.ticket,
        retained_transfer_id=request.ticket.transfer_id,
        retained_tokens=len(prompt),
        retained_depth=1,
    )
    _, done = await harness.run(replace(next_request, ticket=ticket))
    assert done.delta_bytes == done.bytes_by_kind["rows"]

    def drop(layer: int, keys: Tensor) -> None:
        harness.store.drop(A)

    harness.model.on_layer = drop
    await harness.run(harness.request(more, session=A, plan=plan_for("full")))
    harness.model.on_layer = None
    refusal = TransferFailed("no", reason="refused")
    harness.sink.refuse = refusal
    with pytest.raises(TransferFailed):
        await harness.run(harness.request(prompt))
    harness.sink.refuse = None
    await harness.run(harness.request(prompt, session=A))

    for family in harness.metrics.registry.collect():
        if family.name in (
            "kvferry_history_store_failed",
            "kvferry_history_waiting",
            "kvferry_kv_resent_bytes",
        ):
            continue  # moved by tests/e2e/test_history_redis.py and tests/services/test_resume.py
        values = [s.value for s in family.samples if not s.name.endswith("_created")]
        assert any(value > 0 for value in values), family.name
    assert harness.metric("history_bytes", tier="memory") == harness.store.size_bytes > 0
    assert harness.metric("transfer_failed_total", reason="refused") == 1


async def test_bytes_shipped_are_counted_by_kind_and_equal_the_answer(harness: Harness) -> None:
    plan = plan_for("snapkv", budget=Budget(tokens=48))
    first, done = await harness.run(harness.request(make_prompt(150), plan=plan))
    for kind, size_bytes in done.bytes_by_kind.items():
        counted = harness.metric("kv_transfer_bytes_total", model="demo", method="snapkv", kind=kind)
        assert counted == size_bytes
    assert harness.metric("kv_transfer_bytes_total") == sum(done.bytes_by_kind.values())
    assert harness.metric("kv_full_bytes_total", method="snapkv") == first.full_bytes
    assert first.full_bytes == harness.model.spec.full_bytes(150)
    ratio = harness.metric("kv_compression_ratio_sum", method="snapkv")
    assert ratio == pytest.approx(first.full_bytes / sum(done.bytes_by_kind.values()))
    assert done.prefill_s >= done.compress_s > 0
    assert first.queue_s >= 0
    assert done.transfer_s >= 0


async def test_a_probe_moves_no_request_token_or_byte(harness: Harness) -> None:
    before = moved(harness)
    first, done = await harness.run(harness.request(make_prompt(40), probe=True))
    assert first.token.index == 0
    assert done.bytes_by_kind["rows"] > 0
    assert moved(harness) == before


async def test_status_names_the_worker_and_is_ready_once_the_engine_has_worked(harness: Harness) -> None:
    await harness.run(harness.request(make_prompt(20), session=A))
    status = await harness.service.status(timeout_s=1)
    assert status.role == "prefill"
    assert status.ready
    assert status.protocol_version == PROTOCOL_VERSION
    assert status.model == harness.model.spec
    assert status.methods == method_names()
    assert status.total_bytes == harness.store.max_bytes
    assert status.free_bytes == status.total_bytes - harness.store.size_bytes
    assert status.free_bytes < status.total_bytes
    assert (status.running, status.waiting) == (0, 0)


async def test_a_wedged_engine_gives_up_its_requests(
    harness: Harness, prefill_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.services.prefill.service._SWEEP_INTERVAL_S", 0.05)
    harness.model.hold.clear()
    running = asyncio.create_task(harness.run(harness.request(make_prompt(20))))
    await eventually(harness.model.entered.is_set)
    waiting = asyncio.create_task(harness.run(harness.request(make_prompt(30))))
    await asyncio.sleep(0)
    while not (running.done() and waiting.done()):
        prefill_clock.turn(heartbeat.STALL_S)
        await asyncio.sleep(0.05)
    for task in (running, waiting):
        with pytest.raises(WorkerUnavailable, match="no progress"):
            await task
    assert not harness.service.is_ready
    harness.model.hold.set()
    await eventually(lambda: not harness.service._is_wedged)  # until then it gives up what comes
    await harness.run(harness.request(make_prompt(20)))
    await eventually(lambda: harness.service.is_ready)


async def test_an_engine_that_stands_still_while_it_waits_for_work_gives_up_what_comes(
    harness: Harness, prefill_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.services.prefill.service._SWEEP_INTERVAL_S", 0.05)
    engine, goes_on = harness.service._engine, threading.Event()
    engine._condition.__class__ = FreezingCondition
    await harness.run(harness.request(make_prompt(20)))
    await eventually(lambda: engine.heartbeat.waits)
    monkeypatch.setattr(FreezingCondition, "goes_on", goes_on)
    for _ in range(3):
        prefill_clock.turn(heartbeat.STALL_S)
        await asyncio.sleep(0.1)
        assert not harness.service._is_wedged, "nothing waits for it"
    running = asyncio.create_task(harness.run(harness.request(make_prompt(30))))
    try:
        async with asyncio.timeout(60):
            while not running.done():
                prefill_clock.turn(heartbeat.STALL_S)
                await asyncio.sleep(0.05)
        with pytest.raises(WorkerUnavailable, match="no progress"):
            await running
    finally:
        goes_on.set()
    await eventually(lambda: not harness.service._is_wedged)
    await harness.run(harness.request(make_prompt(20)))


@pytest.mark.parametrize("prefill_options", [{"buffer_bytes": 4096}])
async def test_a_prompt_that_waits_for_room_in_the_send_buffer_is_not_wedged(
    harness: Harness, prefill_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STALL_S", 1.0)
    engine, write, taken = harness.service._engine, harness.sink.write, threading.Event()

    def write_late(header: BlockHeader, payload: memoryview) -> None:
        assert taken.wait(60)
        write(header, payload)

    monkeypatch.setattr(harness.sink, "write", write_late)
    running = asyncio.create_task(harness.run(harness.request(make_prompt(200))))
    await eventually(harness.model.entered.is_set)
    seen: list[tuple[bool, float]] = []
    while seen[-20:] != [(True, engine.heartbeat.last_s)] * 20:  # until it waits and makes no progress
        seen.append((engine.heartbeat.waits, engine.heartbeat.last_s))
        await asyncio.sleep(0.01)
    assert not running.done()
    assert engine._schedule.started, "it is in mid-pass"
    for _ in range(5):
        prefill_clock.turn(heartbeat.STALL_S)
        harness.service._give_up_if_wedged()  # as the sweeper does
        assert harness.service.is_ready
    taken.set()
    await running


async def test_a_stuck_engine_is_not_ready_and_a_working_one_is_again(
    harness: Harness, prefill_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.services.prefill.engine._READY_TIMEOUT_S", 10.0)
    monkeypatch.setattr("kvferry.services.prefill.engine._PROBE_INTERVAL_S", 0.05)

    async def ready() -> bool:
        return (await harness.service.status(timeout_s=1)).ready

    harness.model.hold.clear()
    task = asyncio.create_task(harness.run(harness.request(make_prompt(20))))
    await eventually(harness.model.entered.is_set)
    prefill_clock.turn(11.0)
    assert not await ready()
    harness.model.hold.set()
    await task
    assert await ready()
    for _ in range(3):  # idle, its own probes keep it ready
        prefill_clock.turn(11.0)
        await eventually(lambda: harness.service.is_ready)
