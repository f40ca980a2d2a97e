"""Prompts without a session id: what of them is stored, and what later prompts of the same key reuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvtest.clock import Clock
from kvtest.waiting import eventually

from kvferry.services.router.app import Timing
from kvferry.services.router.sessions.implicit import ImplicitSessions
from kvferry.shared.errors import WorkerUnavailable
from kvferry.shared.history.records import BLOCK_TOKENS

WORDS = "the old sailor painted the quiet bridge . " * 8
AT_P = {"prefill_address": "p", "decode_address": "d"}
LONG, LONGER, OTHER = WORDS, WORDS + "what is the pin ?", "the red castle . " * 20


def table(max_per_key: int = 2, clock: Clock | None = None, max_bytes_per_key: int = 0) -> ImplicitSessions:
    return ImplicitSessions(
        max_per_key=max_per_key, max_bytes_per_key=max_bytes_per_key, ttl_s=60.0, clock=clock or Clock()
    )


def prompt(first: int, num_tokens: int = 100) -> tuple[int, ...]:
    return tuple(range(first, first + num_tokens))


async def ask(stack: Any, text: str, client: Any = None, **fields: Any) -> Any:
    """One text completion; returns how many of its tokens were cached."""
    answer = await (client or stack.client).completions.create(
        model="demo", prompt=text, temperature=0, max_tokens=3, **fields
    )
    await eventually(lambda: not stack.prefill[0].staged)
    return answer


def cached(answer: Any) -> int:
    tokens: int = answer.usage.prompt_tokens_details.cached_tokens
    return tokens


async def test_a_repeated_prompt_reuses_the_first_one_and_is_not_stored_again(stack: Any) -> None:
    first, second = await ask(stack, LONG), await ask(stack, LONG)
    assert cached(first) == 0
    assert cached(second) == second.usage.prompt_tokens - 1 == second.kv["reused_tokens"]
    assert first.choices == second.choices
    (stored,) = stack.prefill[0].history
    assert stored.is_implicit
    assert len(stack.prefill[0].aborted) == 1
    assert not any(request.store_history for request in stack.decode[0].requests)
    rows, repeated = [request.session for request in stack.decode[0].requests]
    assert rows.is_implicit
    assert repeated is None
    assert (await stack.http.get("/v1/sessions", headers={"Authorization": "Bearer key-a"})).json()[
        "data"
    ] == []


async def test_a_prompt_that_continues_another_replaces_it(stack: Any) -> None:
    first = await ask(stack, LONG)
    assert cached(await ask(stack, LONGER)) == first.usage.prompt_tokens
    await eventually(lambda: len(stack.prefill[0].dropped) == 1)
    assert len(stack.prefill[0].history) == 1
    assert stack.decode[0].dropped == []
    # The former prompt is a prefix of the stored one, and reuses that.
    assert cached(await ask(stack, LONG)) == first.usage.prompt_tokens - 1


async def test_a_prompt_that_shares_most_of_another_reuses_it_without_being_stored(stack: Any) -> None:
    await ask(stack, LONGER)
    branch = await ask(stack, WORDS + "what is the word ?")
    assert 0 < cached(branch) < branch.usage.prompt_tokens - 1
    assert len(stack.prefill[0].history) == 1


async def test_another_key_reuses_nothing(stack: Any) -> None:
    await ask(stack, LONG)
    assert cached(await ask(stack, LONG, stack.keyed("key-b"))) == 0
    assert len({key.owner for key in stack.prefill[0].history}) == 2


async def test_short_prompts_and_a_limit_of_zero_store_nothing(start_stack: Any, stack: Any) -> None:
    await ask(stack, "the red castle .")
    off = await start_stack(implicit_sessions=0)
    await ask(off, LONG)
    assert cached(await ask(off, LONG)) == 0
    for one in (stack, off):
        assert all(request.session is None for request in one.prefill[0].requests)


async def test_a_key_has_a_bounded_number_of_them_and_they_expire(start_stack: Any) -> None:
    clock, timing = Clock(), Timing(sweep_interval_s=0.05)
    stack = await start_stack(implicit_sessions=1, implicit_session_ttl_s=60.0, clock=clock, timing=timing)
    await ask(stack, LONG)
    await ask(stack, OTHER)
    await eventually(lambda: len(stack.prefill[0].dropped) == 1)
    await stack.swept()
    assert len(stack.prefill[0].history) == 1
    clock.turn(60.0)
    await eventually(lambda: stack.prefill[0].history == {})


def test_a_key_has_a_bounded_number_of_their_bytes() -> None:
    sessions = table(max_per_key=9, max_bytes_per_key=200 * 36)
    added = [sessions.begin(owner, prompt(first)) for owner, first in (("o", 0), ("p", 0), ("o", 500))]
    assert all(sessions.add(turn, **AT_P) == [] for turn in added if turn is not None)
    third, long = sessions.begin("o", prompt(1000)), sessions.begin("o", prompt(2000, 201))
    assert third is not None
    assert long is not None
    assert [key for key, _ in sessions.add(third, **AT_P)] == [added[0].key]
    assert [key for key, _ in sessions.add(long, **AT_P)] == [added[2].key, third.key, long.key]
    assert sessions.remove_owner("p")


@pytest.mark.parametrize("stream", [False, True])
async def test_many_choices_run_the_prompt_once(stack: Any, stream: bool) -> None:
    answer = await stack.client.completions.create(
        model="demo", prompt=LONG, temperature=1, seed=3, max_tokens=3, n=4, stream=stream
    )
    if stream:
        async for _ in answer:
            pass
    await eventually(lambda: not stack.prefill[0].staged)
    (request,) = stack.prefill[0].requests
    (stored,) = stack.prefill[0].history
    assert stored == request.session
    first, *others = stack.decode[0].requests
    assert (first.num_siblings, first.shares) == (3, None)
    assert {(sibling.num_siblings, sibling.shares.request_id) for sibling in others} == {
        (0, first.request_id)
    }
    assert (
        {other.sampling.seed for other in others}
        == {sibling.seed for sibling in request.siblings}
        == {4, 5, 6}
    )


async def test_the_choices_go_where_the_prompt_is(start_stack: Any) -> None:
    stack = await start_stack(num_prefill=3)
    await stack.client.completions.create(model="demo", prompt=LONG, max_tokens=2, n=4)
    await stack.client.completions.create(model="demo", prompt=LONGER, max_tokens=2)
    assert sorted(len(worker.requests) for worker in stack.prefill) == [0, 0, 2]


async def test_a_lost_worker_costs_the_stored_prompt_nothing(start_stack: Any) -> None:
    stack = await start_stack()

    def lose(num_tokens: int) -> None:
        if num_tokens == 2:
            raise WorkerUnavailable("gone")

    stack.decode[0].faults = [lose]
    await ask(stack, LONG)
    replay = stack.prefill[0].requests[-1]
    assert len(stack.prefill[0].requests) == 2
    assert replay.session is None
    assert len(stack.prefill[0].history) == 1


async def test_a_client_that_leaves_before_the_first_token_leaves_nothing(stack: Any) -> None:
    stack.script.may_prefill.clear()
    asking = asyncio.create_task(stack.client.completions.create(model="demo", prompt=LONG, max_tokens=2))
    await eventually(lambda: len(stack.prefill[0].staged) == 1)
    asking.cancel()
    await eventually(lambda: len(stack.prefill[0].aborted) == 1)
    assert stack.prefill[0].staged == stack.prefill[0].history == {}


async def test_a_prompt_that_cannot_be_stored_is_answered_all_the_same(stack: Any) -> None:
    stack.prefill[0].commit_error = WorkerUnavailable("no room")
    answer = await stack.client.completions.create(model="demo", prompt=LONG, max_tokens=3, n=2)
    assert len(answer.choices) == 2
    stack.prefill[0].commit_error = None


def test_the_longest_shared_prefix_is_found_and_used_last_dropped_last() -> None:
    sessions = table()
    turns = [sessions.begin("o", prompt(first)) for first in (0, 1000)]
    for turn in turns:
        assert turn is not None
        assert sessions.add(turn, **AT_P) == []
    found = sessions.begin("o", prompt(0, 120))
    assert found is not None
    assert (found.former, found.shared_tokens, found.extends_former) == (turns[0].key, 100, True)
    assert found.prefill_addresses == ("p",)
    third = sessions.begin("o", prompt(2000))
    assert third is not None
    assert third.former is None
    assert sessions.add(third, **AT_P) == [(turns[1].key, "p")]
    assert sessions.begin("another", prompt(0)).former is None  # type: ignore[union-attr]
    assert sessions.begin("o", prompt(0, BLOCK_TOKENS - 1)) is None


@pytest.mark.parametrize(
    ("num_shared", "num_tokens", "reused", "stored"),
    [
        (100, 100, 99, False),  # the same prompt
        (100, 100, 0, True),  # the same prompt, which prefill has lost
        (80, 80, 79, False),  # a part of the stored prompt
        (100, 101, 100, True),  # the stored prompt continues
        (80, 80 + BLOCK_TOKENS - 1, 80, False),  # another one would not find what it adds
        (80, 80 + BLOCK_TOKENS, 80, True),
    ],
)
def test_a_prompt_is_stored_where_it_adds_a_block(
    num_shared: int, num_tokens: int, reused: int, stored: bool
) -> None:
    sessions = table()
    first = sessions.begin("o", prompt(0))
    assert first is not None
    sessions.add(first, **AT_P)
    second = sessions.begin("o", prompt(0, num_shared) + prompt(5000, num_tokens - num_shared))
    assert second is not None
    assert second.is_worth_storing(reused) is stored


def test_a_prompts_rows_are_retained_with_those_of_the_prompt_that_it_continues() -> None:
    sessions = table(max_per_key=9)
    kept = []
    for num_tokens in (100, 120, 140, 140, 130):
        turn = sessions.begin("o", prompt(0, num_tokens))
        assert turn is not None
        kept.append((turn.retained_as, turn.decode_addresses))
        if turn.is_worth_storing(turn.shared_tokens and min(turn.shared_tokens, num_tokens - 1)):
            sessions.add(turn, **AT_P)
    first = kept[0][0]
    assert first is not None
    # One that is sent again, and one that is a part of another bring nothing that is not retained.
    assert kept == [(first, ()), (first, ("d",)), (first, ("d",)), (None, ()), (None, ())]
    branch = sessions.begin("o", prompt(0, 110) + prompt(5000, 50))
    assert branch is not None
    assert branch.retained_as not in (None, first)
    assert branch.decode_addresses == ()


def test_unused_prompts_expire() -> None:
    clock = Clock()
    sessions = table(clock=clock)
    turns = [sessions.begin("o", prompt(first)) for first in (0, 1000)]
    for turn in turns:
        assert turn is not None
        sessions.add(turn, **AT_P)
    clock.turn(59.0)
    sessions.begin("o", prompt(0))
    clock.turn(1.0)
    assert sessions.remove_stale() == [(turns[1].key, "p")]  # type: ignore[union-attr]
    clock.turn(59.0)
    assert sessions.remove_stale() == [(turns[0].key, "p")]  # type: ignore[union-attr]


async def test_a_hint_says_how_long_a_prompt_stays(stack: Any) -> None:
    implicit, clock = stack.services.implicit, stack.services.clock
    hints = [
        ({"agent_hint": {"cache_control": {"type": "ephemeral", "ttl": 300}}}, 300),
        ({"agent_hint": {"cache_control": {"ttl": "5m"}}}, 300),
        ({"nvext": {"cache_control": {"ttl": "1h"}}}, 3600),
        ({"agent_hint": {"cache_control": {"ttl": 1e9}}}, 30 * 86400),
        ({"agent_hint": {"session_id": "s"}}, 600),
    ]
    for number, (hint, kept_s) in enumerate(hints):
        await ask(stack, f"{number} " * 40, extra_body=hint)
        *_, record = implicit._records.values()
        assert kept_s - 120 < record.expires_at_s - clock() <= kept_s
    for ttl in ("soon", -1, "5 m"):
        answer = await stack.http.post(
            "/v1/completions",
            json={"model": "demo", "prompt": "a", "agent_hint": {"cache_control": {"ttl": ttl}}},
        )
        assert answer.json()["error"]["param"] == "agent_hint.cache_control.ttl"


def test_a_prompt_is_kept_as_long_as_its_turn_wants() -> None:
    clock = Clock()
    it = table(clock=clock)
    for keep_s, at_s, is_gone in ((None, 61, True), (300.0, 299, False), (300.0, 301, True), (1.0, 2, True)):
        turn = it.begin("k", prompt(0), keep_s=keep_s)
        assert turn is not None
        it.add(turn, **AT_P)
        clock.turn(at_s)
        gone = [key for key, _ in it.remove_stale()]
        assert (turn.key in gone) is is_gone
        clock.turn(1000)
        it.remove_stale()


async def test_a_conversation_that_is_over_leaves_nothing(stack: Any) -> None:
    evict = {"agent_hint": {"context_management": {"edits": [{"type": "evict"}]}}}
    await ask(stack, LONG)
    assert len(stack.prefill[0].history) == 1
    last = await ask(stack, LONGER, extra_body=evict)
    assert cached(last) > 0
    await eventually(lambda: not stack.prefill[0].history)
    assert cached(await ask(stack, LONGER)) == 0


async def test_a_hinted_priority_is_the_other_way_round(stack: Any) -> None:
    for given, used in (({"nvext": {"agent_hints": {"priority": 5}}}, -5), ({"priority": 3}, 3), ({}, 0)):
        await ask(stack, OTHER, extra_body=given)
        assert stack.prefill[0].requests[-1].priority == used
