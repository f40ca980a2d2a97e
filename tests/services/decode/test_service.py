"""The decode service over an in-process wire gives the oracle's tokens, whoever shares the batch."""

import asyncio
import dataclasses
import itertools
import threading

import pytest
import torch

from kvferry.kernels.dense_decode import dense_decode
from kvferry.shared.compression.attention import ATTENTIONS
from kvferry.shared.compression.attention.rows import RowsAlone
from kvferry.shared.control.messages import (
    GenerationFinished,
    HistoryReturned,
    TokenGenerated,
    TransferAccepted,
)
from kvferry.shared.errors import (
    CapacityExceeded,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    ProtocolMismatch,
    TransferFailed,
    WorkerUnavailable,
)
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


async def test_a_stream_tells_transfer_tokens_and_end_in_order(harness, request_of):
    made = await harness()
    first, events = await made.run(request_of(max_tokens=4, logprobs=2))
    assert first.index == 0
    assert [type(e) for e in events] == [TransferAccepted, *[TokenGenerated] * 3, GenerationFinished]
    assert events[0].transfer_s >= 0
    assert [e.token.index for e in events[1:4]] == [1, 2, 3]
    assert all(len(e.token.top_logprobs) == 2 and e.token.logprob is not None for e in events[1:4])
    row_bytes = 2 * 2 * 2 * 8 * 4
    assert events[-1] == GenerationFinished(finish_reason="length", num_tokens=4, cache_bytes=43 * row_bytes)


async def test_an_end_of_sequence_token_is_delivered_counted_and_ends_the_completion(harness, request_of):
    made = await harness()
    free = await made.tokens(request_of(temperature=1.0, seed=1, max_tokens=60, logit_bias={3: 4.0}))
    assert 3 in free[1:]
    end = free.index(3, 1)
    _, events = await made.run(
        request_of(temperature=1.0, seed=1, max_tokens=60, logit_bias={3: 4.0}, ignore_eos=False)
    )
    assert events[-2].token.token_id == 3
    assert events[-1].finish_reason == "stop"
    assert events[-1].num_tokens == end + 1


async def test_a_stop_token_id_ends_the_completion_even_where_eos_is_ignored(harness, request_of):
    made = await harness()
    free = await made.tokens(request_of(temperature=1.0, seed=2, max_tokens=20))
    stop = next(t for t in free[2:] if t not in free[:2])
    stopped = await made.tokens(request_of(temperature=1.0, seed=2, max_tokens=20, stop_token_ids=(stop,)))
    assert stopped == free[: free.index(stop) + 1]


async def test_a_stop_string_ends_the_completion_with_the_token_that_completes_it(harness, request_of):
    made = await harness()
    tokenizer = made.service._tokenizer
    free = await made.tokens(request_of(temperature=1.0, seed=4, max_tokens=20))
    visible = [i for i in range(2, 20) if tokenizer.decode([free[i]]).strip()]
    stop = tokenizer.decode([free[visible[0]]]).strip()
    first, events = await made.run(request_of(temperature=1.0, seed=4, max_tokens=20, stop=(stop,)))
    ids = [first.token_id, *(e.token.token_id for e in events if isinstance(e, TokenGenerated))]
    assert ids == free[: len(ids)]
    assert len(ids) <= visible[0] + 1
    assert stop in tokenizer.decode(ids)
    assert stop not in tokenizer.decode(ids[:-1])
    assert events[-1].finish_reason == "stop"


@pytest.mark.parametrize("end", ["max_tokens", "stop_token_ids", "eos", "stop"])
async def test_a_first_token_that_ends_the_completion_needs_no_step(harness, request_of, end):
    made = await harness()
    first_id = (await made.tokens(request_of(max_tokens=1)))[0]
    steps = []
    made.model.before_step = steps.append
    params = {
        "max_tokens": {"max_tokens": 1},
        "stop_token_ids": {"stop_token_ids": (first_id,)},
        "eos": {"ignore_eos": False, "logit_bias": {3: 100.0}},
        "stop": {"stop": (made.service._tokenizer.decode([20]),), "logit_bias": {20: 100.0}},
    }[end]
    _, events = await made.run(request_of(**params))
    reason = "length" if end == "max_tokens" else "stop"
    assert [type(e) for e in events] == [TransferAccepted, GenerationFinished]
    assert (events[-1].finish_reason, events[-1].num_tokens) == (reason, 1)
    assert not steps
    assert await made.arena_is_free()


