"""The memory store: what a session sees, turn by turn. Rows encode their token and position, so that a
wrong row anywhere is a wrong value."""

from __future__ import annotations

import pytest
import torch
from kvtest.clock import Clock
from kvtest.history import DIM, HEADS, LAYERS, TOKEN_BYTES, assert_loaded, rows, stage

from kvferry.shared.control.messages import IMPLICIT_PREFIX, HistoryInfo, SessionKey
from kvferry.shared.errors import HistoryMiss, InvalidRequest, SessionBusy, SessionNotFound
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.turn import StagedTurn

A = SessionKey(owner="key-a", session_id="s")
B = SessionKey(owner="key-b", session_id="s")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> HistoryStore:
    return make_store(clock)


def make_store(clock: Clock, max_tokens: int = 1000) -> HistoryStore:
    return HistoryStore(max_bytes=max_tokens * TOKEN_BYTES, num_layers=LAYERS, turn_lease_s=60.0, clock=clock)


def run_turn(
    store: HistoryStore,
    session: SessionKey,
    request_id: str,
    prompt: tuple[int, ...],
    generated: tuple[int, ...] = (),
    *,
    pinned: bool = False,
) -> HistoryInfo:
    """A whole turn: prefill what is new, return the generated rows (the last token has none), commit."""
    turn = store.begin(session, request_id, prompt)
    stage(turn, prompt[turn.reused_tokens :], turn.reused_tokens)
    stage(turn, generated[:-1], len(prompt))
    return turn.commit(prompt + generated, pinned=pinned)


def assert_loads(turn: StagedTurn, tokens: tuple[int, ...]) -> None:
    assert turn.reused_tokens == len(tokens)
    for layer in range(LAYERS):
        assert_loaded(turn, layer, tokens)


def test_a_session_that_has_had_turns_and_is_not_there_is_a_miss(clock: Clock) -> None:
    misses: list[str] = []
    store = HistoryStore(
        max_bytes=1000 * TOKEN_BYTES,
        num_layers=LAYERS,
        turn_lease_s=60.0,
        clock=clock,
        on_miss=misses.append,
    )
    store.begin(A, "r1", (1, 2)).abort()
    assert misses == []
    store.begin(A, "r2", (1, 2), has_history=True).abort()
    assert misses == ["absent"]
    run_turn(store, A, "r3", (1, 2))
    # an edited first message: the history is there and of no use
    store.begin(A, "r4", (3, 2), has_history=True).abort()
    assert misses == ["absent"]


def test_a_new_session_reuses_nothing(store: HistoryStore) -> None:
    assert_loads(store.begin(A, "r", (1, 2, 3)), ())
    assert store.info(A) == HistoryInfo(num_tokens=0, size_bytes=0, tier="none")


def test_the_next_turn_continues_from_prompt_and_completion_less_the_last_token(
    store: HistoryStore,
) -> None:
    info = run_turn(store, A, "r1", (1, 2, 3), (4, 5, 6))
    assert info == HistoryInfo(num_tokens=5, size_bytes=5 * TOKEN_BYTES)
    assert store.info(A) == info
    assert_loads(store.begin(A, "r2", (1, 2, 3, 4, 5, 6, 7)), (1, 2, 3, 4, 5))


def test_reuse_is_capped_at_one_less_than_the_prompt(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3), (4, 5))
    assert_loads(store.begin(A, "r2", (1, 2, 3, 4)), (1, 2, 3))
    assert_loads(store.begin(A, "r3", (1,)), ())


def test_an_edited_conversation_keeps_the_common_prefix_without_copying(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3, 4), (5, 6))
    turn = store.begin(A, "r2", (1, 2, 9, 9, 9))
    assert_loads(turn, (1, 2))
    before = store.size_bytes
    first, second = turn.load(0), turn.load(0)
    assert first is not None
    assert second is not None
    assert first[0].data_ptr() == second[0].data_ptr()
    stage(turn, (9, 9, 9), 2)
    turn.commit((1, 2, 9, 9, 9))
    # The old segment stays whole under its slice; the old record's tail is no longer named.
    assert store.size_bytes == before + 3 * TOKEN_BYTES
    assert_loads(store.begin(A, "r3", (1, 2, 9, 9, 9, 7)), (1, 2, 9, 9, 9))


