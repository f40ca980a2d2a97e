"""Delta shipping between real prefill and decode services: fewer rows and the same tokens, or all rows."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from kvtest.pair import ARENA_BYTES, SAMPLING, SESSION, WAIT_S, Pair, Turn
from kvtest.waiting import eventually

from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import (
    GenerateRequest,
    SessionKey,
    Ticket,
    TicketIssued,
)
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.oracle import OneProcessGenerator, OracleSession


@pytest.fixture(scope="module")
def model(demo_model_dir: Path) -> LanguageModel:
    return load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=2048)


@pytest_asyncio.fixture
async def pair(model: LanguageModel, demo_model_dir: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        made = Pair(model=model, tokenizer=ChatTokenizer.load(demo_model_dir), stack=stack)
        await made.start_prefill()
        yield made


def some_tokens(model: LanguageModel, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, model.spec.vocab_size) for _ in range(count)]


def plan_of(method: str) -> CompressionPlan:
    return plan_for(method, budget=None if method == "full" else Budget(tokens=48))


def selected(pair: Pair, turn: Turn) -> Iterator[tuple[int, int, int]]:
    """Layer, head and token of each row that the turn kept, as prefill remembers it."""
    retained = pair.prefill._engine.turns.shipped.retained(
        SESSION, transfer_id=turn.ticket.transfer_id, num_tokens=1, depth=1
    )
    assert retained is not None
    for layer, positions in enumerate(retained.selections[0].layers):
        assert positions is not None
        for head, kept in enumerate(positions.tolist()):
            yield from ((layer, head, token) for token in kept)


def row_bytes(turn: Turn) -> int:
    return turn.done.bytes_by_kind["rows"]


@pytest.mark.parametrize("method", ["full", "snapkv", "rocketkv", "pyramidkv"])
async def test_turns_equal_the_one_process_conversation_and_ship_only_new_rows(
    pair: Pair, method: str
) -> None:
    await pair.start_decode()
    plan, oracle = plan_of(method), OracleSession()
    prompt = some_tokens(pair.model, 301, seed=1)
    saved_before = 0.0
    for number in range(4):
        turn = await pair.checked_turn(prompt, plan, oracle)
        saved = pair.prefill_metrics.kv_delta_saved_bytes.labels("demo", method)._value.get()
        if number == 0:
            assert turn.done.delta_bytes is None
            assert turn.ticket.retained_tokens == 0
        else:
            # the last token of a completion has no row
            assert turn.ticket.retained_tokens == turn.reused == len(prompt) - 21
            assert turn.done.delta_bytes == row_bytes(turn)
            assert saved - saved_before > 0
        if number and method == "full":
            assert row_bytes(turn) == pair.model.spec.kv_token_bytes * 21
            assert saved - saved_before == pair.model.spec.kv_token_bytes * (len(prompt) - 21)
        saved_before = saved
        prompt = prompt + turn.tokens + some_tokens(pair.model, 20, seed=10 + number)
    pair.decode.arena.check_integrity()
    assert 0 < pair.retained_bytes() == ARENA_BYTES - pair.decode.arena.free_bytes


async def test_rows_of_any_earlier_turn_are_not_shipped_again(pair: Pair) -> None:
    await pair.start_decode()
    plan, oracle = plan_of("snapkv"), OracleSession()
    prompt = some_tokens(pair.model, 301, seed=21)
    spec = pair.model.spec
    retained: list[set[tuple[int, int, int]]] = []
    for number in range(10):
        turn = await pair.checked_turn(prompt, plan, oracle)
        assert turn.ticket.retained_depth == number
        kept = {(layer, head, token) for layer, head, token in selected(pair, turn)}
        generated = {
            (layer, head, token)
            for layer in range(spec.num_layers)
            for head in range(spec.num_kv_heads)
            for token in range(len(prompt) - 26, turn.ticket.retained_tokens)
        }
        known = set().union(*retained, generated if number else set())
        assert row_bytes(turn) == 2 * spec.row_bytes(0) * len(kept - known)
        retained.append(kept)
        prompt = prompt + turn.tokens + some_tokens(pair.model, 20, seed=30 + number)
        older = pair.decode._retained._chains[SESSION].selections[1:]
        await eventually(lambda: all(selection.is_settled for selection in older))  # noqa: B023
        older_bytes = pair.retained_bytes() - turn.ticket.reserved_bytes
        assert older_bytes <= spec.kv_token_bytes * turn.ticket.retained_tokens
    # rows that two neighbours have are there once
    assert pair.retained_bytes() < 9 * turn.ticket.reserved_bytes
    # each selection was shipped once, and less than its own last turn's would have been
    assert len(kept - known) < len(kept - retained[-2])


async def test_a_full_arena_takes_the_oldest_selections_and_the_rest_still_serve(pair: Pair) -> None:
    await pair.start_decode(arena_bytes=1 << 20)
    plan, oracle = plan_of("snapkv"), OracleSession()
    prompt = some_tokens(pair.model, 301, seed=22)
    depths = []
    for number in range(6):
        turn = await pair.checked_turn(prompt, plan, oracle)
        assert (turn.done.delta_bytes is not None) == (number > 0)
        depths.append(turn.ticket.retained_depth)
        pair.decode.arena.check_integrity()
        prompt = prompt + turn.tokens + some_tokens(pair.model, 20, seed=40 + number)
    most = (1 << 20) // turn.ticket.reserved_bytes - 1
    # more where they were copied to less memory in time
    assert all(min(number, most) <= depth <= number for number, depth in enumerate(depths))
    assert 1 < most < 5


async def test_without_retention_every_turn_ships_all_and_the_arena_is_free(pair: Pair) -> None:
    await pair.start_decode(retain_s=0)
    prompt = some_tokens(pair.model, 200, seed=2)
    for _ in range(2):
        turn = await pair.turn(prompt, plan_of("full"))
        assert turn.done.delta_bytes is None
        assert row_bytes(turn) == pair.model.spec.kv_token_bytes * len(prompt)
        assert pair.decode.arena.free_bytes == ARENA_BYTES
        prompt = prompt + turn.tokens + [11]


async def test_an_edited_conversation_reuses_only_what_is_before_the_edit(pair: Pair) -> None:
    await pair.start_decode()
    plan, oracle = plan_of("full"), OracleSession()
    prompt = some_tokens(pair.model, 200, seed=3)
    edited = [*prompt[:120], *some_tokens(pair.model, 90, seed=4)]
    edited[120] = prompt[120] + 1 if prompt[120] + 1 < pair.model.spec.vocab_size else prompt[120] - 1
    for tokens, num_retained in ((prompt, 0), (edited, 120)):
        turn = await pair.checked_turn(tokens, plan, oracle)
        assert turn.ticket.retained_tokens == num_retained
        assert row_bytes(turn) == pair.model.spec.kv_token_bytes * (len(tokens) - num_retained)


async def test_a_selection_is_evicted_for_whoever_needs_the_bytes(pair: Pair) -> None:
    await pair.start_decode(arena_bytes=3 << 20)
    plan, prompt = plan_of("full"), some_tokens(pair.model, 240, seed=5)
    need_bytes = 0
    for number in range(6):
        turn = await pair.turn(prompt, plan, session=SessionKey(owner="o", session_id=f"s{number}"))
        need_bytes = turn.ticket.reserved_bytes
        pair.decode.arena.check_integrity()
    assert 0 < pair.retained_bytes() < 6 * need_bytes
    last = await pair.turn([*prompt, *turn.tokens, 12], plan, session=SessionKey(owner="o", session_id="s5"))
    assert last.done.delta_bytes is not None
    gone = await pair.turn([*prompt, *turn.tokens, 12], plan, session=SessionKey(owner="o", session_id="s0"))
    assert gone.ticket.retained_transfer_id == 0
    assert gone.done.delta_bytes is None
    assert gone.tokens == last.tokens


async def test_a_restarted_prefill_or_a_key_it_does_not_know_ships_all(pair: Pair) -> None:
    await pair.start_decode()
    plan, prompt = plan_of("rocketkv"), some_tokens(pair.model, 260, seed=6)
    first = await pair.turn(prompt, plan)
    prompt = prompt + first.tokens + [13]

    def forge(ticket: Ticket) -> Ticket:
        assert ticket.retained_transfer_id == first.ticket.transfer_id
        return Ticket(**{**vars(ticket), "retained_transfer_id": ticket.retained_transfer_id ^ 1})

    forged = await pair.turn(prompt, plan, forge=forge)
    assert forged.reused > 0
    assert forged.done.delta_bytes is None
    prompt = prompt + forged.tokens + [14]
    await pair.start_prefill()
    restarted = await pair.turn(prompt, plan)
    assert restarted.ticket.retained_transfer_id == forged.ticket.transfer_id
    assert restarted.done.delta_bytes is None
    expected = OneProcessGenerator(pair.model).generate(prompt, plan=plan, sampling=SAMPLING)
    assert restarted.tokens == [token.token_id for token in expected]
    prompt = prompt + restarted.tokens + [15]
    assert (await pair.turn(prompt, plan)).done.delta_bytes is not None


@pytest.mark.parametrize("bits", ["16", "8"])
async def test_history_that_is_not_stored_as_computed_takes_no_delta(pair: Pair, bits: str) -> None:
    await pair.start_prefill(history_bits=bits)
    await pair.start_decode()
    prompt = some_tokens(pair.model, 100, seed=8)
    first = await pair.turn(prompt, plan_of("full"))
    second = await pair.turn(prompt + first.tokens + [13], plan_of("full"))
    assert second.ticket.retained_transfer_id == first.ticket.transfer_id
    assert second.done.delta_bytes is None


async def test_the_lease_and_a_dropped_session_free_what_is_retained(pair: Pair) -> None:
    await pair.start_decode(retain_s=0.05)
    await pair.turn(some_tokens(pair.model, 80, seed=9), plan_of("full"))
    await until_free(pair)

    await pair.decode.close()
    await pair.start_decode()
    await pair.turn(some_tokens(pair.model, 80, seed=9), plan_of("full"))
    other = SessionKey(owner="another", session_id=SESSION.session_id)
    assert (await pair.decode.drop_session(other, timeout_s=WAIT_S)).size_bytes == 0
    retained = pair.retained_bytes()
    assert (await pair.decode.drop_session(SESSION, timeout_s=WAIT_S)).size_bytes == retained > 0
    assert pair.decode.arena.free_bytes == ARENA_BYTES


async def test_a_turn_given_up_leaves_the_former_selection_and_none_of_its_own(pair: Pair) -> None:
    await pair.start_decode()
    plan, prompt = plan_of("full"), some_tokens(pair.model, 100, seed=12)
    first = await pair.turn(prompt, plan)
    retained = pair.retained_bytes()
    prompt = prompt + first.tokens + [13]
    stream = pair.decode.generate(
        GenerateRequest(
            request_id="given-up",
            model_fingerprint=pair.model.spec.fingerprint,
            prompt_token_ids=tuple(prompt),
            plan=plan,
            sampling=SAMPLING,
            store_history=True,
            session=SESSION,
        ),
        timeout_s=WAIT_S,
    )
    issued = await anext(stream)
    assert isinstance(issued, TicketIssued)
    assert issued.ticket.retained_transfer_id == first.ticket.transfer_id
    await stream.aclose()
    assert pair.retained_bytes() == retained == ARENA_BYTES - pair.decode.arena.free_bytes
    assert (await pair.turn(prompt, plan)).done.delta_bytes is not None


async def until_free(pair: Pair) -> None:
    await eventually(
        lambda: pair.decode.arena.free_bytes == pair.decode.arena.size_bytes,
        what=pair.decode.arena.bytes_by_state,
    )
