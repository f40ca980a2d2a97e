"""Requests that are refused, that wait for room, and that run out of time."""

from __future__ import annotations

import asyncio

import pytest
from kvtest.clock import turn_loop_clock

from kvferry.shared.errors import (
    CapacityExceeded,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolMismatch,
    WorkerUnavailable,
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt": range(5, 45), "max_tokens": 561}, ContextLengthExceeded, "40 tokens.*561.*600"),
        ({"prompt": []}, InvalidRequest, "first_index|prompt"),
        ({"prompt": [50]}, InvalidRequest, "token ids are 0 to 49"),
        ({"prompt": [1] * 500, "max_tokens": 90}, InvalidRequest, "needs .* bytes.*arena has 100032"),
    ],
    ids=["context", "empty", "vocabulary", "arena"],
)
async def test_requests_that_can_never_be_served_are_refused(harness, request_of, change, error, message):
    made = await harness(arena_bytes=100_032)
    with pytest.raises(error, match=message):
        await made.run(request_of(**change))
    assert await made.arena_is_free()


async def test_an_answer_is_no_longer_than_the_whole_arena_has_room_for(harness, request_of):
    """As with the context: a limit is a ceiling."""
    made = await harness(arena_bytes=100_032)
    lengths = [len(await made.tokens(request_of([1] * 300, max_tokens=number))) for number in (10, 250, 299)]
    assert lengths[0] == 10
    assert 10 < lengths[1] == lengths[2] < 250
    assert await made.arena_is_free()


async def test_a_request_for_another_model_is_refused(harness, request_of):
    made = await harness()
    request = request_of(model_fingerprint="beef")
    with pytest.raises(ProtocolMismatch, match=r"'beef'.*'f00d'"):
        await made.run(request)


async def test_a_full_arena_refuses_with_a_reason_and_a_time_to_retry(harness, request_of, ticket_of):
    made = await harness(arena_bytes=64 * 1024, admission_wait_s=0.05)
    stream, ticket = await ticket_of(made.service, request_of([1] * 200))
    assert made.service.arena.bytes_by_state()["reserved"] == ticket.reserved_bytes
    with pytest.raises(CapacityExceeded) as caught:
        await made.run(request_of([1] * 200))
    assert (caught.value.reason, caught.value.retry_after_s) == ("arena_full", 1.0)
    assert made.value("admission_rejected_total", reason="arena_full") == 1
    await stream.aclose()
    assert await made.arena_is_free()


async def test_a_waiting_request_is_served_when_another_ends(harness, request_of, ticket_of):
    made = await harness(arena_bytes=64 * 1024, admission_wait_s=20)
    stream, _ = await ticket_of(made.service, request_of([1] * 200))
    waiting = asyncio.create_task(made.tokens(request_of([1] * 200, request_id="b")))
    while (await made.service.status(timeout_s=1)).waiting < 2:
        await asyncio.sleep(0.01)
    await stream.aclose()
    assert len(await waiting) == 8


async def test_the_deadline_ends_the_stream_and_frees_the_memory(harness, request_of, ticket_of):
    made = await harness()
    stream, ticket = await ticket_of(made.service, request_of(), timeout_s=60)
    assert ticket.lease_s == pytest.approx(60)
    turn_loop_clock(60)
    with pytest.raises(DeadlineExceeded):
        await anext(stream)
    assert await made.arena_is_free()


async def test_a_drain_refuses_what_waits_and_comes_and_ends_what_runs_by_name(
    harness, request_of, ticket_of
):
    made = await harness(arena_bytes=64 * 1024, admission_wait_s=20)
    running, _ = await ticket_of(made.service, request_of([1] * 200))
    waiting = asyncio.create_task(made.run(request_of([1] * 200, request_id="b")))
    while (await made.service.status(timeout_s=1)).waiting < 2:
        await asyncio.sleep(0.01)
    draining = asyncio.create_task(made.service.drain(0.05))
    with pytest.raises(WorkerUnavailable, match="is to end") as refused:
        await waiting
    status = await made.service.status(timeout_s=1)
    assert (status.ready, status.draining, refused.value.reason) == (False, True, "draining")
    with pytest.raises(WorkerUnavailable, match="is to end"):
        await made.run(request_of(request_id="c"))
    with pytest.raises(WorkerUnavailable, match="is to end"):
        await anext(running)
    await draining
    assert await made.arena_is_free()
