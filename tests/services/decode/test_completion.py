"""A completion's events in order, what ends it, and what continues it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading

import pytest

from kvferry.services.decode import engine, sequence
from kvferry.services.decode.events import deliver as deliver_events
from kvferry.shared.control.messages import (
    GenerationFinished,
    HistoryReturned,
    TokenGenerated,
    TransferAccepted,
)
from kvferry.shared.errors import KvferryError


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


@pytest.mark.parametrize(("seconds_a_reading", "deliveries"), [(0.0, [19]), (1.0, [1] * 19)])
async def test_tokens_of_steps_that_are_shorter_than_their_way_are_delivered_together(
    harness, request_of, monkeypatch, seconds_a_reading, deliveries
):
    made = await harness()
    expected = await made.tokens(request_of(max_tokens=20))
    sizes = []

    def deliver(events):
        if events:
            sizes.append(len(events))
        deliver_events(events)

    monkeypatch.setattr(engine, "deliver", deliver)
    readings = itertools.count()
    made.service._engine._clock = lambda: next(readings) * seconds_a_reading
    assert await made.tokens(request_of(max_tokens=20)) == expected
    assert sizes == deliveries


async def test_a_first_token_that_fails_ends_its_own_request_alone(harness, request_of, monkeypatch):
    made = await harness()
    expected = await made.tokens(request_of(max_tokens=6))
    take = sequence.Sequence.take

    def fail_one(instance, token):
        if instance.request.request_id == "fails":
            raise RuntimeError("a planted fault")
        return take(instance, token)

    monkeypatch.setattr(sequence.Sequence, "take", fail_one)
    with pytest.raises(KvferryError, match="decoding the sequence failed: a planted fault"):
        await made.tokens(request_of(request_id="fails", max_tokens=6))
    assert await made.tokens(request_of(max_tokens=6)) == expected
    assert await made.arena_is_free()


async def test_tokens_that_wait_to_be_delivered_come_before_the_error_that_follows_them(
    harness, request_of, monkeypatch
):
    made = await harness()
    expected = await made.tokens(request_of(max_tokens=20))
    made.service._engine._clock = lambda: 0.0
    steps = itertools.count()

    def fail_the_tenth(*_):
        if next(steps) == 9:
            raise RuntimeError("a planted fault")

    made.model.before_step = fail_the_tenth
    tokens = []
    stream = made.service.generate(request := request_of(max_tokens=20), timeout_s=200)
    async with contextlib.aclosing(stream):
        ticket = (await anext(stream)).ticket
        await asyncio.to_thread(made.shipper.ship, request, ticket)

        async def read():
            async for event in stream:
                if isinstance(event, TokenGenerated):
                    tokens.append(event.token.token_id)

        with pytest.raises(KvferryError, match="the decode step failed: a planted fault"):
            await read()
    assert tokens == expected[1:10]
