"""Who gets the engine next."""

from __future__ import annotations

import pytest

from kvferry.services.prefill.queue import FairQueue


def drain(queue: FairQueue[str]) -> list[str]:
    return [queue.pop() for _ in range(len(queue))]


def test_owners_take_turns_and_keep_their_own_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.push(item[0], item)
    assert drain(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_an_owner_that_comes_back_goes_to_the_end_of_the_round() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "a1")
    queue.push("b", "b1")
    assert queue.pop() == "a1"
    queue.push("a", "a2")
    assert drain(queue) == ["b1", "a2"]


def test_a_withdrawn_item_is_skipped_and_leaves_no_owner_behind() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "a1")
    queue.push("b", "b1")
    assert queue.remove("a", "a1")
    assert not queue.remove("a", "a1")
    assert not queue.remove("b", "b2")
    assert len(queue) == 1
    assert drain(queue) == ["b1"]


def test_pop_from_an_empty_queue_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        FairQueue[str]().pop()
