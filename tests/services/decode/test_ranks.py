"""A decode worker of several ranks, real gloo processes: each has the KV of its own heads, and answers are
those of one rank."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest
import torch
from kvtest.decode import MIXED, PromptCache, end_with, make_request, named
from kvtest.lanes import is_whole, some
from kvtest.parallel import same_or_tied, started

from kvferry.services.decode import memory
from kvferry.services.decode.config import DecodeConfig
from kvferry.shared.cache.arena import header_of, sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.ragged import Ragged
from kvferry.shared.compression.rdkv.compress import compress_layer_rdkv
from kvferry.shared.compression.rdkv.epsilon import EpsilonTable, install_tables
from kvferry.shared.control.messages import (
    GenerationFinished,
    SharedStart,
    TicketIssued,
    TokenGenerated,
)
from kvferry.shared.errors import InvalidRequest, ProtocolMismatch, TransferFailed
from kvferry.tools.evaluation.epsilon import save_table

UNEVEN = {"method": "adakv", "tokens": 20, "max_tokens": 70}
SEGMENTS = {"prompt": [i * 31 % 50 for i in range(133)], "overrides": {"rebudget_tokens": 16}} | UNEVEN
GREEDY = [case | {"temperature": 0.0} for case in [*MIXED, SEGMENTS] if "frequency_penalty" not in case]
ARENA_BYTES = 1 << 24


@pytest.fixture(params=some([False, True], True), ids=["through the first", "straight"])
def straight(request):
    """Whether each rank takes its heads' blocks itself, through a socket of its own."""
    return request.param


def request_for(model, number, **kwargs):
    return make_request(
        request_id=str(number), model_fingerprint=model.spec.fingerprint, logprobs=2, **kwargs
    )


async def answer(made, request):
    """The sampled tokens, and what the end says."""
    first, events = await made.run(request)
    finished = next(its for its in events if isinstance(its, GenerationFinished))
    return [first, *(its.token for its in events if isinstance(its, TokenGenerated))], finished


@pytest.mark.parametrize(
    "arena_bytes", some([ARENA_BYTES, 1_000_000], 1_000_000), ids=["growth", "growth and preemption"]
)
async def test_answers_of_every_method_that_outgrow_their_memory_are_those_of_one_rank(
    one, several, straight, monkeypatch, arena_bytes, pytestconfig
):
    monkeypatch.setattr(memory, "GROWTH_TOKENS", 3)
    cases = GREEDY if is_whole(pytestconfig) else GREEDY[::2]
    requests = [
        request_for(one, i, **case | {"max_tokens": 45 + i % 5, "store_history": i % 2 == 0})
        for i, case in enumerate(cases)
    ]
    async with started(one, one) as made:
        expected = [await answer(made, request) for request in requests]
    options = {"arena_bytes": arena_bytes, "admission_wait_s": 120, "max_batch_size": 12}
    async with started(several, one, straight=straight, **options) as made:
        answers = await asyncio.gather(*(answer(made, request) for request in requests))
        assert (made.value("decode_preempted_total") > 0) == (arena_bytes == 1_000_000)
    num_same = 0
    for case, (tokens, finished), (of_one, expected_finish) in zip(cases, answers, expected, strict=True):
        num_same += same_or_tied([its.token_id for its in tokens], of_one)
        # what a segment of generated tokens takes packed depends on its heads
        packs_segments = case.get("method") == "rdkv" and "rebudget_tokens" in case.get("overrides", {})
        tolerance = 0.1 if packs_segments else 0
        assert finished.cache_bytes == pytest.approx(expected_finish.cache_bytes, rel=tolerance, abs=0), case
    assert num_same > 0.8 * sum(len(of_one) for of_one, _ in expected), "more ties than chance explains"


