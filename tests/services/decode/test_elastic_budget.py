"""When memory is short, a request that states a floor gets a smaller budget instead of a refusal."""

import asyncio
import dataclasses

import pytest
from kvtest.decode import oracle_ids

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.errors import CapacityExceeded, InvalidRequest

PROMPT = [i * 7 % 50 for i in range(150)]


def elastic(request, *, tokens, floor):
    plan = plan_for("snapkv", budget=Budget(tokens=tokens, floor_tokens=floor))
    return dataclasses.replace(request, plan=plan)


@pytest.mark.parametrize(("arena_bytes", "granted"), [(1 << 20, 100), (27_000, 50), (20_000, 40)])
async def test_a_request_gets_the_largest_budget_that_fits_and_its_answer_is_the_oracle_s(
    harness, request_of, ticket_of, small_model, arena_bytes, granted
):
    made = await harness(arena_bytes=arena_bytes, elastic_budget=True, admission_wait_s=0.05)
    beside, _ = await ticket_of(made.service, request_of(range(5, 25), request_id="beside"))
    request = elastic(request_of(PROMPT), tokens=100, floor=40)
    stream, ticket = await ticket_of(made.service, request)
    assert ticket.plan.plan.budget.tokens == granted
    shipped = dataclasses.replace(request, plan=ticket.plan.plan)
    first = await asyncio.to_thread(made.shipper.ship, shipped, ticket)
    tokens = [first.token_id, *[event.token.token_id async for event in stream if hasattr(event, "token")]]
    assert tokens == oracle_ids(small_model(), shipped)
    await beside.aclose()
    assert await made.arena_is_free()


@pytest.mark.parametrize(
    ("elastic_budget", "floor"),
    [(True, None), (True, 60), (False, 40)],
    ids=["none", "too high", "not allowed"],
)
async def test_without_a_floor_that_fits_or_the_operator_s_consent_the_request_is_refused(
    harness, request_of, ticket_of, elastic_budget, floor
):
    made = await harness(arena_bytes=20_000, elastic_budget=elastic_budget, admission_wait_s=0.05)
    beside, _ = await ticket_of(made.service, request_of(range(5, 25), request_id="beside"))
    request = elastic(request_of(PROMPT, max_tokens=4), tokens=100, floor=floor)
    with pytest.raises((CapacityExceeded, InvalidRequest)) as caught:
        await made.run(request)
    assert caught.value.reason in ("arena_full", "too_large")
    await beside.aclose()
    assert await made.arena_is_free()


async def test_a_waiting_request_takes_the_largest_budget_that_becomes_free(harness, request_of, ticket_of):
    made = await harness(arena_bytes=30_000, elastic_budget=True, admission_wait_s=20)
    first, _ = await ticket_of(made.service, request_of(range(5, 45), request_id="first"))
    second, _ = await ticket_of(made.service, request_of(range(5, 45), request_id="second"))
    request = elastic(request_of(PROMPT), tokens=100, floor=60)
    waiting = asyncio.create_task(ticket_of(made.service, request))
    while made.service._scheduler.num_waiting == 0:
        await asyncio.sleep(0.01)
    await second.aclose()
    stream, ticket = await asyncio.wait_for(waiting, 10)
    assert ticket.plan.plan.budget.tokens == 60
    await stream.aclose()
    await first.aclose()
    assert await made.arena_is_free()


@pytest.mark.parametrize(
    ("budget", "smaller"),
    [
        (Budget(tokens=512, floor_tokens=100), [256, 128, 100]),
        (Budget(tokens=7, floor_tokens=7), []),
        (Budget(tokens=512), []),
        (Budget(retention=0.5), []),
    ],
)
def test_budgets_are_halved_down_to_the_floor(budget, smaller):
    assert [candidate.tokens for candidate in budget.smaller()] == smaller


@pytest.mark.parametrize(
    "given", [{"tokens": 8, "floor_tokens": 9}, {"floor_tokens": 4}, {"tokens": 8, "floor_tokens": 0}]
)
def test_a_floor_outside_the_budget_is_refused_by_name(given):
    with pytest.raises(InvalidRequest, match="min_token_budget is") as caught:
        Budget(**given)
    assert caught.value.param == "kv_compression.min_token_budget"
