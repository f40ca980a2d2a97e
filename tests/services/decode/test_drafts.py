"""Drafts at decode: the answer's first tokens and their rows come with the prompt, and decode goes on."""

import asyncio
import contextlib
import dataclasses

import pytest
import torch
from kvtest.decode import PromptCache, SmallModel, end_with, oracle_ids
from kvtest.waiting import eventually

from kvferry.shared.control.messages import GenerationFinished, HistoryReturned, TokenGenerated
from kvferry.shared.errors import TransferFailed
from kvferry.shared.sampling.params import SampledToken

PROMPT = [i * 7 % 50 for i in range(149)]


def drafting(request_of, **changes):
    return request_of(PROMPT, **({"method": "rdkv-draft", "tokens": 12, "max_tokens": 20} | changes))


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 9, 10, 30])
async def test_answers_of_any_length_are_the_oracle_s(harness, request_of, small_model, max_tokens):
    made = await harness()
    request = drafting(request_of, max_tokens=max_tokens)
    assert await made.tokens(request) == oracle_ids(small_model(), request)
    assert await made.arena_is_free()


@pytest.mark.parametrize(
    "changes",
    [
        {"overrides": {"draft_tokens": 1}},
        {"overrides": {"draft_tokens": 64}, "max_tokens": 100},
        {"overrides": {"rebudget_tokens": 8}, "max_tokens": 40},
        {"overrides": {"rebudget_tokens": 16, "window": 4, "draft_tokens": 15}, "max_tokens": 40},
        {"attention": "hsa", "overrides": {"rebudget_tokens": 0}},
        {"skip_layers": (0,)},
        {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0, "max_tokens": 20},
    ],
    ids=str,
)
async def test_drafts_go_with_every_kind_of_layer_and_sampling(harness, request_of, small_model, changes):
    made = await harness()
    request = drafting(request_of, **({"max_tokens": 14} | changes))
    assert await made.tokens(request) == oracle_ids(small_model(), request)


@pytest.mark.parametrize("at", [0, 3, 7, 8, 9])
@pytest.mark.parametrize("end", ["stop_token_ids", "stop"])
async def test_a_stop_within_the_draft_ends_the_completion(harness, request_of, at, end):
    made = await harness()
    free = await made.tokens(drafting(request_of, temperature=1.0, seed=4, max_tokens=12))
    stop = made.service._tokenizer.decode([free[at]])
    if end == "stop" and not stop.strip():
        pytest.skip("the token has no text")
    first = free.index(free[at])
    params = {"stop_token_ids": (free[at],)} if end == "stop_token_ids" else {"stop": (stop,)}
    request = drafting(request_of, temperature=1.0, seed=4, max_tokens=12, **params)
    cache, events = await made._run(request)
    drawn = [*cache.drawn, *(event.token for event in events if isinstance(event, TokenGenerated))]
    ids = [token.token_id for token in drawn]
    assert ids == free[: len(ids)]
    assert len(ids) <= first + 1
    finished = events[-1]
    assert isinstance(finished, GenerationFinished)
    assert (finished.finish_reason, finished.num_tokens) == ("stop", len(ids))
    assert await made.arena_is_free()


async def test_no_step_is_run_for_the_tokens_of_a_draft(harness, request_of):
    made = await harness()
    ran = []
    made.model.before_step = lambda token_ids: ran.append(token_ids.tolist())
    tokens = await made.tokens(drafting(request_of, max_tokens=12))
    assert ran == [[token] for token in tokens[8:11]]


