"""Which checkpoints a record keeps, and which of them a prompt can be continued from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.history.checkpoints import MAX_TURN_ENDS, longest, thinned
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.turn import StagedTurn

STATE_LAYERS = (0, 2)
STATE_BYTES = 2 * 6 * 4
ROW_BYTES = 2 * 4 * 4


@dataclass(frozen=True)
class At:
    num_tokens: int
    ends_turn: bool


def test_the_longest_checkpoint_within_a_limit_is_found() -> None:
    every = [At(7, False), At(12, True), At(30, False)]
    assert [longest(every, limit) for limit in (0, 6, 7, 11, 12, 29, 30, 99)] == [0, 0, 7, 7, 12, 12, 30, 30]
    assert longest([], 9) == 0


def test_a_record_keeps_the_ends_of_its_last_turns_and_of_its_last_prompt() -> None:
    every = [At(10 * i + 5 * ends, bool(ends)) for i in range(1, 13) for ends in (0, 1)]
    kept = thinned(reversed(every))
    assert [checkpoint.num_tokens for checkpoint in kept if checkpoint.ends_turn] == [
        10 * i + 5 for i in range(13 - MAX_TURN_ENDS, 13)
    ]
    assert [checkpoint.num_tokens for checkpoint in kept if not checkpoint.ends_turn] == [120]
    assert list(kept) == sorted(kept, key=lambda checkpoint: checkpoint.num_tokens)
    # and that from which other sessions may continue
    exact = thinned(every, num_exact=19)
    assert set(exact) - set(kept) == {At(15, True)}


def make_store(*, max_bytes: int = 1 << 20, has_rows: bool = True) -> HistoryStore:
    return HistoryStore(
        max_bytes=max_bytes,
        num_layers=int(has_rows),
        num_states=len(STATE_LAYERS),
        turn_lease_s=60.0,
        clock=itertools.count().__next__,
    )


def state(number: float) -> dict[str, torch.Tensor]:
    return {"conv_0": torch.full((2, 3), number)}


def rows(num_tokens: int) -> torch.Tensor:
    return torch.ones(1, num_tokens, 4)


def session(name: str, owner: str = "o") -> SessionKey:
    return SessionKey(owner=owner, session_id=name)


def run(turn: StagedTurn, prompt: list[int], new: list[int], *, has_rows: bool = True) -> None:
    """As prefill and decode do it. States are told from one another by their number of tokens."""
    start, end, whole = turn.reused_tokens, len(prompt), len(prompt) + len(new)
    for first, last in ((start, end), (end, whole)):
        if has_rows:
            turn.append(0, rows(last - first), rows(last - first))
        for layer in STATE_LAYERS:
            turn.append_state(layer, state(last + layer / 10), last)
    turn.commit((*prompt, *new))


def test_a_session_continues_from_its_longest_checkpoint_with_that_ones_states() -> None:
    store, prompt, new = make_store(), list(range(40)), [90, 91, 92]
    run(store.begin(session("a"), "r0", tuple(prompt)), prompt, new)
    assert store.size_bytes == 43 * ROW_BYTES + 2 * STATE_BYTES
    for tokens, reused in (
        ([*prompt, *new, 7], 43),
        ([*prompt, *new], 40),  # its last token must be run
        ([*prompt, 90, 5, 5], 40),
        ([*prompt[:39], 5, 5], 0),
        (prompt, 0),
    ):
        turn = store.begin(session("a"), "r1", tuple(tokens))
        assert turn.reused_tokens == reused
        loaded = turn.load_state(2)
        if reused:
            assert loaded is not None
            assert torch.equal(loaded["conv_0"], state(reused + 0.2)["conv_0"])
            keys_values = turn.load(0)
            assert keys_values is not None
            assert keys_values[0].shape[1] == reused
        else:
            assert loaded is None
        turn.abort()
    assert store.size_bytes == 43 * ROW_BYTES + 2 * STATE_BYTES
    store.drop(session("a"))
    assert store.size_bytes == 0


def test_a_branch_drops_the_checkpoints_after_it_and_counts_every_byte() -> None:
    store, prompt = make_store(), list(range(40))
    run(store.begin(session("a"), "r0", tuple(prompt)), prompt, [90, 91, 92])
    longer = [*prompt, 90, 91, 92, 50, 51]
    run(store.begin(session("a"), "r1", tuple(longer)), longer, [93])
    record = store.record(session("a"))
    assert record is not None
    # the first prompt's end is still exact, so that other sessions may continue from it
    assert [checkpoint.num_tokens for checkpoint in record.checkpoints] == [40, 43, 45, 46]
    branch = [*prompt, 90, 91, 92, 60]
    turn = store.begin(session("a"), "r2", tuple(branch))
    assert turn.reused_tokens == 43
    run(turn, branch, [94])
    record = store.record(session("a"))
    assert record is not None
    assert [checkpoint.num_tokens for checkpoint in record.checkpoints] == [40, 43, 44, 45]
    # whole segments of both branches' common turn, and the new one's
    assert store.size_bytes == (43 + 2) * ROW_BYTES + 4 * STATE_BYTES
    store.drop(session("a"))
    assert store.size_bytes == 0


def test_states_that_did_not_all_arrive_are_no_checkpoint() -> None:
    store, prompt = make_store(), list(range(40))
    turn = store.begin(session("a"), "r0", tuple(prompt))
    turn.append(0, rows(40), rows(40))
    for layer in STATE_LAYERS:
        turn.append_state(layer, state(1), 40)
    turn.append(0, rows(3), rows(3))
    turn.append_state(0, state(2), 43)
    turn.commit((*prompt, 90, 91, 92))
    assert store.begin(session("a"), "r1", (*prompt, 90, 91, 92, 1)).reused_tokens == 40


def test_other_sessions_of_the_owner_continue_from_a_prompts_end_even_if_another_shares_more() -> None:
    store, prompt = make_store(), list(range(100, 164))
    run(store.begin(session("a"), "r0", tuple(prompt)), prompt, [90])
    near = [*prompt, *range(200, 264)]  # shares more, and its checkpoint is after what it shares
    run(store.begin(session("b", owner="other"), "r1", tuple(near)), near, [91])
    run(store.begin(session("b"), "r2", tuple(near), num_observed=1), near, [91])
    wanted = (*near[:120], 1, 2, 3)
    turn = store.begin(session("c"), "r3", wanted, num_observed=1)
    assert (turn.reused_tokens, turn.reuse_source) == (64, "prefix")
    assert store.begin(session("d"), "r4", wanted).reused_tokens == 0
    assert store.begin(session("d", owner="third"), "r5", wanted, num_observed=1).reused_tokens == 0


def test_a_model_without_rows_has_checkpoints_alone() -> None:
    store, prompt = make_store(has_rows=False), list(range(40))
    run(store.begin(session("a"), "r0", tuple(prompt)), prompt, [90, 91], has_rows=False)
    assert store.info(session("a")).num_tokens == 42
    assert store.size_bytes == 2 * STATE_BYTES
    longer = [*prompt, 90, 91, 5]
    turn = store.begin(session("a"), "r1", tuple(longer))
    assert turn.reused_tokens == 42
    run(turn, longer, [92], has_rows=False)
    assert store.info(session("a")).num_tokens == 44


def test_states_make_room_and_overflow_like_rows() -> None:
    prompt = list(range(40))
    whole = 43 * ROW_BYTES + 2 * STATE_BYTES
    store = make_store(max_bytes=2 * whole)
    for name in "abc":
        run(store.begin(session(name), name, tuple(prompt)), prompt, [90, 91, 92])
        assert store.size_bytes <= 2 * whole
    assert store.record(session("a")) is None
    assert store.record(session("c")) is not None
    store = make_store(max_bytes=whole - 1)
    run(store.begin(session("a"), "r0", tuple(prompt)), prompt, [90, 91, 92])
    assert store.size_bytes == 0
    assert store.record(session("a")) is None
