"""Several completions of one prompt: its KV arrives once, and each decodes as if it had arrived for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading

import pytest
from kvtest.clock import Clock
from kvtest.decode import MIXED, PromptCache, SmallModel

from kvferry.shared.control.messages import GenerationFinished, SharedStart, TicketIssued, TokenGenerated
from kvferry.shared.errors import CapacityExceeded, InvalidRequest, LeaseExpired, TransferFailed

DRAWN = {"temperature": 1.0, "logprobs": 2}
OF_EACH_METHOD = list(
    {
        (options.get("method"), "rebudget_tokens" in options.get("overrides", {})): options
        for options in MIXED
    }.values()
)


def with_seed(request, number):
    sampling = dataclasses.replace(request.sampling, seed=request.sampling.seed + number)
    return dataclasses.replace(request, request_id=f"{request.request_id}.{number}", sampling=sampling)


def sharing(request, number, of):
    """The request of a sibling, with the first token that prefill samples for it."""
    alone = with_seed(request, number)
    token = PromptCache(SmallModel(), leading(alone, of.num_siblings)).first_token
    return dataclasses.replace(alone, shares=SharedStart(request_id=of.request_id, first_token=token))


def leading(request, num_siblings):
    return dataclasses.replace(request, num_siblings=num_siblings)


async def drawn(service, request):
    """The tokens of a request that shares a prompt."""
    events = [event async for event in service.generate(request, timeout_s=30)]
    assert isinstance(events[0], TicketIssued)
    assert isinstance(events[-1], GenerationFinished)
    return [request.shares.first_token, *(each.token for each in events if isinstance(each, TokenGenerated))]


async def alone(made, request):
    first, events = await made.run(request)
    return [first, *(event.token for event in events if isinstance(event, TokenGenerated))]


@contextlib.asynccontextmanager
async def arrived(made, request, ticket_of):
    """A request whose prompt has arrived, and whose answer goes on."""
    stream, ticket = await ticket_of(made.service, request)
    async with contextlib.aclosing(stream):
        await asyncio.to_thread(made.shipper.ship, request, ticket)
        await anext(stream)
        yield stream


@pytest.mark.parametrize("kwargs", OF_EACH_METHOD, ids=lambda options: options.get("method", "full"))
async def test_siblings_say_what_each_would_have_said_alone(harness, request_of, ticket_of, kwargs):
    made = await harness()
    request = request_of(**{**kwargs, **DRAWN})
    # who has siblings drafts greedily, and for all of them
    expected = [await alone(made, leading(with_seed(request, number), 1)) for number in range(3)]
    assert len({tuple(token.token_id for token in tokens) for tokens in expected}) > 1
    first = leading(request, 2)
    stream, ticket = await ticket_of(made.service, first)
    async with contextlib.aclosing(stream):
        tokens = [await asyncio.to_thread(made.shipper.ship, first, ticket)]
        await anext(stream)
        others = [drawn(made.service, sharing(request, number, first)) for number in (1, 2)]
        others = await asyncio.gather(*others)
        tokens += [event.token async for event in stream if isinstance(event, TokenGenerated)]
    assert [tokens, *others] == expected
    assert await made.arena_is_free()


async def test_a_sibling_outlives_the_first_and_a_cancelled_one_harms_nobody(harness, request_of, ticket_of):
    made = await harness()
    request = request_of(max_tokens=40, **DRAWN)
    expected = await alone(made, with_seed(request, 2))
    first = leading(request, 2)
    async with arrived(made, first, ticket_of):
        given_up = made.service.generate(sharing(request, 1, first), timeout_s=30)
        await anext(given_up)
        last = made.service.generate(sharing(request, 2, first), timeout_s=30)
        await anext(last)
        await given_up.aclose()
    tokens = [event.token async for event in last if isinstance(event, TokenGenerated)]
    assert tokens == expected[1:]
    assert await made.arena_is_free()


async def test_a_sibling_without_room_is_refused_and_leaves_nothing(harness, request_of, ticket_of):
    made = await harness(arena_bytes=1 << 15, admission_wait_s=0.001)
    refused = threading.Event()
    made.model.before_step = lambda token_ids: refused.wait(60)  # the first answer's end makes room
    request = request_of(range(5, 45), max_tokens=60)
    first = leading(request, 3)
    async with arrived(made, first, ticket_of) as stream:
        requests = [sharing(request, number, first) for number in (1, 2, 3)]
        others = [made.service.generate(sibling, timeout_s=30) for sibling in requests]
        tickets = await asyncio.gather(*map(anext, others), return_exceptions=True)
        assert any(isinstance(outcome, CapacityExceeded) for outcome in tickets), tickets
        refused.set()
        for other in others:
            await other.aclose()
        assert len([event async for event in stream]) == 60
    assert await made.arena_is_free()


async def test_a_prompt_is_shared_as_often_as_was_announced_and_only_once_it_is_there(
    harness, request_of, ticket_of
):
    made = await harness()
    request = request_of(max_tokens=3)
    first = leading(request, 1)
    sibling = sharing(request, 1, first)
    stream, ticket = await ticket_of(made.service, first)
    with pytest.raises(LeaseExpired, match="to share"):
        await drawn(made.service, sibling)
    await asyncio.to_thread(made.shipper.ship, first, ticket)
    assert [event async for event in stream]
    await drawn(made.service, sibling)
    with pytest.raises(LeaseExpired, match="to share"):
        await drawn(made.service, sibling)
    assert await made.arena_is_free()


async def test_a_prompt_is_forgotten_with_its_request_or_its_lease(harness, request_of, ticket_of):
    clock = Clock()
    made = await harness(lease_s=10.0, clock=clock)
    first = leading(request_of(max_tokens=200), 1)
    async with arrived(made, first, ticket_of):
        pass
    with pytest.raises(LeaseExpired, match="to share"):
        await drawn(made.service, sharing(first, 1, first))
    first = leading(request_of(max_tokens=3, request_id="another"), 1)
    await alone(made, first)
    assert made.service._prompts.entries
    clock.turn(10.0)
    while made.service._prompts.entries:
        await asyncio.sleep(0.01)
    with pytest.raises(LeaseExpired, match="to share"):
        await drawn(made.service, sharing(first, 1, first))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_token_ids": tuple(range(6, 46))}, InvalidRequest),
        ({"store_history": True}, InvalidRequest),
        ({"max_tokens": 4}, InvalidRequest),
        ({"index": 1}, TransferFailed),
        ({"token_id": 50}, TransferFailed),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_request_that_does_not_fit_the_prompt_is_refused(
    harness, request_of, ticket_of, change, error
):
    made = await harness()
    first = leading(request_of(max_tokens=30), 1)
    async with arrived(made, first, ticket_of):
        sibling = sharing(first, 1, first)
        if "max_tokens" in change:
            changed = dataclasses.replace(sibling, sampling=dataclasses.replace(sibling.sampling, **change))
        elif change.keys() <= {"index", "token_id"}:
            token = dataclasses.replace(sibling.shares.first_token, **change)
            changed = dataclasses.replace(
                sibling, shares=dataclasses.replace(sibling.shares, first_token=token)
            )
        else:
            changed = dataclasses.replace(sibling, **change)
        with pytest.raises(error):
            await drawn(made.service, changed)
        assert await drawn(made.service, sibling)
    assert await made.arena_is_free()
