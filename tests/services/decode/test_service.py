"""The decode service over an in-process wire gives the oracle's tokens, whoever shares or fails the batch."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
import torch

from kvferry.kernels.dense_decode import dense_decode
from kvferry.shared.compression.attention import ATTENTIONS
from kvferry.shared.compression.attention.interface import RowsAlone
from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.oracle import OneProcessGenerator


def oracle_ids(model, request):
    tokens = OneProcessGenerator(model).generate(
        list(request.prompt_token_ids), plan=request.plan, sampling=request.sampling
    )
    return [t.token_id for t in tokens]


MIXED = [
    {"prompt": range(5, 45)},
    {"prompt": [7], "max_tokens": 12},
    {"prompt": [i * 7 % 50 for i in range(150)], "method": "rocketkv", "tokens": 16},
    {"prompt": [i * 3 % 50 for i in range(97)], "method": "rocketkv", "tokens": 24, "max_tokens": 3},
    {"prompt": [i * 11 % 50 for i in range(120)], "method": "snapkv", "tokens": 40},
    {"prompt": range(10, 40), "temperature": 1.0, "seed": 5, "max_tokens": 20},
    {"prompt": range(9, 49), "temperature": 0.8, "seed": 6, "frequency_penalty": 0.7, "top_p": 0.9},
    {"prompt": [i * 13 % 50 for i in range(200)], "method": "rocketkv", "tokens": 32, "temperature": 1.5},
    {"prompt": [i * 17 % 50 for i in range(113)], "method": "exact-topk", "tokens": 11},
    {
        "prompt": [i * 19 % 50 for i in range(127)],
        "method": "quest",
        "tokens": 16,
        "overrides": {"dense_layers": 1},
    },
    {"prompt": [i * 21 % 50 for i in range(131)], "method": "sparq", "tokens": 24, "max_tokens": 20},
    {"prompt": [i * 23 % 50 for i in range(89)], "method": "streamingllm", "tokens": 17},
    {"prompt": [i * 27 % 50 for i in range(97)], "method": "h2o", "tokens": 21},
    {"prompt": [i * 27 % 50 for i in range(97)], "method": "h2o", "tokens": 1, "max_tokens": 12},
    {"prompt": [i * 29 % 50 for i in range(101)], "method": "random", "tokens": 33},
    {"prompt": [i * 43 % 50 for i in range(113)], "method": "d2o", "tokens": 24, "max_tokens": 40},
    {"prompt": [i * 47 % 50 for i in range(31)], "method": "d2o", "tokens": 2, "max_tokens": 9},
    {"prompt": [i * 49 % 50 for i in range(103)], "method": "d2o", "tokens": 30, "skip_layers": (1,)},
    {"prompt": [i * 43 % 50 for i in range(181)], "method": "rocketkv-d2o", "tokens": 20},
    {"prompt": [i * 31 % 50 for i in range(149)], "method": "pyramidkv", "tokens": 60},
    {"prompt": [i * 33 % 50 for i in range(149)], "method": "pyramidkv", "tokens": 60, "attention": "sparq"},
    {"prompt": [i * 37 % 50 for i in range(160)], "method": "h2o", "tokens": 12, "attention": "quest"},
    {"prompt": [i * 39 % 50 for i in range(151)], "method": "rdkv", "tokens": 20, "max_tokens": 14},
    {"prompt": [i * 41 % 50 for i in range(133)], "method": "rdkv", "tokens": 70, "skip_layers": (0,)},
    {
        "prompt": [i * 43 % 50 for i in range(151)],
        "method": "rdkv",
        "tokens": 5,
        "max_tokens": 36,
        "overrides": {"rebudget_tokens": 32, "window": 5},
    },
    {
        "prompt": [i * 47 % 50 for i in range(120)],
        "method": "rdkv",
        "tokens": 30,
        "overrides": {"widths": "0,4,16"},
    },
    {"prompt": [(i * 49 + i % 7) % 50 for i in range(163)], "method": "rdkv-hsa", "tokens": 16},
    {"prompt": [i * 11 % 47 for i in range(140)], "method": "rdkv-hsa", "tokens": 9, "skip_layers": (1,)},
    {
        "prompt": [i * 43 % 50 for i in range(141)],
        "method": "adakv",
        "tokens": 20,
        "overrides": {"window": 8},
    },
    {"prompt": [i * 47 % 50 for i in range(99)], "method": "think", "overrides": {"channel_retention": 0.4}},
    {"prompt": [i * 43 % 50 for i in range(103)], "method": "snapkv-think", "tokens": 33, "max_tokens": 12},
    {"prompt": [i * 9 % 50 for i in range(131)], "method": "kivi", "overrides": {"bits": 2}},
    {"prompt": [i * 9 % 50 for i in range(117)], "method": "snapkv-kivi", "tokens": 35, "skip_layers": (1,)},
    {"prompt": [7, 8], "method": "kivi", "max_tokens": 12},
    {"prompt": [i * 12 % 50 for i in range(133)], "overrides": {"wire_bits": 8}},
    {
        "prompt": [i * 14 % 50 for i in range(171)],
        "method": "rocketkv",
        "tokens": 24,
        "overrides": {"wire_bits": 2},
        "skip_layers": (0,),
    },
    {"prompt": [3, 5], "method": "rdkv", "tokens": 1, "overrides": {"window": 1, "kernel_size": 1}},
]


@pytest.mark.parametrize("case", MIXED, ids=[str(i) for i in range(len(MIXED))])
async def test_tokens_equal_the_oracle_for_every_method(harness, request_of, small_model, case):
    request = request_of(**case)
    made = await harness()
    assert await made.tokens(request) == oracle_ids(small_model(), request)
    assert await made.arena_is_free()


@pytest.mark.parametrize("max_batch_size", [3, 32])
async def test_a_mixed_batch_gives_each_request_what_it_gets_alone(
    harness, request_of, small_model, max_batch_size
):
    requests = [request_of(request_id=str(i), **case) for i, case in enumerate(MIXED)]
    made = await harness(max_batch_size=max_batch_size)
    sizes = []
    together = threading.Barrier(2, timeout=20)

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
class EveryStride(RowsAlone):
    """A decode attention that the package does not have: every n-th row and the newest."""

    name = "every_stride"
    stride: int

    @classmethod
    def sized(cls, *, cap, budget, head_dim):
        return cls(stride=max(cap // budget, 1))

    def attend(self, queries, keys, values, auxiliary, *, length, scaling):
        rows = [*range(0, length - 1, self.stride), length - 1]
        return dense_decode(queries, keys[:, rows], values[:, rows], scaling=scaling)


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