def test_a_segment_is_freed_when_no_record_names_it(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3, 4))
    run_turn(store, A, "r2", (7, 8))
    assert store.size_bytes == 2 * TOKEN_BYTES


def test_rows_beyond_the_committed_tokens_are_trimmed_and_freed(store: HistoryStore) -> None:
    turn = store.begin(A, "r1", (1, 2, 3))
    stage(turn, (1, 2, 3), 0)
    stage(turn, (4, 5, 6, 7), 3)
    assert turn.commit((1, 2, 3, 4, 5)).num_tokens == 5
    assert store.size_bytes == 5 * TOKEN_BYTES
    assert_loads(store.begin(A, "r2", (1, 2, 3, 4, 5, 6)), (1, 2, 3, 4, 5))


def test_tokens_beyond_the_staged_rows_are_ignored(store: HistoryStore) -> None:
    turn = store.begin(A, "r1", (1, 2, 3))
    stage(turn, (1, 2, 3), 0)
    turn.append(0, rows(0, (4,), 3), rows(0, (4,), 3))
    # Layer 0 alone has token 4: no layer's rows count until all layers have them.
    assert turn.commit((1, 2, 3, 4, 5)).num_tokens == 3
    assert store.size_bytes == 3 * TOKEN_BYTES


def test_a_commit_of_part_of_the_prompt_is_possible(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3, 4))
    turn = store.begin(A, "r2", (1, 2, 3, 4, 5))
    stage(turn, (5,), 4)
    assert turn.commit((1, 2)).num_tokens == 2
    assert_loads(store.begin(A, "r3", (1, 2, 3)), (1, 2))


def test_a_commit_that_contradicts_the_prompt_is_refused_and_changes_nothing(
    store: HistoryStore,
) -> None:
    run_turn(store, A, "r1", (1, 2, 3))
    before = store.size_bytes
    turn = store.begin(A, "r2", (1, 2, 3, 4))
    stage(turn, (4,), 3)
    with pytest.raises(InvalidRequest):
        turn.commit((1, 2, 9, 4))
    assert store.size_bytes == before
    assert store.info(A).num_tokens == 3


def test_staged_rows_are_copies_seen_by_nobody_before_commit(store: HistoryStore) -> None:
    turn = store.begin(A, "r1", (1, 2))
    for layer in range(LAYERS):
        kv = rows(layer, (1, 2), 0)
        values = -kv
        turn.append(layer, kv, values)
        kv.fill_(float("nan"))
        values.fill_(float("nan"))
    assert store.info(A).num_tokens == 0
    assert_loads(store.begin(A, "r2", (1, 2, 3)), ())
    turn.commit((1, 2))
    assert_loads(store.begin(A, "r3", (1, 2, 3)), (1, 2))


def test_abort_gives_every_byte_back_and_is_idempotent(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3))
    before = store.size_bytes
    turn = store.begin(A, "r2", (1, 2, 3, 4, 5))
    stage(turn, (4, 5), 3)
    assert store.size_bytes == before + 2 * TOKEN_BYTES
    turn.abort()
    turn.abort()
    stage(turn, (4, 5), 3)
    assert store.size_bytes == before
    assert store.turn("r2") is None
    with pytest.raises(HistoryMiss):
        turn.commit((1, 2, 3, 4, 5))
    assert_loads(store.begin(A, "r3", (1, 2, 3, 4)), (1, 2, 3))


def test_abort_after_commit_changes_nothing(store: HistoryStore) -> None:
    turn = store.begin(A, "r1", (1, 2))
    stage(turn, (1, 2), 0)
    turn.commit((1, 2))
    turn.abort()
    assert store.info(A).num_tokens == 2
    with pytest.raises(HistoryMiss, match="committed"):
        turn.append(0, rows(0, (3,), 2), rows(0, (3,), 2))


def test_the_first_of_two_turns_to_commit_wins(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2))
    first, second = store.begin(A, "r2", (1, 2, 3)), store.begin(A, "r3", (1, 2, 4))
    stage(first, (3,), 2)
    stage(second, (4,), 2)
    first.commit((1, 2, 3))
    with pytest.raises(SessionBusy):
        second.commit((1, 2, 4))
    assert store.size_bytes == 3 * TOKEN_BYTES
    record = store.record(A)
    assert record is not None
    assert record.token_ids == (1, 2, 3)