async def test_siblings_have_the_prompt_of_every_rank(one, several, straight):
    first = dataclasses.replace(
        request_for(one, 0, prompt=range(5, 45), temperature=1.0, max_tokens=20), num_siblings=2
    )

    def alone(number):
        sampling = dataclasses.replace(first.sampling, seed=number)
        return dataclasses.replace(first, request_id=f"{number}", sampling=sampling, num_siblings=0)

    async with started(one, one) as made:
        expected = [await answer(made, alone(number)) for number in (1, 2)]

    async with started(several, one, straight=straight) as made:

        async def shared(number):
            token = PromptCache(one, alone(number)).first_token
            start = SharedStart(request_id=first.request_id, first_token=token)
            request = dataclasses.replace(alone(number), shares=start)
            events = [event async for event in made.service.generate(request, timeout_s=60)]
            assert isinstance(events[0], TicketIssued)
            return [token, *(its.token for its in events if isinstance(its, TokenGenerated))], events[-1]

        stream = made.service.generate(first, timeout_s=60)
        async with contextlib.aclosing(stream):
            ticket = (await anext(stream)).ticket
            await asyncio.to_thread(made.shipper.ship, first, ticket)
            await anext(stream)
            answers = [await shared(number) for number in (1, 2)]
    for (tokens, finished), (of_one, expected_finish) in zip(answers, expected, strict=True):
        # drawn by the same numbers from nearly the same distributions
        assert [its.token_id for its in tokens] == [its.token_id for its in of_one]
        torch.testing.assert_close(
            [its.logprob for its in tokens], [its.logprob for its in of_one], rtol=1e-3, atol=1e-3
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


async def test_uneven_heads_take_the_memory_of_the_largest_rank_once_they_have_arrived(
    one, several, straight
):
    request = request_for(one, 0, prompt=[i * 43 % 50 for i in range(141)], **UNEVEN)
    request = dataclasses.replace(request, num_siblings=1)
    cache = PromptCache(one, request)
    spec = dataclasses.replace(one.spec, num_kv_heads=1, num_heads=one.spec.group_size)
    with_room = dataclasses.replace(cache.resolved, max_new_tokens=memory.GROWTH_TOKENS)
    planned = make_formats(spec, with_room, num_parts=2)
    whole = zip(cache.formats, cache.layers, strict=True)
    divided = [fmt.parts(tensors, 2) for fmt, tensors in whole]
    sizes = [
        sequence_layout(
            fmt.sized(header_of(parts[rank])) for fmt, parts in zip(planned, divided, strict=True)
        ).size_bytes
        for rank in range(2)
    ]
    assert sizes[0] != sizes[1]
    async with started(several, one, straight=straight) as made:
        stream = made.service.generate(request, timeout_s=60)
        ticket = (await anext(stream)).ticket
        assert ticket.reserved_bytes == 2 * sequence_layout(planned).size_bytes > 2 * max(sizes)
        await asyncio.to_thread(made.shipper.ship, request, ticket)
        await anext(stream)
        assert made.service.arena.bytes_by_state()["running"] == max(sizes)
        start = SharedStart(request_id=request.request_id, first_token=cache.first_token)
        sibling = dataclasses.replace(request, request_id="sibling", num_siblings=0, shares=start)
        shared = made.service.generate(sibling, timeout_s=60)
        assert (await anext(shared)).ticket.reserved_bytes == 2 * max(sizes)
        events, of_sibling = [[event async for event in its] for its in (stream, shared)]
        tokens = [
            [its.token for its in each if isinstance(its, TokenGenerated)] for each in (events, of_sibling)
        ]
        assert [its.token_id for its in tokens[0]] == [its.token_id for its in tokens[1]]


async def test_parts_that_are_not_the_whole_together_end_the_request(one, several):
    request = request_for(one, 0, prompt=[i * 43 % 50 for i in range(141)], **UNEVEN)
    cache = PromptCache(one, request)
    short = cache.formats[2].parts(cache.layers[2], 2)[1]
    number = len(short["index"]) - 1
    short = {
        "head_rows": short["head_rows"] - 1,
        **{name: short[name][:number].contiguous() for name in ("index", "keys", "values")},
    }
    async with started(several, one, straight=True) as made:
        stream = made.service.generate(request, timeout_s=60)
        transfer = made.shipper.open(request, (await anext(stream)).ticket)
        await asyncio.to_thread(made.shipper.send, transfer, cache, last=2)
        first, second = transfer._parts
        first.send_layer(2, named(cache.formats[2], cache.formats[2].parts(cache.layers[2], 2)[0]))
        second.send_layer(2, named(cache.formats[2], short))
        await asyncio.to_thread(made.shipper.offer, transfer, cache, first=3)
        with contextlib.suppress(ProtocolMismatch):  # at once, where the refusal comes early
            transfer.finish(end_with(cache.first_token))
        with pytest.raises(ProtocolMismatch, match=r"the parts of 2 ranks have \d+ bytes together"):
            async for _ in stream:
                pass
        transfer.abort("refused")


async def test_a_format_that_cannot_be_divided_is_refused_by_name(one, several, monkeypatch):
    monkeypatch.setattr(Ragged, "divides", False)  # as one of another package may be
    async with started(several, one) as made:
        with pytest.raises(InvalidRequest, match="format 'ragged' of method 'adakv' cannot be divided among"):
            await answer(made, request_for(one, 0, **UNEVEN))
        status = await made.service.status(timeout_s=1)
        assert "adakv" not in status.methods
        assert {"full", "rocketkv", "rdkv", "compactor"} <= set(status.methods)
    async with started(one, one) as made:
        assert "adakv" in (await made.service.status(timeout_s=1)).methods


async def test_other_ranks_have_the_workers_own_tables(one, several, straight, tmp_path):
    save_table(tmp_path / "mine.json", EpsilonTable(keys=(0.1, 0.01, 1e-5), values=(0.1, 0.02, 2e-5)))
    overrides = {"epsilon_table": "mine", "rebudget_tokens": 20, "window": 7}
    request = request_for(
        one, 0, prompt=range(5, 95), method="rdkv", tokens=20, max_tokens=45, overrides=overrides
    )
    install_tables(str(tmp_path))
    try:
        several.prepare("decode", kernels="auto", self_test=True, epsilon_tables=str(tmp_path))
        async with started(one, one) as made:
            expected, _ = await answer(made, request)
        async with started(several, one, straight=straight) as made:
            tokens, _ = await answer(made, request)
    finally:
        install_tables("")
    assert same_or_tied([its.token_id for its in tokens], expected) > 20


async def test_a_layer_that_fits_as_a_whole_but_not_its_ranks_is_refused_before_any_gets_it(
    one, several, straight
):
    request = request_for(one, 0, prompt=[i * 39 % 50 for i in range(151)], method="rdkv", tokens=20)
    cache = PromptCache(one, request)
    fmt, inputs = cache.formats[1], cache._inputs[1]

    def of_head(head, budget_tokens):
        its = slice(head, head + 1)
        own = dataclasses.replace(
            inputs, queries=inputs.queries[its], keys=inputs.keys[its], values=inputs.values[its]
        )
        settings = dataclasses.replace(fmt.settings, budget_tokens=budget_tokens)
        return fmt._tensors_of(compress_layer_rdkv(settings, own))

    with torch.inference_mode():
        uneven = cache.layers[1] = fmt.joined([of_head(0, 2), of_head(1, 34)])
    assert fmt.prompt_bytes(uneven) < fmt.limit_bytes < 2 * fmt.prompt_bytes(fmt.parts(uneven, 2)[1])
    async with started(several, one, straight=straight) as made:
        stream = made.service.generate(request, timeout_s=60)
        ticket = (await anext(stream)).ticket
        transfer = made.shipper.open(request, ticket)
        made.shipper.offer(transfer, cache)
        with pytest.raises(TransferFailed, match="layer 1: its tensors are"):
            async for _ in stream:
                pass
        transfer.abort("refused")
        assert (await answer(made, request))[1].num_tokens == 8


async def test_a_cancelled_request_leaves_nothing_and_others_go_on(one, several, straight):
    requests = [request_for(one, i, prompt=range(5, 45), max_tokens=60) for i in range(2)]
    async with started(one, one) as made:
        expected, _ = await answer(made, requests[0])
    async with started(several, one, straight=straight) as made:
        stream = made.service.generate(requests[1], timeout_s=60)
        ticket = (await anext(stream)).ticket
        await asyncio.to_thread(made.shipper.ship, requests[1], ticket)
        await anext(stream)
        other = asyncio.create_task(answer(made, requests[0]))
        for _ in range(5):
            await anext(stream)
        await stream.aclose()
        tokens, _ = await other
    assert same_or_tied([its.token_id for its in tokens], expected) > 0


def test_the_shadow_check_is_refused_with_ranks():
    with pytest.raises(ValueError, match="shadow_check is 8 with tensor_parallel 2; it must be 0"):
        DecodeConfig(shadow_check=8, tensor_parallel=2)
