"""Sharing between an owner's sessions in the memory store: what is found, what is kept, whose it may be.

Rows encode layer, token and position, so that a wrong row anywhere is a wrong value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtest.history import LAYERS, TOKEN_BYTES, assert_loaded, stage

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.history.records import BLOCK_TOKENS, common_prefix
from kvferry.shared.history.store import HistoryStore

A = SessionKey(owner="key-a", session_id="a")
B = SessionKey(owner="key-a", session_id="b")
C = SessionKey(owner="key-a", session_id="c")
OTHER = SessionKey(owner="key-b", session_id="a")
DOCUMENT = SessionKey(owner="key-a", session_id="document/d")
SYSTEM = tuple(range(1, 2 * BLOCK_TOKENS + 6))
"""Two blocks and five tokens."""


def make_store(max_tokens: int = 10_000) -> HistoryStore:
    return HistoryStore(
        max_bytes=max_tokens * TOKEN_BYTES, num_layers=LAYERS, turn_lease_s=60.0, clock=lambda: 0.0
    )


def run_turn(
    store: HistoryStore,
    session: SessionKey,
    prompt: tuple[int, ...],
    generated: tuple[int, ...] = (),
    *,
    num_observed: int | None = 1,
    document: SessionKey | None = None,
) -> int:
    """A whole turn; returns how many tokens it reused, whose rows are checked."""
    request_id = f"{session.session_id}-{len(prompt)}"
    turn = store.begin(session, request_id, prompt, num_observed=num_observed, document=document)
    reused = turn.reused_tokens
    for layer in range(LAYERS):
        assert_loaded(turn, layer, prompt[:reused])
    stage(turn, prompt[reused:], reused)
    stage(turn, generated[:-1], len(prompt))
    turn.commit(prompt + generated)
    return reused


def test_a_new_session_continues_from_another_ones_system_prompt() -> None:
    store = make_store()
    assert run_turn(store, A, (*SYSTEM, 900, 901)) == 0
    assert run_turn(store, B, (*SYSTEM, 800, 801, 802)) == len(SYSTEM)
    turn = store.begin(C, "c", (*SYSTEM, 700), num_observed=1)
    assert turn.reuse_source == "prefix"
    assert run_turn(store, B, (*SYSTEM, 800, 801, 802, 803)) == len(SYSTEM) + 3


def test_nothing_is_found_for_another_owner() -> None:
    store = make_store()
    run_turn(store, A, (*SYSTEM, 900))
    assert run_turn(store, OTHER, (*SYSTEM, 900, 901)) == 0
    with pytest.raises(InvalidRequest, match="another owner"):
        store.begin(OTHER, "r", SYSTEM, document=A)


def test_less_than_a_block_is_not_shared_and_neither_is_anything_unasked() -> None:
    store = make_store()
    run_turn(store, A, SYSTEM)
    assert run_turn(store, B, (*SYSTEM[: BLOCK_TOKENS - 1], 900, 901)) == 0
    assert run_turn(store, C, (*SYSTEM, 900), num_observed=None) == 0


def test_the_tokens_that_a_method_observes_are_run() -> None:
    store = make_store()
    run_turn(store, A, (*SYSTEM, 900))
    assert run_turn(store, B, (*SYSTEM, 901), num_observed=8) == len(SYSTEM) + 1 - 8
    assert run_turn(store, C, SYSTEM, num_observed=len(SYSTEM)) == 0


def test_rows_that_follow_generated_ones_are_the_sessions_own() -> None:
    store = make_store()
    conversation = (*SYSTEM, 500, 501)
    run_turn(store, A, SYSTEM, (500, 501, 502))
    assert run_turn(store, B, (*conversation, 502, 600)) == len(SYSTEM)
    store.drop(B)  # which ran them itself
    second = (*conversation, 502, *range(1000, 1000 + BLOCK_TOKENS))
    assert run_turn(store, A, second) == len(conversation)
    assert run_turn(store, C, (*second, 7)) == len(SYSTEM)


def test_a_shared_slice_does_not_keep_the_other_sessions_rows() -> None:
    store = make_store()
    run_turn(store, A, (*SYSTEM, *range(500, 600)))
    run_turn(store, B, (*SYSTEM, 700))
    assert store.size_bytes == (2 * len(SYSTEM) + 100 + 1) * TOKEN_BYTES
    store.drop(A)
    assert store.size_bytes == (len(SYSTEM) + 1) * TOKEN_BYTES
    assert run_turn(store, B, (*SYSTEM, 700, 701)) == len(SYSTEM) + 1
    store.drop(B)
    assert store.size_bytes == 0


def test_a_document_is_held_once_and_outlives_its_own_record() -> None:
    store = make_store()
    run_turn(store, DOCUMENT, SYSTEM)
    for session, question in ((A, 900), (B, 901), (C, 902)):
        prompt = (*SYSTEM, question)
        assert run_turn(store, session, prompt, num_observed=None, document=DOCUMENT) == len(SYSTEM)
    assert store.size_bytes == (len(SYSTEM) + 3) * TOKEN_BYTES
    store.drop(DOCUMENT)
    assert store.size_bytes == (len(SYSTEM) + 3) * TOKEN_BYTES
    assert run_turn(store, A, (*SYSTEM, 900, 5, 6)) == len(SYSTEM) + 1
    for session in (A, B, C):
        store.drop(session)
    assert store.size_bytes == 0


def test_eviction_counts_shared_segments_once() -> None:
    room = len(SYSTEM) + 8
    store = make_store(room)
    run_turn(store, DOCUMENT, SYSTEM)
    for session, question in ((A, 900), (B, 901)):
        run_turn(store, session, (*SYSTEM, question), document=DOCUMENT, num_observed=None)
    reader = store.begin(DOCUMENT, "reads", (*SYSTEM, 1))
    # Evicting both sessions frees two tokens, which is too little, so that neither goes.
    turn = store.begin(OTHER, "r", tuple(range(40)))
    stage(turn, tuple(range(40)), 0)
    assert store.size_bytes == (len(SYSTEM) + 2) * TOKEN_BYTES
    turn.abort()
    reader.abort()
    assert run_turn(store, OTHER, tuple(range(5000, 5000 + room))) == 0
    assert store.size_bytes == room * TOKEN_BYTES
    # What was evicted is not found any more.
    store.drop(OTHER)
    assert run_turn(store, C, (*SYSTEM, 1)) == 0


def test_a_copy_without_room_is_left_out() -> None:
    store = make_store(len(SYSTEM) + 20)
    run_turn(store, A, (*SYSTEM, 900))
    holder = store.begin(A, "holds-a", (*SYSTEM, 900, 1))
    turn = store.begin(B, "b", (*SYSTEM, 901), num_observed=1)
    stage(turn, (901,), len(SYSTEM))
    assert turn.commit((*SYSTEM, 901)).num_tokens == 0
    holder.abort()
    assert store.size_bytes == (len(SYSTEM) + 1) * TOKEN_BYTES


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    length = common_prefix(tuple(a), tuple(b))
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


@given(st.data())
def test_random_conversations_load_right_rows_and_return_every_byte(data: st.DataObject) -> None:
    """`run_turn` compares every reused row with what it must be."""
    store = make_store(data.draw(st.integers(50, 500), label="room"))
    sessions = [A, B, C, OTHER]
    stems = [SYSTEM, SYSTEM[:BLOCK_TOKENS], (*SYSTEM[:40], *range(300, 340))]
    for step in range(data.draw(st.integers(1, 12), label="steps")):
        session = data.draw(st.sampled_from(sessions))
        if data.draw(st.integers(0, 5)) == 0:
            store.drop(session)
            continue
        tail = tuple(data.draw(st.lists(st.integers(600, 602), min_size=1, max_size=4)))
        # An earlier conversation goes on, or a stem is branched from. Tests' rows follow from tokens alone.
        record = store.record(session)
        begin = record.token_ids if record and data.draw(st.booleans()) else data.draw(st.sampled_from(stems))
        run_turn(store, session, (*begin, *tail), (700 + step,) * data.draw(st.integers(0, 3)))
    for session in sessions:
        store.drop(session)
    assert store.size_bytes == 0
    assert not store.records._prefixes._records