def test_two_first_turns_are_fenced_too(store: HistoryStore) -> None:
    first, second = store.begin(A, "r1", (1,)), store.begin(A, "r2", (2,))
    stage(first, (1,), 0)
    stage(second, (2,), 0)
    first.commit((1,))
    with pytest.raises(SessionBusy):
        second.commit((2,))


def test_a_drop_during_a_turn_wins(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3))
    turn = store.begin(A, "r2", (1, 2, 3, 4))
    stage(turn, (4,), 3)
    assert store.drop(A) == HistoryInfo(num_tokens=3, size_bytes=3 * TOKEN_BYTES)
    assert store.size_bytes == 0
    with pytest.raises(HistoryMiss, match="dropped"):
        turn.load(0)
    stage(turn, (5,), 4)
    with pytest.raises(SessionNotFound):
        turn.commit((1, 2, 3, 4, 5))
    assert store.size_bytes == 0
    assert store.info(A).tier == "none"
    assert store.turn("r2") is None


def test_nothing_is_remembered_of_a_session_that_is_gone(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3))
    store.begin(A, "r2", (1, 2, 3, 4)).abort()
    dropped = store.begin(A, "r3", (1, 2, 3, 4))
    store.drop(A)
    with pytest.raises(SessionNotFound):
        dropped.commit((1, 2, 3, 4))
    assert not store.turns
    containers = [
        container for container in vars(store.records).values() if isinstance(container, dict | set)
    ]
    assert store.records.busy in containers
    assert not any(A in container for container in containers)


def test_a_drop_during_a_first_turn_wins(store: HistoryStore) -> None:
    turn = store.begin(A, "r1", (1, 2))
    stage(turn, (1, 2), 0)
    assert store.drop(A).num_tokens == 0
    with pytest.raises(SessionNotFound):
        turn.commit((1, 2))
    assert store.size_bytes == 0


def test_a_restarted_turn_stages_everything_and_commits(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3))
    turn = store.begin(A, "r2", (1, 2, 3, 4))
    stage(turn, (4,), 3)
    turn.restart()
    assert_loads(turn, ())
    stage(turn, (1, 2, 3, 4), 0)
    turn.commit((1, 2, 3, 4))
    assert store.size_bytes == 4 * TOKEN_BYTES
    assert_loads(store.begin(A, "r3", (1, 2, 3, 4, 5)), (1, 2, 3, 4))


def test_a_restart_after_a_drop_does_not_bring_the_session_back(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3))
    turn = store.begin(A, "r2", (1, 2, 3, 4))
    store.drop(A)
    turn.restart()
    stage(turn, (1, 2, 3, 4), 0)
    with pytest.raises(SessionNotFound):
        turn.commit((1, 2, 3, 4))
    assert store.size_bytes == 0


def test_the_lease_frees_an_abandoned_turn(store: HistoryStore, clock: Clock) -> None:
    turn = store.begin(A, "r1", (1, 2))
    clock.turn(59)
    stage(turn, (1, 2), 0)
    clock.turn(59)
    assert store.sweep() == 0
    clock.turn(1)
    assert store.sweep() == 1
    assert store.size_bytes == 0
    assert store.turn("r1") is None
    with pytest.raises(HistoryMiss, match="expired"):
        turn.commit((1, 2))


def test_a_request_that_begins_again_gives_up_its_former_turn(store: HistoryStore) -> None:
    former = store.begin(A, "r1", (1, 2))
    stage(former, (1, 2), 0)
    turn = store.begin(A, "r1", (1, 2))
    assert store.size_bytes == 0
    former.abort()
    assert store.turn("r1") is not None
    stage(turn, (1, 2), 0)
    turn.commit((1, 2))
    assert store.info(A).num_tokens == 2


def test_another_sessions_request_id_is_refused(store: HistoryStore) -> None:
    store.begin(A, "r1", (1,))
    with pytest.raises(InvalidRequest, match="r1"):
        store.begin(B, "r1", (1,))


def test_sessions_of_two_owners_share_nothing(store: HistoryStore) -> None:
    run_turn(store, A, "r1", (1, 2, 3))
    assert_loads(store.begin(B, "r2", (1, 2, 3, 4)), ())
    store.drop(B)
    assert store.info(A).num_tokens == 3


