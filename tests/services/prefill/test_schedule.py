"""Which waiting prompt runs next, which one overtakes, and that nobody waits for ever."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.services.prefill.schedule import LEAST_ADVANTAGE, MAX_STARTED, SPARE_S, Schedule

SLICE_S = 0.05
"""Between two operations of a pass."""


@dataclass(eq=False)
class Job:
    """What the schedule needs of a job, and what became of it. A unit of work takes a second."""

    owner: str
    work: float
    comes_s: float = 0.0
    method: str = "full"
    priority: int = 0
    begun_s: float | None = None
    ended_s: float | None = None
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.work

    def __repr__(self) -> str:
        return f"{self.owner}:{self.work:g}"


def schedule_of(*jobs: Job, timed: bool = True) -> Any:
    """A schedule with these jobs. Args: timed: it knows that a unit of work takes a second."""
    schedule: Any = Schedule()
    if timed:
        schedule.push(Job("", 1.0))
        schedule.start_next(0.0)
        schedule.finish(1.0, is_whole=True)
    for job in jobs:
        schedule.push(job)
    return schedule


def drain(schedule: Any) -> list[str]:
    """The owners in the order in which their jobs start, one after another."""
    owners = []
    while (started := schedule.start_next(0.0)) is not None:
        owners.append(started.job.owner)
        schedule.finish(0.0, is_whole=False)
    return owners


def simulate(jobs: list[Job], schedule: Any) -> list[Job]:
    """Run the jobs as the engine does, a slice at a time. Returns: the jobs in the order of their starts."""
    coming = deque(sorted(jobs, key=lambda job: job.comes_s))
    now_s, order = 0.0, []
    while coming or len(schedule) or schedule.started:
        while coming and coming[0].comes_s <= now_s:
            schedule.push(coming.popleft())
        if not schedule.started:
            started = schedule.start_next(now_s)
            if started is None:
                now_s = coming[0].comes_s
                continue
        else:
            below = schedule.started[-1]
            started = schedule.overtake(now_s)
            if started is not None:
                is_shorter = started.job.work * LEAST_ADVANTAGE <= below.job.left + 1e-6
                is_of_another = started.job.owner != below.job.owner and started.job.work <= below.job.work
                assert is_shorter or (is_of_another and len(schedule.started) == 2)
        if started is not None:
            started.job.begun_s = now_s
            order.append(started.job)
        assert len(schedule.started) <= MAX_STARTED
        running = schedule.started[-1]
        step_s = min(SLICE_S, running.job.left)
        now_s += step_s
        running.job.left -= step_s
        running.fraction = 1 - running.job.left / running.job.work
        if running.job.left <= 1e-9:
            running.job.ended_s = now_s
            schedule.finish(now_s, is_whole=True)
    return order


def test_owners_take_turns_and_keep_their_own_order() -> None:
    jobs = [Job(owner, 1.0) for owner in "aaabcc"]
    assert drain(schedule_of(*jobs)) == list("abcaca")


def test_an_owners_prompts_run_by_priority_and_then_as_they_came() -> None:
    priorities = {"p": 0, "q": 5, "r": 0, "s": -3, "t": 5}
    jobs = [Job("a", 1.0, priority=priority, method=name) for name, priority in priorities.items()]
    schedule = schedule_of(Job("b", 1.0), *jobs, Job("b", 1.0, priority=9))
    started = []
    while (running := schedule.start_next(0.0)) is not None:
        started.append(running.job.method if running.job.owner == "a" else "b")
        schedule.finish(0.0, is_whole=False)
    assert started == ["b", "s", "b", "p", "r", "q", "t"]


def test_an_owner_that_comes_back_goes_to_the_end_of_the_round() -> None:
    schedule = schedule_of(Job("a", 1.0), Job("b", 1.0))
    assert schedule.start_next(0.0).job.owner == "a"
    schedule.finish(0.0, is_whole=False)
    schedule.push(Job("a", 1.0))
    assert drain(schedule) == ["b", "a"]


def test_what_is_left_is_of_all_that_are_in_mid_pass() -> None:
    assert schedule_of(Job("a", 8.0), timed=False).left_s == 0
    schedule = schedule_of(Job("a", 8.0))
    assert schedule.left_s == 0
    schedule.start_next(1.0).fraction = 0.25
    schedule.push(Job("a", 2.0))
    assert schedule.left_s == 6
    schedule.overtake(3.0)
    assert schedule.left_s == 8


def test_a_withdrawn_job_is_skipped_and_leaves_no_owner_behind() -> None:
    a, b = Job("a", 1.0), Job("b", 1.0)
    schedule = schedule_of(a, b)
    assert schedule.remove(a)
    assert not schedule.remove(a)
    assert not schedule.remove(Job("b", 1.0))
    assert len(schedule) == 1
    assert drain(schedule) == ["b"]
    assert not schedule.has_waiting


def test_nothing_starts_where_nothing_waits() -> None:
    schedule = schedule_of()
    assert schedule.start_next(0.0) is None
    schedule.push(Job("a", 9.0))
    assert schedule.start_next(0.0) is not None
    assert schedule.overtake(0.0) is None


@pytest.mark.covering(1)
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(("work", "overtakes"), [(4.0, True), (6.0, False)])
def test_only_a_much_shorter_prompt_overtakes(work: float, overtakes: bool, timed: bool) -> None:
    schedule = schedule_of(Job("a", 40.0), timed=timed)
    running = schedule.start_next(1.0)
    running.fraction = 0.75  # 10 are left
    schedule.push(Job("a", work))
    assert (schedule.overtake(31.0) is not None) == overtakes


def test_an_owners_shortest_prompt_overtakes_and_owners_take_turns() -> None:
    schedule = schedule_of(Job("z", 100.0))
    schedule.start_next(1.0)
    for owner, work in (("a", 3.0), ("a", 1.0), ("b", 4.0), ("b", 2.0)):
        schedule.push(Job(owner, work))
    order = []
    now_s = 51.0
    while (started := schedule.overtake(now_s)) is not None:
        order.append(repr(started.job))
        now_s += started.job.work
        schedule.finish(now_s, is_whole=True)
    assert order == ["a:1", "b:2", "a:3", "b:4"]


def test_a_methods_own_speed_counts() -> None:
    schedule = schedule_of()
    schedule.push(Job("a", 1.0, method="slow"))
    schedule.start_next(1.0)
    schedule.finish(21.0, is_whole=True)
    schedule.push(Job("a", 10.0))
    schedule.push(Job("a", 1.0, method="slow"))
    schedule.start_next(21.0)
    assert schedule.overtake(25.0) is None
    schedule.push(Job("a", 1.0))
    assert schedule.overtake(25.0).job.method == "full"


def test_an_ended_pass_that_was_not_whole_tells_no_speed() -> None:
    schedule = schedule_of(timed=False)
    for work in (100.0, 10.0):
        schedule.push(Job("a", work))
    schedule.start_next(0.0)
    schedule.finish(1.0, is_whole=False)
    assert schedule.start_next(1.0).job.work == 10.0
    # A speed of 100 a second would let the running one wait for 0.1 s.
    schedule.push(Job("a", 5.0))
    assert schedule.overtake(1.0) is not None


WORK = st.sampled_from([0.1, 0.2, 0.5, 1.0, 3.0, 8.0, 20.0])
JOBS = st.lists(st.builds(Job, st.sampled_from("abc"), WORK, st.floats(0, 30)), min_size=1, max_size=40)


@given(JOBS)
def test_every_prompt_finishes_and_within_twice_its_time_once_started(jobs: list[Job]) -> None:
    order = simulate(jobs, schedule_of())
    assert sorted(map(repr, order)) == sorted(map(repr, jobs))
    for job in jobs:
        assert job.begun_s is not None
        assert job.ended_s is not None
        # Each prompt that overtakes may take a slice more than estimated.
        waits_s = max(job.work, SPARE_S)
        assert job.ended_s - job.begun_s <= job.work + waits_s + MAX_STARTED * SLICE_S
    assert max(job.ended_s or 0.0 for job in jobs) <= sum(job.work for job in jobs) + 30.0 + 1e-6


@given(st.floats(0.5, 3.0), st.sampled_from([0.2, 0.5, 1.0]), st.booleans())
def test_a_long_prompt_in_a_steady_stream_of_short_ones_finishes_within_twice_its_time(
    load: float, short: float, other_owner: bool
) -> None:
    """Short prompts come at `load` times the rate at which they could be run."""
    long = Job("a", 20.0, comes_s=1.0)
    shorts = [
        Job("b" if other_owner else "a", short, comes_s=n * short / load) for n in range(int(60 / short))
    ]
    simulate([long, *shorts], schedule_of())
    assert long.begun_s is not None
    assert long.ended_s is not None
    assert long.ended_s - long.begun_s <= 2 * long.work + SLICE_S
    # It comes to the front after those that came before it, or in its owner's turn.
    before = sum(job.work for job in shorts if job.comes_s <= 1.0)
    assert long.begun_s <= 1.0 + before + 2 * short


@given(st.integers(2, 12), st.integers(2, 12))
def test_owners_share_the_right_to_overtake(num_a: int, num_b: int) -> None:
    shorts = [Job("a", 0.5) for _ in range(num_a)] + [Job("b", 0.5) for _ in range(num_b)]
    order = simulate([Job("z", 100.0), *shorts], schedule_of())
    owners = [job.owner for job in order if job.owner != "z"]
    both = 2 * min(num_a, num_b)
    counts = [owners[:n].count("a") - owners[:n].count("b") for n in range(both + 1)]
    assert max(map(abs, counts)) <= 1


@given(JOBS)
def test_short_prompts_do_not_wait_for_a_long_one_while_it_has_patience(jobs: list[Job]) -> None:
    """One long prompt with short ones that together take less than its head start: each is next at once."""
    shorts = [job for job in jobs if job.work <= 0.5][:8]
    long = Job("z", 40.0)
    simulate([long, *shorts], schedule_of())
    for job in shorts:
        queue = sum(other.work for other in shorts if other is not job)
        assert job.ended_s is not None
        if job.ended_s <= (long.ended_s or 0.0):
            assert job.ended_s - job.comes_s <= job.work + queue + (len(shorts) + 1) * SLICE_S


@pytest.mark.covering(1)
@pytest.mark.parametrize(("pass_s", "times"), [(0.07, 1.05), (0.2, 1.05), (0.4, 1.25), (1.0, 1.4)])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_a_key_that_floods_the_line_moves_anothers_times_little(
    share: float, pass_s: float, times: float
) -> None:
    """The polite key asks at random for this share of the worker, at most half of its fair share; the noisy
    one always has twenty waiting prompts of the same length. Times are of the schedule alone."""
    rng = random.Random(4)
    comes_s = list(itertools.accumulate(rng.expovariate(share / pass_s) for _ in range(1000)))

    def quantiles(num_noisy: int) -> list[float]:
        schedule, now_s, noisy = schedule_of(), 1.0, 0
        coming = deque(Job("polite", pass_s, comes_s=1.0 + arrival_s) for arrival_s in comes_s)
        first_s: list[float] = []
        while len(first_s) < len(comes_s):
            while coming and coming[0].comes_s <= now_s:
                schedule.push(coming.popleft())
            while noisy < num_noisy:
                schedule.push(Job("noisy", pass_s))
                noisy += 1
            started = schedule.overtake(now_s) if schedule.started else schedule.start_next(now_s)
            if not schedule.started:
                now_s = coming[0].comes_s
                continue
            assert started is None or len(schedule.started) == 1 or started.job.owner == "polite"
            running = schedule.started[-1]
            step_s = min(pass_s / 20, running.job.left)
            now_s += step_s
            running.job.left -= step_s
            running.fraction = 1 - running.job.left / running.job.work
            if running.job.left > 1e-9:
                continue
            schedule.finish(now_s, is_whole=True)
            if running.job.owner == "polite":
                first_s.append(now_s - running.job.comes_s)
            else:
                noisy -= 1
        return statistics.quantiles(first_s, n=20)

    alone, beside = quantiles(num_noisy=0), quantiles(num_noisy=20)
    assert beside[9] <= 1.05 * alone[9]
    assert beside[-1] <= times * alone[-1]


def test_keys_that_both_ask_for_more_do_not_interrupt_each_other() -> None:
    """With equal prompts and equal shares none overtakes, after the first turns."""
    schedule, now_s, overtakes = schedule_of(), 1.0, []
    for _ in range(40):
        schedule.push(Job("a", 1.0))
        schedule.push(Job("b", 1.0))
    while len(schedule) or schedule.started:
        started = schedule.overtake(now_s) if schedule.started else schedule.start_next(now_s)
        if len(schedule.started) > 1 and started is not None:
            overtakes.append(now_s)
        running = schedule.started[-1]
        running.job.left -= 0.1
        running.fraction = 1 - running.job.left / running.job.work
        now_s += 0.1
        if running.job.left <= 1e-9:
            schedule.finish(now_s, is_whole=True)
    assert len(overtakes) <= 2


def test_a_key_that_floods_the_line_still_gets_what_nobody_else_asks_for() -> None:
    """Two keys that both ask for more than there is get half each, however much the first has had before."""
    schedule, now_s = schedule_of(*[Job("first", 1.0) for _ in range(40)]), 1.0
    order = []
    for index in range(80):
        if index == 20:
            for _ in range(60):
                schedule.push(Job("second", 1.0))
        order.append(schedule.start_next(now_s).job.owner)
        now_s += 1.0
        schedule.finish(now_s, is_whole=True)
    assert order[:20] == ["first"] * 20
    late = order[20:30]
    assert late.count("second") >= 5
    assert 9 <= order[40:60].count("first") <= 11
