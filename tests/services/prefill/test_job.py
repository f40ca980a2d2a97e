"""Which waiting job gets the engine next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.services.prefill.job import JobQueue


@dataclass(frozen=True)
class Job:
    """What the queue needs of a job."""

    name: str

    @property
    def owner(self) -> str:
        return self.name[0]


def queue_of(*names: str) -> Any:
    queue: Any = JobQueue()
    for name in names:
        queue.push(Job(name))
    return queue


def drain(queue: Any) -> list[str]:
    return [queue.pop().name for _ in range(len(queue))]


def test_owners_take_turns_and_keep_their_own_order() -> None:
    assert drain(queue_of("a1", "a2", "a3", "b1", "c1", "c2")) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_an_owner_that_comes_back_goes_to_the_end_of_the_round() -> None:
    queue = queue_of("a1", "b1")
    assert queue.pop().name == "a1"
    queue.push(Job("a2"))
    assert drain(queue) == ["b1", "a2"]


def test_a_withdrawn_job_is_skipped_and_leaves_no_owner_behind() -> None:
    queue = queue_of("a1", "b1")
    assert queue.remove(Job("a1"))
    assert not queue.remove(Job("a1"))
    assert not queue.remove(Job("b2"))
    assert len(queue) == 1
    assert drain(queue) == ["b1"]


def test_pop_from_an_empty_queue_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        JobQueue().pop()