async def test_a_completion_that_is_cut_off_has_its_draft(harness, request_of, ticket_of):
    made = await harness()
    request = drafting(request_of, max_tokens=200, store_history=True)
    stream, ticket = await ticket_of(made.service, request)
    await made.service.finish(request.request_id, timeout_s=1)
    await asyncio.to_thread(made.shipper.ship, request, ticket)
    events = [event async for event in stream]
    finished = next(event for event in events if isinstance(event, GenerationFinished))
    assert finished.num_tokens >= 9
    assert isinstance(events[-1], HistoryReturned)
    assert await made.arena_is_free()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft": ()}, "first_token"),
        ({"draft": (1,) * 7}, "first_token"),
        ({"draft": (1,) * 9, "first_token": SampledToken(token_id=1, index=9)}, "draft"),
        ({"draft": (10**6,) * 8}, "draft"),
        ({"first_token": None}, "first_token"),
    ],
)
async def test_an_end_that_does_not_fit_the_rows_is_refused(begin, request_of, changes, reason):
    made, stream, transfer, cache = await begin(drafting(request_of))
    made.shipper.send(transfer, cache)
    transfer.finish(dataclasses.replace(end_with(cache.first_token, cache.draft), **changes))
    with pytest.raises(TransferFailed) as caught:
        transfer.wait(20)
    assert caught.value.reason in (reason, "draft")
    with pytest.raises(TransferFailed):
        [event async for event in stream]
    assert await made.arena_is_free()


def without_rows(layer):
    return {name: tensor for name, tensor in layer.items() if not name.startswith("draft_")}


def cut(layer):
    return {name: tensor[:, :5] if name.startswith("draft_") else tensor for name, tensor in layer.items()}


def poisoned(layer):
    return {
        name: torch.full_like(tensor, torch.nan) if name == "draft_values" else tensor
        for name, tensor in layer.items()
    }


def longer(layer):
    return {
        name: torch.cat([tensor, tensor], 1) if name.startswith("draft_") else tensor
        for name, tensor in layer.items()
    }


def other_names(layer):
    return {name.replace("draft_keys", "draft_rows"): tensor for name, tensor in layer.items()}


def before_the_others(layer):
    rows = {name: tensor for name, tensor in layer.items() if name.startswith("draft_")}
    return rows | without_rows(layer)


@pytest.mark.parametrize("change", [without_rows, cut, poisoned, longer, other_names, before_the_others])
async def test_rows_that_are_no_draft_s_are_refused(begin, request_of, change):
    made, stream, transfer, cache = await begin(drafting(request_of))
    cache.layers[1] = change(cache.layers[1])
    made.shipper.offer(transfer, cache)
    with contextlib.suppress(TransferFailed):  # the refusal may have come
        transfer.finish(end_with(cache.first_token, cache.draft))
    with pytest.raises(TransferFailed) as caught:
        transfer.wait(20)
    assert caught.value.reason in ("draft", "not_finite")
    with pytest.raises(TransferFailed):
        [event async for event in stream]
    assert await made.arena_is_free()


async def test_other_methods_take_no_draft(begin, request_of):
    request = drafting(request_of)
    drafted = PromptCache(SmallModel(), request)
    made, stream, transfer, cache = await begin(request_of(PROMPT, method="rdkv", tokens=12))
    cache.layers[0] |= {
        name: tensor for name, tensor in drafted.layers[0].items() if name.startswith("draft_")
    }
    made.shipper.offer(transfer, cache)
    with pytest.raises(TransferFailed):
        transfer.wait(20)
    with pytest.raises(TransferFailed, match=r"its draft has keys, values.* of 8 tokens; rows of 1 to 0"):
        [event async for event in stream]


async def test_siblings_take_no_draft(begin, request_of):
    request = drafting(request_of)
    cache = PromptCache(SmallModel(), request)
    made, stream, transfer, _ = await begin(dataclasses.replace(request, num_siblings=1))
    made.shipper.send(transfer, cache)
    transfer.finish(end_with(cache.first_token, cache.draft))
    with pytest.raises(TransferFailed, match="siblings share it"):
        transfer.wait(20)
    await eventually(lambda: made.service.arena.free_bytes == made.service.arena.size_bytes)
    await stream.aclose()