def test_the_least_recently_used_idle_session_is_evicted_whole(clock: Clock) -> None:
    store = make_store(clock, max_tokens=10)
    keys = [SessionKey(owner="", session_id=str(i)) for i in range(4)]
    for i in range(3):
        run_turn(store, keys[i], f"r{i}", (1, 2, 3))
    # Session 0 is used again; session 1 has a turn under way; 2 is the one to go.
    store.begin(keys[0], "again", (1, 2)).abort()
    busy = store.begin(keys[1], "busy", (1, 2, 3, 4))
    run_turn(store, keys[3], "r3", (5, 6, 7))
    assert [store.info(key).num_tokens for key in keys] == [3, 3, 0, 3]
    assert store.size_bytes == 9 * TOKEN_BYTES
    assert_loads(busy, (1, 2, 3))


def test_prompts_without_a_session_make_room_before_any_session(clock: Clock) -> None:
    store = make_store(clock, max_tokens=10)
    keys = [SessionKey(owner="", session_id=name) for name in ("s", f"{IMPLICIT_PREFIX}0", "t")]
    for number, key in enumerate(keys):
        run_turn(store, key, f"r{number}", (1, 2, 3))
    run_turn(store, A, "new", (5, 6, 7))
    assert [store.info(key).num_tokens for key in keys] == [3, 0, 3]


def test_pinned_sessions_are_the_last_to_make_room(clock: Clock) -> None:
    store = make_store(clock, max_tokens=12)
    keys = [SessionKey(owner=owner, session_id=str(i)) for i, owner in enumerate("abbb")]
    for i, key in enumerate(keys):
        run_turn(store, key, f"r{i}", (1, 2, 3), pinned=i == 0)
    run_turn(store, A, "r4", (5, 6, 7, 8))
    assert [store.info(key).num_tokens for key in keys] == [3, 0, 0, 3]
    run_turn(store, A, "r5", tuple(range(12)))
    assert [store.info(key).num_tokens for key in keys] == [0, 0, 0, 0]


def test_an_owner_can_pin_a_quarter_of_the_memory(clock: Clock) -> None:
    store = make_store(clock, max_tokens=12)
    keys = [SessionKey(owner=owner, session_id=str(i)) for i, owner in enumerate("aaab")]
    for i, key in enumerate(keys):
        run_turn(store, key, f"r{i}", (1, 2, 3), pinned=i < 3)
    run_turn(store, B, "new", (5, 6, 7))
    assert [store.info(key).num_tokens for key in keys] == [0, 3, 3, 3]
    run_turn(store, A, "newer", (5, 6, 7, 8, 9, 10))
    assert [store.info(key).num_tokens for key in keys] == [0, 0, 3, 0]


def test_a_turn_without_room_leaves_the_base_and_other_sessions_alone(clock: Clock) -> None:
    store = make_store(clock, max_tokens=6)
    run_turn(store, A, "r1", (1, 2, 3))
    busy = store.begin(A, "r2", (1, 2, 3, 4, 5, 6, 7, 8))
    stage(busy, (4, 5, 6, 7, 8), 3)
    assert_loads(busy, (1, 2, 3))
    assert busy.commit((1, 2, 3, 4, 5, 6, 7, 8)).num_tokens == 3
    assert store.size_bytes == 3 * TOKEN_BYTES
    # A first turn that can never fit publishes nothing.
    turn = store.begin(B, "r3", (1,) * 20)
    stage(turn, (1,) * 20, 0)
    assert turn.commit((1,) * 20) == HistoryInfo(num_tokens=0, size_bytes=0, tier="none")


def test_an_empty_prompt_is_refused(store: HistoryStore) -> None:
    with pytest.raises(InvalidRequest):
        store.begin(A, "r1", ())


def test_half_precision_and_strided_rows_are_kept_exactly(store: HistoryStore) -> None:
    turn = store.begin(A, "r1", (1, 2, 3))
    source = torch.randn(3, HEADS, DIM).to(torch.bfloat16)
    for layer in range(LAYERS):
        turn.append(layer, source.transpose(0, 1), source.transpose(0, 1))
    turn.commit((1, 2, 3))
    loaded = store.begin(A, "r2", (1, 2, 3, 4)).load(1)
    assert loaded is not None
    assert loaded[0].dtype == torch.bfloat16
    assert torch.equal(loaded[0], source.transpose(0, 1))
