"""Cancellation and leases: at every stage the arena gets back exactly what it gave."""

import asyncio
import contextlib
import threading
import time

import pytest
import torch
from kvtest.clock import Clock
from kvtest.waiting import eventually

from kvferry.shared.control.messages import (
    TokenGenerated,
    TransferAccepted,
    calling_router,
)
from kvferry.shared.errors import LeaseExpired
from kvferry.shared.wire.messages import TransferKey
from kvferry.tools.oracle import OneProcessGenerator


def key_of(ticket):
    return TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation)


async def test_closing_a_stream_whose_transfer_has_not_begun_frees_it_and_refuses_the_transfer(
    harness, request_of, ticket_of
):
    made = await harness()
    stream, ticket = await ticket_of(made.service, request_of())
    await stream.aclose()
    assert await made.arena_is_free()
    with pytest.raises(LeaseExpired):
        await asyncio.to_thread(made.shipper.ship, request_of(), ticket)


async def test_closing_a_stream_in_transfer_frees_it_and_drops_late_blocks(begin, request_of, ticket_of):
    request = request_of()
    made, stream, transfer, cache = await begin(request)
    made.shipper.send(transfer, cache, last=1)
    await eventually(lambda: made.service.arena.bytes_by_state()["in_transfer"])
    await stream.aclose()
    assert await made.arena_is_free()
    other, _ = await ticket_of(made.service, request)  # the same bytes have a new owner now
    before = made.service.arena.buffer(made.service._reservations.all()[0].allocation).clone()
    with contextlib.suppress(LeaseExpired):  # at once, where a block of layer 0 came late and was refused
        made.shipper.send(transfer, cache, first=1)
    with pytest.raises(LeaseExpired):
        await asyncio.to_thread(transfer.wait, 10)
    after = made.service.arena.buffer(made.service._reservations.all()[0].allocation)
    assert torch.equal(before, after)
    assert made.value("late_blocks_total") >= 1
    await other.aclose()
    assert await made.arena_is_free()


class HeldSteps:
    """Steps of a model that wait until `proceed` is set, counted as they end."""

    def __init__(self, model):
        self.begun, self.proceed, self.count = threading.Event(), threading.Event(), 0
        model.before_step = self._hold

    def _hold(self, token_ids):
        self.begun.set()
        self.proceed.wait(20)
        self.count += 1


@pytest.mark.parametrize("stage", ["waiting", "running"])
async def test_closing_a_stream_that_waits_or_runs_frees_it_and_spares_the_others(
    harness, request_of, small_model, stage
):
    made = await harness(max_batch_size=1 if stage == "waiting" else 2)
    survivor = request_of(range(5, 45), request_id="s", max_tokens=60)
    steps = HeldSteps(made.model)
    surviving = asyncio.create_task(made.tokens(survivor))
    await asyncio.to_thread(steps.begun.wait, 20)
    stream = made.service.generate(request_of([8] * 30, request_id="c", max_tokens=400), timeout_s=30)
    ticket = (await anext(stream)).ticket
    await asyncio.to_thread(made.shipper.ship, request_of([8] * 30, max_tokens=400), ticket)
    assert isinstance(await anext(stream), TransferAccepted)
    if stage == "running":
        steps.proceed.set()
        assert isinstance(await anext(stream), TokenGenerated)
        steps.proceed.clear()
    await stream.aclose()
    steps.count = 0
    steps.proceed.set()
    expected = OneProcessGenerator(small_model()).generate(
        list(survivor.prompt_token_ids), plan=survivor.plan, sampling=survivor.sampling
    )
    assert await surviving == [t.token_id for t in expected]
    assert await made.arena_is_free()
    assert steps.count < 100, "the one that nobody reads went on to its end"


async def test_cancelling_the_task_that_reads_frees_the_memory(harness, request_of):
    made = await harness()
    steps = HeldSteps(made.model)
    task = asyncio.create_task(made.run(request_of(max_tokens=500)))
    await asyncio.to_thread(steps.begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps.proceed.set()
    assert await made.arena_is_free()
    assert steps.count < 100, "it went on to its end"


async def test_a_reservation_that_nothing_ships_to_expires_by_name(harness, request_of, ticket_of):
    made = await harness(lease_s=0.1)
    stream, ticket = await ticket_of(made.service, request_of())
    assert ticket.lease_s == 0.1
    with pytest.raises(LeaseExpired, match="still reserved when its lease ended"):
        await anext(stream)
    assert await made.arena_is_free()
    assert made.value("leases_expired_total") == 1
    with pytest.raises(LeaseExpired):
        await asyncio.to_thread(made.shipper.ship, request_of(), ticket)


async def test_a_lease_that_is_renewed_goes_on_and_ends_once_nobody_renews_it(harness, request_of, ticket_of):
    clock = Clock()
    made = await harness(lease_s=2.0, clock=clock, sweep_interval_s=600.0)
    request = request_of()
    stream, ticket = await ticket_of(made.service, request)
    reservations = made.service._reservations
    for _ in range(4):
        clock.turn(1.5)
        reservations.expire()  # as the sweeper does
        await made.service.status(timeout_s=1)
    calling_router.set("another")
    await made.service.status(timeout_s=1)
    clock.turn(1.9)
    reservations.expire()
    assert made.value("leases_expired_total") == 0
    clock.turn(0.1)
    reservations.expire()
    with pytest.raises(LeaseExpired, match="still reserved when its lease ended"):
        await anext(stream)
    assert await made.arena_is_free()
    with pytest.raises(LeaseExpired):
        await asyncio.to_thread(made.shipper.ship, request, ticket)


async def test_a_transfer_that_stalls_expires_although_the_event_loop_is_blocked(begin, request_of):
    clock = Clock()
    made, stream, transfer, cache = await begin(request_of(), lease_s=2.0, clock=clock)
    made.shipper.send(transfer, cache, last=1)
    await eventually(lambda: made.service.arena.bytes_by_state()["in_transfer"])
    clock.turn(2.0)
    deadline_s = time.monotonic() + 60
    while made.service.arena.free_bytes != made.service.arena.size_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)  # nothing runs on the loop; the sweeper has a thread of its own
    with pytest.raises(LeaseExpired, match="in_transfer"):
        await anext(stream)
    transfer.abort("test is over")


async def test_a_running_sequence_outlives_its_lease(harness, request_of):
    clock, sweeps = Clock(), threading.Semaphore(0)
    made = await harness(lease_s=2.0, clock=clock)
    expire = made.service._reservations.expire

    def counted():
        expire()
        sweeps.release()

    def outlive(token_ids):
        clock.turn(2.0)
        while sweeps.acquire(blocking=False):
            pass
        for _ in range(2):  # the second one began after the lease had ended
            assert sweeps.acquire(timeout=60)

    made.service._reservations.expire = counted
    made.model.before_step = outlive
    assert len(await made.tokens(request_of(max_tokens=4))) == 4
    assert made.value("leases_expired_total") == 0


@pytest.mark.parametrize("layers", [1, 2])
async def test_closing_a_stream_with_packed_layers_in_transfer_frees_it(begin, request_of, layers):
    request = request_of([i % 50 for i in range(100)], method="rdkv", tokens=40)
    made, stream, transfer, cache = await begin(request)
    made.shipper.send(transfer, cache, last=layers)
    await eventually(lambda: made.service.arena.bytes_by_state()["in_transfer"])
    await stream.aclose()
    assert await made.arena_is_free()
    transfer.abort("test is over")
