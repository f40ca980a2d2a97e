"""A decode worker of several ranks, real gloo processes: each has the KV of its own heads, and answers are
those of one rank."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest
import torch
from kvtest.decode import MIXED, PromptCache, make_request
from kvtest.lanes import is_whole, some
from kvtest.parallel import same_or_tied, started

from kvferry.services.decode import memory
from kvferry.services.decode.config import DecodeConfig
from kvferry.shared.compression.rdkv.epsilon import EpsilonTable, install_tables
from kvferry.shared.control.messages import (
    GenerationFinished,
    SharedStart,
    TicketIssued,
    TokenGenerated,
)
from kvferry.shared.errors import InvalidRequest
from kvferry.tools.evaluation.epsilon import save_table

SEGMENTS = {
    "prompt": [i * 31 % 50 for i in range(133)],
    "method": "snapkv",
    "tokens": 20,
    "max_tokens": 70,
    "overrides": {"rebudget_tokens": 16},
}
GREEDY = [
    case | {"temperature": 0.0}
    for case in [*MIXED, SEGMENTS]
    if "frequency_penalty" not in case and case.get("method") != "adakv"
]
ARENA_BYTES = 1 << 24


def request_for(model, number, **kwargs):
    return make_request(
        request_id=str(number), model_fingerprint=model.spec.fingerprint, logprobs=2, **kwargs
    )


async def answer(made, request):
    """The sampled tokens, and what the end says."""
    first, events = await made.run(request)
    finished = next(event for event in events if isinstance(event, GenerationFinished))
    return [first, *(event.token for event in events if isinstance(event, TokenGenerated))], finished


@pytest.mark.parametrize(
    "arena_bytes", some([ARENA_BYTES, 1_000_000], 1_000_000), ids=["growth", "growth and preemption"]
)
async def test_answers_of_every_method_that_outgrow_their_memory_are_those_of_one_rank(
    one, several, monkeypatch, arena_bytes, pytestconfig
):
    monkeypatch.setattr(memory, "GROWTH_TOKENS", 3)
    cases = GREEDY if is_whole(pytestconfig) else GREEDY[::2]
    requests = [
        request_for(one, i, **case | {"max_tokens": 30 + i % 5, "store_history": i % 2 == 0})
        for i, case in enumerate(cases)
    ]
    async with started(one, one) as made:
        expected = [await answer(made, request) for request in requests]
    options = {"arena_bytes": arena_bytes, "admission_wait_s": 120, "max_batch_size": 12}
    async with started(several, one, **options) as made:
        answers = await asyncio.gather(*(answer(made, request) for request in requests))
        assert (made.value("decode_preempted_total") > 0) == (arena_bytes == 1_000_000)
    num_same = 0
    for case, (tokens, finished), (of_one, expected_finish) in zip(cases, answers, expected, strict=True):
        num_same += same_or_tied([token.token_id for token in tokens], of_one)
        # what a segment of generated tokens takes packed depends on its heads
        packs_segments = case.get("method") == "rdkv" and "rebudget_tokens" in case.get("overrides", {})
        tolerance = 0.1 if packs_segments else 0
        assert finished.cache_bytes == pytest.approx(expected_finish.cache_bytes, rel=tolerance, abs=0), case
    assert num_same > 0.8 * sum(len(of_one) for of_one, _ in expected), "more ties than chance explains"


async def test_siblings_have_the_prompt_of_every_rank(one, several):
    first = dataclasses.replace(
        request_for(one, 0, prompt=range(5, 45), temperature=1.0, max_tokens=20), num_siblings=2
    )

    def alone(number):
        sampling = dataclasses.replace(first.sampling, seed=number)
        return dataclasses.replace(first, request_id=f"{number}", sampling=sampling, num_siblings=0)

    async with started(one, one) as made:
        expected = [await answer(made, alone(number)) for number in (1, 2)]

    async with started(several, one) as made:

        async def shared(number):
            token = PromptCache(one, alone(number)).first_token
            start = SharedStart(request_id=first.request_id, first_token=token)
            request = dataclasses.replace(alone(number), shares=start)
            events = [event async for event in made.service.generate(request, timeout_s=60)]
            assert isinstance(events[0], TicketIssued)
            return [token, *(each.token for each in events if isinstance(each, TokenGenerated))], events[-1]

        stream = made.service.generate(first, timeout_s=60)
        async with contextlib.aclosing(stream):
            ticket = (await anext(stream)).ticket
            await asyncio.to_thread(made.shipper.ship, first, ticket)
            await anext(stream)
            answers = [await shared(number) for number in (1, 2)]
    for (tokens, finished), (of_one, expected_finish) in zip(answers, expected, strict=True):
        # drawn by the same numbers from nearly the same distributions
        assert [sampled.token_id for sampled in tokens] == [sampled.token_id for sampled in of_one]
        torch.testing.assert_close(
            [sampled.logprob for sampled in tokens],
            [sampled.logprob for sampled in of_one],
            rtol=1e-3,
            atol=1e-3,
        )
        assert finished.cache_bytes == expected_finish.cache_bytes


async def test_ranks_divide_the_memory_and_what_is_told_of_it_is_the_whole(one, several, ticket_of):
    request = request_for(one, 0, prompt=range(5, 45), max_tokens=64)
    async with started(one, one) as made:
        stream, expected = await ticket_of(made.service, request)
        await stream.aclose()
    async with started(several, one) as made:
        stream, ticket = await ticket_of(made.service, request)
        assert made.service.arena.size_bytes == ARENA_BYTES // 2
        assert made.service.arena.bytes_by_state()["reserved"] == expected.reserved_bytes // 2
        assert ticket.reserved_bytes == expected.reserved_bytes
        assert made.value("arena_bytes") == ARENA_BYTES
        assert made.value("arena_bytes", state="reserved") == expected.reserved_bytes
        status = await made.service.status(timeout_s=1)
        assert status.total_bytes == ARENA_BYTES
        assert status.free_bytes == ARENA_BYTES - expected.reserved_bytes
        await stream.aclose()


async def test_a_method_whose_heads_cannot_be_divided_is_refused_by_name(one, several):
    adakv = request_for(one, 0, method="adakv", tokens=20)
    async with started(several, one) as made:
        with pytest.raises(InvalidRequest, match="format 'ragged' of method 'adakv' cannot be divided among"):
            await answer(made, adakv)
        status = await made.service.status(timeout_s=1)
        assert "adakv" not in status.methods
        assert {"full", "rocketkv", "rdkv", "compactor"} <= set(status.methods)
    async with started(one, one) as made:
        assert "adakv" in (await made.service.status(timeout_s=1)).methods


async def test_other_ranks_have_the_workers_own_tables(one, several, tmp_path):
    save_table(tmp_path / "mine.json", EpsilonTable(keys=(0.1, 0.01, 1e-5), values=(0.1, 0.02, 2e-5)))
    overrides = {"epsilon_table": "mine", "rebudget_tokens": 20, "window": 7}
    request = request_for(
        one, 0, prompt=range(5, 95), method="rdkv", tokens=20, max_tokens=45, overrides=overrides
    )
    install_tables(str(tmp_path))
    try:
        several.prepare(
            "decode", kernels="auto", self_test=True, epsilon_tables=str(tmp_path), calibration=""
        )
        async with started(one, one) as made:
            expected, _ = await answer(made, request)
        async with started(several, one) as made:
            tokens, _ = await answer(made, request)
    finally:
        install_tables("")
    assert same_or_tied([token.token_id for token in tokens], expected) > 20


async def test_a_cancelled_request_leaves_nothing_and_others_go_on(one, several):
    requests = [request_for(one, i, prompt=range(5, 45), max_tokens=60) for i in range(2)]
    async with started(one, one) as made:
        expected, _ = await answer(made, requests[0])
    async with started(several, one) as made:
        stream = made.service.generate(requests[1], timeout_s=60)
        ticket = (await anext(stream)).ticket
        await asyncio.to_thread(made.shipper.ship, requests[1], ticket)
        await anext(stream)
        other = asyncio.create_task(answer(made, requests[0]))
        for _ in range(5):
            await anext(stream)
        await stream.aclose()
        tokens, _ = await other
    assert same_or_tied([token.token_id for token in tokens], expected) > 0


def test_the_shadow_check_is_refused_with_ranks():
    with pytest.raises(ValueError, match="tensor_parallel is 2 with shadow_check; it must be 1"):
        DecodeConfig(shadow_check=8, tensor_parallel=2)
