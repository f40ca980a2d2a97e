"""The decode service over an in-process wire gives the oracle's tokens, whoever shares or fails the batch."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
import torch
from kvtest.decode import MIXED, oracle_ids

from kvferry.kernels.dense_decode import dense_decode
from kvferry.shared.compression.attention import ATTENTIONS, AttentionKind
from kvferry.shared.compression.plan import Part
from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.server import serve_control
from kvferry.shared.errors import OTHER_RELEASE, KvferryError, Overloaded, WorkerUnavailable
from kvferry.shared.process.version import VERSION


@pytest.mark.parametrize("case", MIXED, ids=[str(i) for i in range(len(MIXED))])
async def test_tokens_equal_the_oracle_for_every_method(harness, request_of, small_model, case):
    request = request_of(**case)
    made = await harness()
    assert await made.tokens(request) == oracle_ids(small_model(), request)
    assert await made.arena_is_free()


@pytest.mark.parametrize(
    ("add", "leave_out", "says"),
    [
        ({"token_weights": "attention"}, "", "does not know token_weights; it takes epsilon_table"),
        ({}, "window", "needs window; it takes"),
        ({"new": 1}, "window", "does not know new and needs window; it takes"),
    ],
)
async def test_a_plan_of_another_release_is_refused_as_no_mistake_of_a_client(
    harness, request_of, add, leave_out, says
):
    request = request_of(method="rdkv", tokens=8)
    params = {**request.plan.representation.params, **add}
    params.pop(leave_out, None)
    plan = dataclasses.replace(request.plan, representation=Part(name="rdkv", params=params))
    made = await harness()
    server = await serve_control(listen="127.0.0.1:0", decode=made.service)
    client = GrpcDecodeClient(server.address)
    try:
        with pytest.raises(Overloaded, match=f"^in kvferry {VERSION}, format 'rdkv' {says}") as caught:
            await anext(client.generate(dataclasses.replace(request, plan=plan), timeout_s=60))
    finally:
        await client.close()
        await server.close(0)
    assert (type(caught.value), caught.value.reason) == (Overloaded, OTHER_RELEASE)


@pytest.mark.parametrize("max_batch_size", [3, 32])
async def test_a_mixed_batch_gives_each_request_what_it_gets_alone(
    harness, request_of, small_model, max_batch_size
):
    requests = [request_of(request_id=str(i), **case) for i, case in enumerate(MIXED)]
    made = await harness(max_batch_size=max_batch_size)
    sizes = []
    together = threading.Barrier(2, timeout=250)

    def hold_first_step(token_ids):
        if not sizes:
            together.wait()
        sizes.append(len(token_ids))

    made.model.before_step = hold_first_step
    # prefill's model is not for two threads
    lock = threading.Lock()
    ship = made.shipper.ship

    def ship_one(*args, **kwargs):
        with lock:
            return ship(*args, **kwargs)

    made.shipper.ship = ship_one
    tasks = [asyncio.create_task(made.tokens(request)) for request in requests]
    engine = made.service._engine
    while len(engine._inbox) + len(engine._waiting) + len(engine._running) < len(requests):
        await asyncio.sleep(0.01)
    await asyncio.to_thread(together.wait)
    assert await asyncio.gather(*tasks) == [oracle_ids(small_model(), request) for request in requests]
    assert max(sizes) == min(max_batch_size, len(requests))
    assert await made.arena_is_free()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryStride(AttentionKind):
    """A decode attention that the package does not have: every n-th row and the newest."""

    name = "every_stride"
    stride: int

    @classmethod
    def sized(cls, *, cap, budget, head_dim, row_dim):
        return cls(stride=max(cap // budget, 1))

    def attend(self, queries, cache, *, length, scaling):
        rows = [*range(0, length - 1, self.stride), length - 1]
        return dense_decode(queries, cache.keys[:, rows], cache.values[:, rows], scaling=scaling)

    def read_bytes(self, shape, num_rows, packed_bytes=None):
        return shape.rows_bytes(-(-num_rows // self.stride))


async def test_a_new_decode_attention_is_one_class_and_one_entry(
    harness, request_of, small_model, monkeypatch
):
    monkeypatch.setitem(ATTENTIONS, "every_stride", EveryStride)
    prompt = [i * 7 % 50 for i in range(150)]
    request = request_of(prompt, method="h2o", tokens=20, attention="every_stride")
    made = await harness()
    tokens = await made.tokens(request)
    assert tokens == oracle_ids(small_model(), request)
    assert tokens != oracle_ids(small_model(), request_of(prompt, method="h2o", tokens=20))


async def test_invalid_logits_fail_their_own_sequence_alone(harness, request_of, small_model):
    made = await harness()
    long, short = (
        request_of(range(5, 45), request_id="a", max_tokens=30),
        request_of([9] * 20, request_id="b"),
    )

    def poison(positions, logits):
        return torch.where(positions[:, None] == 22, torch.nan, logits)  # b's third step; a starts at 40

    made.model.edit_logits = poison
    sizes, started, proceed = [], threading.Event(), threading.Event()

    def hold_first_step(token_ids):
        started.set()
        proceed.wait(20)
        sizes.append(len(token_ids))

    made.model.before_step = hold_first_step
    survivor = asyncio.create_task(made.tokens(long))
    await asyncio.to_thread(started.wait, 20)
    failing = asyncio.create_task(made.tokens(short))
    while made.service.arena.bytes_by_state()["in_transfer"] or len(made.service._reservations.all()) < 2:
        await asyncio.sleep(0.01)
    while any(s.committed_s is None for s in made.service._reservations.all()):
        await asyncio.sleep(0.01)
    proceed.set()
    with pytest.raises(KvferryError) as caught:
        await failing
    assert caught.value.reason == "invalid_logits"
    assert await survivor == oracle_ids(small_model(), long)
    assert max(sizes) == 2
    assert await made.arena_is_free()


async def test_a_step_that_fails_fails_the_batch_by_name_and_the_engine_serves_on(
    harness, request_of, small_model
):
    made = await harness()

    def fail(token_ids):
        raise RuntimeError("device lost")

    made.model.before_step = fail
    with pytest.raises(KvferryError, match="decode step failed: device lost") as caught:
        await made.tokens(request_of())
    assert caught.value.reason == "step_failed"
    assert await made.arena_is_free()
    made.model.before_step = lambda token_ids: None
    assert await made.tokens(request_of()) == oracle_ids(small_model(), request_of())


async def test_closing_the_service_fails_what_is_live_by_name(harness, request_of, ticket_of):
    made = await harness()
    reserved, _ = await ticket_of(made.service, request_of(request_id="reserved"))
    started = threading.Event()
    made.model.before_step = lambda token_ids: started.set()
    running = asyncio.create_task(made.run(request_of(request_id="running", max_tokens=500)))
    await asyncio.to_thread(started.wait, 20)
    await made.service.close()
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await running
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await anext(reserved)
    with pytest.raises(WorkerUnavailable, match="not running"):
        await made.run(request_of())
    assert made.service.arena.free_bytes == made.service.arena.size_bytes