async def test_a_replay_continues_the_tokens_and_penalties_of_the_first_attempt(harness, request_of):
    made = await harness()
    params = {"temperature": 1.0, "seed": 9, "frequency_penalty": 1.0, "method": "full"}
    whole = await made.tokens(request_of(range(5, 45), max_tokens=10, **params))
    replay = request_of([*range(5, 45), *whole[:4]], max_tokens=6, first_index=4, **params)
    first, events = await made.run(replay)
    assert [first.token_id, *(e.token.token_id for e in events if hasattr(e, "token"))] == whole[4:]
    assert (first.index, events[1].token.index, events[-1].num_tokens) == (4, 5, 6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt": range(5, 45), "max_tokens": 561}, ContextLengthExceeded, "40 tokens.*561.*600"),
        ({"prompt": []}, InvalidRequest, "first_index|prompt"),
        ({"prompt": [50]}, InvalidRequest, "token ids are 0 to 49"),
        ({"prompt": [1] * 500, "max_tokens": 90}, InvalidRequest, "needs 150784 bytes.*arena has 100032"),
    ],
    ids=["context", "empty", "vocabulary", "arena"],
)
async def test_requests_that_can_never_be_served_are_refused(harness, request_of, change, error, message):
    made = await harness(arena_bytes=100_032)
    with pytest.raises(error, match=message):
        await made.run(request_of(**change))
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
    stream, ticket = await ticket_of(made.service, request_of(), timeout_s=0.1)
    assert ticket.lease_s == pytest.approx(0.1)
    with pytest.raises((DeadlineExceeded, TransferFailed)):
        await anext(stream)
    assert await made.arena_is_free()


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
    made = await harness(heartbeat_timeout_s=0.6)
    stuck, release = threading.Event(), threading.Event()

    def block(token_ids):
        stuck.set()
        release.wait(20)

    assert (await made.service.status(timeout_s=1)).ready
    await asyncio.sleep(1.0)
    assert (await made.service.status(timeout_s=1)).ready  # idle is not stuck
    made.model.before_step = block
    task = asyncio.create_task(made.tokens(request_of()))
    await asyncio.to_thread(stuck.wait, 20)
    await asyncio.sleep(0.7)
    assert not (await made.service.status(timeout_s=1)).ready
    release.set()
    assert len(await task) == 8


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


async def test_a_stream_ends_after_its_last_event(harness, request_of):
    made = await harness()
    _, events = await made.run(request_of(store_history=True))
    assert isinstance(events[-1], HistoryReturned)
    assert events[-1].num_tokens == 0  # the manifest named no endpoint


async def test_a_completion_ends_with_the_tokens_that_it_has_where_it_is_cut_off(harness, request_of):
    made = await harness()
    whole = await made.tokens(request_of(max_tokens=500))
    reached, go_on, steps = threading.Event(), threading.Event(), itertools.count(1)

    def before_step(token_ids):
        if next(steps) == 3:
            reached.set()
            assert go_on.wait(60)

    made.model.before_step = before_step
    running = asyncio.create_task(made.run(request_of(max_tokens=500, store_history=True)))
    assert await asyncio.to_thread(reached.wait, 60)
    await made.service.finish("r", timeout_s=1)
    await made.service.finish("nobody", timeout_s=1)
    go_on.set()
    first, (*generated, finished, returned) = await running
    tokens = [first.token_id, *(event.token.token_id for event in generated if hasattr(event, "token"))]
    # the step under way is taken up, and one more where steps run ahead
    assert len(tokens) in {4, 5}
    assert tokens == whole[: len(tokens)]
    assert (finished.finish_reason, finished.num_tokens) == ("length", len(tokens))
    assert isinstance(returned, HistoryReturned)
    assert await made.arena_is_free(within_s=60)
