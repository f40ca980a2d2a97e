"""What the decode service tells of itself: readiness, status and metrics."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from kvtest.clock import Clock
from kvtest.disturbed import FreezingCondition
from kvtest.waiting import eventually

from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.process import heartbeat


def block_steps(made):
    """Have the next step wait. Returns: events: that it has begun, and that it may go on."""
    stuck, release = threading.Event(), threading.Event()

    def block(token_ids):
        stuck.set()
        release.wait(60)

    made.model.before_step = block
    return stuck, release


async def test_a_worker_whose_steps_all_fail_is_not_ready_until_one_succeeds(harness, request_of):
    made = await harness()

    def fail(token_ids):
        raise RuntimeError("device lost")

    made.model.before_step = fail
    for _ in range(3):
        with pytest.raises(KvferryError, match="device lost"):
            await made.tokens(request_of())
    assert not (await made.service.status(timeout_s=1)).ready
    made.model.before_step = lambda token_ids: None
    await made.tokens(request_of())
    assert (await made.service.status(timeout_s=1)).ready


async def test_a_worker_whose_engine_is_stuck_is_not_ready(harness, request_of):
    clock = Clock()
    made = await harness(clock=clock, heartbeat_timeout_s=10.0)
    assert (await made.service.status(timeout_s=1)).ready
    for _ in range(3):
        clock.turn(11.0)
        await eventually(lambda: made.service.is_ready)  # idle is not stuck
    stuck, release = block_steps(made)
    task = asyncio.create_task(made.tokens(request_of()))
    await asyncio.to_thread(stuck.wait, 60)
    assert (await made.service.status(timeout_s=1)).ready
    clock.turn(11.0)
    assert not (await made.service.status(timeout_s=1)).ready
    release.set()
    assert len(await task) == 8


async def test_a_wedged_engine_gives_up_its_requests_and_frees_them_when_it_goes_on(harness, request_of):
    clock = Clock()
    made = await harness(clock=clock, heartbeat_timeout_s=1e6)
    stuck, release = block_steps(made)
    running = asyncio.create_task(made.tokens(request_of()))
    await asyncio.to_thread(stuck.wait, 60)
    clock.turn(heartbeat.FRESH_S)
    await eventually(lambda: made.service._engine.heartbeat._mark is not None)
    assert made.service.is_ready
    while not running.done():
        clock.turn(heartbeat.STALL_S)
        await asyncio.sleep(0.02)
    with pytest.raises(WorkerUnavailable, match="no progress") as given_up:
        await running
    assert given_up.value.reason == "wedged"
    assert not made.service.is_ready
    release.set()
    assert await made.arena_is_free()
    made.model.before_step = lambda token_ids: None
    await eventually(lambda: made.service.is_ready)  # at the sweeper's next look; until then it gives up
    assert len(await made.tokens(request_of())) == 8
    assert made.service.is_ready


async def test_an_engine_that_stands_still_while_it_waits_for_work_is_not_ready(
    harness, request_of, monkeypatch
):
    clock = Clock()
    made = await harness(clock=clock, heartbeat_timeout_s=1e6)
    goes_on, stands_still = threading.Event(), threading.Event()
    monkeypatch.setattr(FreezingCondition, "goes_on", goes_on)
    monkeypatch.setattr(FreezingCondition, "stands_still", stands_still)
    made.service._engine._condition.__class__ = FreezingCondition
    await asyncio.to_thread(stands_still.wait, 60)
    assert made.service.is_ready
    try:
        async with asyncio.timeout(60):
            while made.service.is_ready:
                clock.turn(heartbeat.STALL_S)
                await asyncio.sleep(0.02)
        with pytest.raises(WorkerUnavailable, match="no progress"):
            await made.tokens(request_of())
    finally:
        goes_on.set()
    assert await made.arena_is_free()
    await eventually(lambda: made.service.is_ready)
    assert len(await made.tokens(request_of())) == 8


async def test_a_busy_engine_is_not_wedged_however_long_its_step_takes(harness, request_of):
    clock = Clock()
    made = await harness(clock=clock, heartbeat_timeout_s=1e6, sweep_interval_s=600.0)
    seen = []

    def compute(token_ids):
        for _ in range(3):
            clock.turn(2 * heartbeat.STALL_S)
            until_s = time.thread_time() + 0.01
            while time.thread_time() < until_s:
                sum(range(1000))
            made.service._give_up_if_wedged()  # as the sweeper does
        seen.append(made.service.is_ready)

    made.model.before_step = compute
    assert len(await made.tokens(request_of(max_tokens=3))) == 3
    assert seen == [True, True]


async def test_status_tells_identity_load_and_memory(harness, request_of, ticket_of):
    made, other = await harness(), await harness()
    status = await made.service.status(timeout_s=1)
    assert (status.role, status.model, status.running, status.waiting) == ("decode", made.model.spec, 0, 0)
    assert (status.free_bytes, status.total_bytes) == (1 << 20, 1 << 20)
    assert {"full", "rocketkv"} <= set(status.methods)
    assert status.instance_id != (await other.service.status(timeout_s=1)).instance_id
    stream, ticket = await ticket_of(made.service, request_of())
    status = await made.service.status(timeout_s=1)
    assert (status.waiting, status.free_bytes) == (1, (1 << 20) - ticket.reserved_bytes)
    await stream.aclose()


async def test_every_metric_family_moves_and_the_arena_sums_to_its_size(harness, request_of):
    made = await harness()
    seen = []
    made.model.before_step = lambda token_ids: seen.append(
        (made.value("arena_bytes"), made.value("arena_bytes", state="running"))
    )
    await made.run(request_of(method="rocketkv", tokens=16, prompt=[4] * 100, max_tokens=5))
    assert {total for total, _ in seen} == {1 << 20}
    assert min(running for _, running in seen) > 0
    assert made.value("arena_bytes", state="free") == 1 << 20
    assert made.value("arena_bytes", state="retained") == 0
    assert made.value("decode_step_seconds_count", model="small") == 4
    assert made.value("admission_seconds_count", model="small") == 1
    assert made.value("decode_tokens_total", model="small", method="rocketkv") == 4
    assert made.value("decode_batch_size", model="small") == 0


async def test_a_probe_runs_like_a_request_and_moves_no_counter(harness, request_of):
    made = await harness()
    assert len(await made.tokens(request_of(probe=True))) == 8
    assert made.value("decode_tokens_total") == 0
    assert made.value("decode_step_seconds_count") == 7
