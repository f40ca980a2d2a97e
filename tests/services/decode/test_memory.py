"""Memory is taken as answers grow: sequences move, the youngest wait on the host, and no answer changes."""

from __future__ import annotations

import asyncio
import threading

import pytest
from kvtest.decode import MIXED, oracle_ids, serialise_prefill

from kvferry.services.decode import memory
from kvferry.shared.control.messages import GenerationFinished, HistoryReturned


@pytest.fixture
def tokens_by_which_memory_grows(monkeypatch):
    monkeypatch.setattr(memory, "GROWTH_TOKENS", 3)
    return 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("store_history", [False, True], ids=["", "returned"])
@pytest.mark.parametrize("arena_bytes", [1 << 21, 100_000], ids=["growth", "growth and preemption"])
async def test_answers_of_every_method_that_outgrow_their_memory_are_the_oracle_s(
    harness, request_of, small_model, tokens_by_which_memory_grows, arena_bytes, store_history
):
    requests = [
        request_of(request_id=str(i), store_history=store_history, **case | {"max_tokens": 30 + i % 5})
        for i, case in enumerate(MIXED)
    ]
    made = await harness(arena_bytes=arena_bytes, admission_wait_s=60, max_batch_size=12)
    serialise_prefill(made)
    answers = await asyncio.gather(*(made.tokens(request) for request in requests))
    assert answers == [oracle_ids(small_model(), request) for request in requests]
    assert (made.value("decode_preempted_total") > 0) == (arena_bytes == 100_000)
    assert made.value("admission_rejected_total") == 0
    assert await made.arena_is_free()


async def test_a_sequence_reserves_what_is_expected_and_not_its_longest_answer(
    harness, request_of, ticket_of
):
    made = await harness()
    reserved = []
    for max_tokens in (64, 500):
        stream, ticket = await ticket_of(made.service, request_of(max_tokens=max_tokens))
        reserved.append(ticket.reserved_bytes)
        await stream.aclose()
    assert reserved[0] == reserved[1]
    await made.tokens(request_of(max_tokens=200))
    _, ticket = await ticket_of(made.service, request_of(max_tokens=500))
    row_bytes = 2 * 2 * 2 * 8 * 4
    assert ticket.reserved_bytes == (40 + 199) * row_bytes


async def test_the_oldest_goes_on_while_the_youngest_waits_on_the_host(
    harness, request_of, small_model, tokens_by_which_memory_grows
):
    old, young = (request_of([7] * 40, request_id=name, max_tokens=400) for name in "ab")
    made = await harness(arena_bytes=170_000, admission_wait_s=60)
    serialise_prefill(made)
    ended = []

    async def run(request):
        first, events = await made.run(request)
        ended.append(request.request_id)
        return [first.token_id, *(e.token.token_id for e in events if hasattr(e, "token"))]

    first = asyncio.create_task(run(old))
    while made.service._engine.num_running == 0:
        await asyncio.sleep(0.01)
    answers = await asyncio.gather(first, run(young))
    assert answers == [oracle_ids(small_model(), old), oracle_ids(small_model(), young)]
    assert ended == ["a", "b"]
    assert made.value("decode_preempted_total") > 0


@pytest.mark.parametrize("end", ["cancelled", "cut off"])
async def test_a_sequence_on_the_host_can_be_ended(
    harness, request_of, small_model, tokens_by_which_memory_grows, end
):
    old, young = (request_of([7] * 40, request_id=name, max_tokens=400, store_history=True) for name in "ab")
    made = await harness(arena_bytes=170_000, admission_wait_s=60)
    serialise_prefill(made)
    first = asyncio.create_task(made.run(old))
    while made.service._engine.num_running == 0:
        await asyncio.sleep(0.01)
    second = asyncio.create_task(made.run(young))
    waits = threading.Event()

    def before_step(token_ids):
        if made.value("decode_preempted_total"):
            waits.wait(20)

    made.model.before_step = before_step
    while not made.value("decode_preempted_total"):
        await asyncio.sleep(0.01)
    if end == "cancelled":
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        waits.set()
    else:
        await made.service.finish("b", timeout_s=1)
        waits.set()
        _, events = await second
        assert isinstance(events[-1], HistoryReturned)
        finished = next(event for event in events if isinstance(event, GenerationFinished))
        assert finished.finish_reason == "length"
        assert finished.num_tokens < 400
    token, events = await first
    assert [token.token_id, *(e.token.token_id for e in events if hasattr(e, "token"))] == oracle_ids(
        small_model(), old
    )
    assert await made.arena_is_free()


async def test_sequences_are_moved_together_when_no_free_range_is_large_enough(
    harness, request_of, small_model
):
    made = await harness(arena_bytes=(133 + 101 + 133) * 256, admission_wait_s=60)
    serialise_prefill(made)
    requests = [
        request_of([7] * num_tokens, request_id=name, max_tokens=max_tokens)
        for name, num_tokens, max_tokens in (("a", 130, 4), ("b", 42, 60), ("c", 130, 4), ("d", 190, 4))
    ]
    release = threading.Event()
    made.model.before_step = lambda token_ids: release.wait(20)
    tasks = []
    for request in requests[:3]:
        tasks.append(asyncio.create_task(made.tokens(request)))
        while len(made.service._reservations.all()) < len(tasks):
            await asyncio.sleep(0.01)
    while any(reservation.committed_s is None for reservation in made.service._reservations.all()):
        await asyncio.sleep(0.01)
    middle = made.service._reservations.all()[1]
    assert (middle.request.request_id, middle.allocation.offset) == ("b", 133 * 256)
    tasks.append(asyncio.create_task(made.tokens(requests[3])))
    while made.service._scheduler.num_waiting == 0:
        await asyncio.sleep(0.01)
    release.set()
    answers = await asyncio.gather(*tasks)
    assert answers == [oracle_ids(small_model(), request) for request in requests]
    assert middle.allocation.offset == 0
    assert await made.arena_is_free()
