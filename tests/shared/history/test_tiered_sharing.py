"""Prefixes and documents that an owner's sessions share, with Redis behind host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.shared.control.messages import SessionKey

if TYPE_CHECKING:
    from kvtest.history import Worker

A = SessionKey(owner="key-a", session_id="a")
B = SessionKey(owner="key-a", session_id="b")
C = SessionKey(owner="key-a", session_id="c")
DOCUMENT = SessionKey(owner="key-a", session_id="document/d")
SYSTEM = tuple(range(1, 76))


def test_a_session_that_began_with_anothers_prefix_is_whole_in_redis(
    make_worker: Callable[..., Worker], redis_server: Any
) -> None:
    first = make_worker()
    assert first.turn(A, (*SYSTEM, 900, 901), num_observed=1) == 0
    assert first.turn(B, (*SYSTEM, 800, 801, 802), (5, 6), num_observed=1) == len(SYSTEM)
    first.store.drop(A)
    second = make_worker()
    turn = second.begin(B, (*SYSTEM, 800, 801, 802, 5, 6, 7), num_observed=1)
    assert turn.reused_by_tier == {"memory": 0, "redis": len(SYSTEM) + 4}
    assert second.run(turn, (*SYSTEM, 800, 801, 802, 5, 6, 7), lambda layer: None) == len(SYSTEM) + 4
    turn.abort()
    assert second.store.info(A).tier == "none"


def test_generated_rows_from_redis_are_not_taken_for_exact(make_worker: Callable[..., Worker]) -> None:
    conversation = (*SYSTEM, 5, 6, 7)
    make_worker().turn(A, SYSTEM, (5, 6, 7))
    worker = make_worker()
    assert worker.turn(A, (*conversation, 8), num_observed=1) == len(SYSTEM) + 2
    # The last rows are decode's, so that no other session continues from them.
    assert worker.turn(B, (*conversation, 9), num_observed=1) == len(SYSTEM)


def test_generated_rows_are_the_sessions_own_wherever_they_are(make_worker: Callable[..., Worker]) -> None:
    conversation = (*SYSTEM, *range(500, 540))
    first = make_worker()
    first.turn(A, SYSTEM, conversation[len(SYSTEM) :])
    stored = len(conversation) - 1
    second = make_worker()
    # Another session has the same tokens, all run by prefill.
    assert second.turn(B, (*conversation, 8), num_observed=1) == 0
    turn = second.begin(A, (*conversation, 9), num_observed=1)
    assert turn.reused_by_tier == {"memory": len(SYSTEM), "redis": stored - len(SYSTEM)}
    assert second.run(turn, (*conversation, 9), lambda layer: None) == stored
    turn.commit((*conversation, 9))
    # Its own record is in this worker's memory now, and C's rows do not replace it either.
    longer = (*conversation, 9, *range(600, 680))
    assert second.turn(C, longer, num_observed=1) == len(conversation)
    assert second.turn(A, (*longer, 10), num_observed=1, document=C) == len(conversation) + 1


@pytest.mark.parametrize("restarted", [False, True])
def test_a_document_is_found_in_memory_and_in_redis(
    restarted: bool, make_worker: Callable[..., Worker]
) -> None:
    first = make_worker()
    first.turn(DOCUMENT, SYSTEM)
    worker = make_worker() if restarted else first
    prompt = (*SYSTEM, 900, 901)
    turn = worker.begin(A, prompt, document=DOCUMENT)
    tier = "redis" if restarted else "memory"
    assert turn.reused_by_tier[tier] == len(SYSTEM)
    assert turn.reuse_source == "document"
    assert worker.run(turn, prompt, lambda layer: None) == len(SYSTEM)
    turn.commit(prompt)
    assert worker.turn(A, (*prompt, 5), document=DOCUMENT) == len(prompt)
    assert worker.turn(C, (*SYSTEM, 800), document=DOCUMENT) == len(SYSTEM)
    assert make_worker().turn(A, (*prompt, 5, 6), document=DOCUMENT) == len(prompt) + 1


def test_an_evicted_record_is_not_found_as_a_prefix(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.turn(A, (*SYSTEM, 900), num_observed=1)
    worker.evict(A)
    assert worker.turn(B, (*SYSTEM, 901), num_observed=1) == 0
    worker.store.drop(B)
    assert worker.store.size_bytes == 0
