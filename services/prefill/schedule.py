"""Which prompt runs next, which one may overtake those that run, and where a running one pauses for it.

The schedule is bookkeeping for the engine: it reads no clock and runs nothing.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch.overrides import TorchFunctionMode

from kvferry.services.prefill.job import PrefillJob

MAX_STARTED = 4
"""The most prompts in mid-pass. The second is at most as long as the first, and each later one at most half
the work that the one below has left, so together they take less memory than three of the longest."""
LEAST_ADVANTAGE = 2.0
"""How many times more work the running prompt must have left than one that overtakes it."""
HEAD_START = 0.25
"""The part of its own time for which a prompt may be kept waiting before it has run at all."""
SPARE_S = 1.0
"""For so long a prompt may be kept waiting by owners that have had less, however short it is."""
LONG_TOKENS, LONG_S = 256, 0.25
"""The pass of a prompt of at least so many tokens, or that takes so long by estimate, can be interrupted. To
look between its operations whether another one overtakes it costs a pass of the demo model 1 ms."""
_OF_LATE_S = 10.0
"""What an owner's prompts ran so long ago counts by 1/e."""
_MAX_SHARES = 4096
_DECAY = 0.8
"""Weight of earlier passes in a method's speed, relative to the last one."""


@dataclass(kw_only=True, eq=False)
class Started:
    """A prompt in mid-pass.

    Attributes:
        begin_s: when it was started.
        resumed_s: since when it has been running; None while it waits for one that overtook it.
        earlier_s: how long it had run before that.
        fraction: how much of its work is done.
    """

    job: PrefillJob
    begin_s: float
    resumed_s: float | None
    earlier_s: float = 0.0
    fraction: float = 0.0

    def ran_s(self, now_s: float) -> float:
        """Return how long it has run, without the time for which it was overtaken."""
        return self.earlier_s + (now_s - self.resumed_s if self.resumed_s is not None else 0.0)

    def waited_s(self, now_s: float) -> float:
        """Return how long it has been overtaken."""
        return now_s - self.begin_s - self.ran_s(now_s)


@dataclass
class _Speed:
    """Seconds per unit of work, over passes that weigh less the older they are."""

    ran_s: float = 0.0
    work: float = 0.0

    def add(self, ran_s: float, work: float) -> None:
        self.ran_s = _DECAY * self.ran_s + ran_s
        self.work = _DECAY * self.work + work


@dataclass(kw_only=True)
class _Share:
    """What one owner has had: for how long its prompts ran, which counts less the longer ago it was.

    Attributes:
        at_s: the time at which `ran_s` was counted.
        last_started: the number of its last prompt that was started, of all owners' prompts.
    """

    at_s: float
    ran_s: float = 0.0
    last_started: int = 0

    def of_late_s(self, now_s: float) -> float:
        return self.ran_s * math.exp((self.at_s - now_s) / _OF_LATE_S)


class Schedule:
    """Waiting prompts in fair order, and those in mid-pass as a stack of which the top one runs.

        push ──► waiting ──start_next──► running ──finish──►
                    │                     │   ▲
                    └─────overtake────────┼───┘  the running one waits below until this one has finished
                                          ▼
                                        waits

    Fair order: the owner is next whose prompts have run least of late, and of equals the one whose last
    prompt was started longest ago. So one that asks for less than its share does not wait behind one that
    asks for more, and two that ask for more take turns. One owner's prompts run by their priority and in the
    order in which they came. A prompt much shorter than what the running one has left overtakes it, in the
    same order of owners, each with its shortest first. So does one that is no longer than the running one, if
    its owner has had less of late than the running one's owner, and would have with it. In return a prompt in
    mid-pass is kept waiting at most for as long as it runs, so it finishes within twice its time: up to then
    it may have waited as long as it has run, and a quarter of its whole time besides; for an owner that has
    had less, its whole time, or a second if that is longer. No owner starves: the others run more the longer
    it waits, and a started prompt finishes.

    Times are estimated from `PrefillJob.work` and each method's measured speed. Not thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[PrefillJob]] = {}
        self._num_started = 0
        self._shares: OrderedDict[str, _Share] = OrderedDict()
        """Of the owners whose prompts were started last, the last one at the end."""
        self._started: list[Started] = []
        self._speeds: dict[str, _Speed] = {"": _Speed()}

    def __len__(self) -> int:
        """Count the waiting prompts."""
        return sum(map(len, self._waiting.values()))

    @property
    def has_waiting(self) -> bool:
        """Any thread may ask."""
        return bool(self._waiting)

    @property
    def started(self) -> tuple[Started, ...]:
        """The prompts in mid-pass; the last one runs."""
        return tuple(self._started)

    @property
    def left_s(self) -> float:
        """The time until those in mid-pass are done and a place is free; 0 before any has been timed."""
        return sum(map(self._left, self._started)) if self._is_timed else 0.0

    def is_long(self, job: PrefillJob) -> bool:
        """Return whether a job's pass can be interrupted. Only the thread that runs prompts may call this."""
        is_slow = self._is_timed and self._estimate(job) >= LONG_S
        return is_slow or job.resolved.num_prompt_tokens >= LONG_TOKENS

    def push(self, job: PrefillJob) -> None:
        insort(self._waiting.setdefault(job.owner, []), job, key=attrgetter("priority"))

    def remove(self, job: PrefillJob) -> bool:
        """Remove a waiting job. Returns False if it is not waiting."""
        jobs = self._waiting.get(job.owner, [])
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._waiting[job.owner]
        return True

    def give_way(self, owner: str) -> PrefillJob | None:
        """Remove and return the last waiting job of the owner that has most, if it has more than `owner`
        would have with one more."""
        most = max(self._waiting.values(), key=len, default=[])
        if len(most) <= len(self._waiting.get(owner, ())) + 1:
            return None
        job = most[-1]
        self.remove(job)
        return job

    def clear(self) -> list[PrefillJob]:
        """Remove all waiting jobs and return them."""
        jobs = [job for queue in self._waiting.values() for job in queue]
        self._waiting.clear()
        return jobs

    def start_next(self, now_s: float) -> Started | None:
        """Start the first job of the fair order; None if none waits. Nothing may be in mid-pass."""
        assert not self._started, "a job is in mid-pass"
        if not self._waiting:
            return None
        return self._start(self._in_turn(now_s)[0][0], now_s)

    def overtake(self, now_s: float) -> Started | None:
        """Start a job that overtakes the running one; None if none may."""
        if not self._waiting or len(self._started) == MAX_STARTED:
            return None
        running = self._started[-1]
        shorter = self._left(running) / LEAST_ADVANTAGE
        longest_s = self._longest_s(now_s)
        for jobs in self._in_turn(now_s):
            job = min(jobs, key=self._estimate)
            estimate, limit, within_s = self._estimate(job), shorter, longest_s
            if self._has_had_less(job, now_s):
                limit = self._estimate(running.job)
                within_s = max(self._whole_s(running, now_s), SPARE_S) - running.waited_s(now_s)
            if estimate <= limit and (not self._is_timed or estimate <= within_s):
                running.earlier_s, running.resumed_s = running.ran_s(now_s), None
                return self._start(job, now_s)
        return None

    def finish(self, now_s: float, *, is_whole: bool) -> None:
        """End the running job; the one that it overtook goes on.

        Args: is_whole: whether it has done all of its work, so that its time tells the method's speed.
        """
        finished = self._started.pop()
        if (share := self._shares.get(finished.job.owner)) is not None:
            share.ran_s, share.at_s = share.of_late_s(now_s) + finished.ran_s(now_s), now_s
        if self._started:
            self._started[-1].resumed_s = now_s
        if is_whole:
            ran_s, job = finished.ran_s(now_s), finished.job
            for name in (job.method, ""):
                self._speeds.setdefault(name, _Speed()).add(ran_s, job.work)

    def _start(self, job: PrefillJob, now_s: float) -> Started:
        self.remove(job)
        self._num_started += 1
        self._shares.setdefault(job.owner, _Share(at_s=now_s)).last_started = self._num_started
        self._shares.move_to_end(job.owner)
        if len(self._shares) > _MAX_SHARES:
            self._shares.popitem(last=False)
        started = Started(job=job, begin_s=now_s, resumed_s=now_s)
        self._started.append(started)
        return started

    def _in_turn(self, now_s: float) -> list[list[PrefillJob]]:
        """Return the waiting prompts of each owner, in fair order."""

        def rank(owner: str) -> tuple[float, int]:
            share = self._shares.get(owner)
            return (0.0, 0) if share is None else (share.of_late_s(now_s), share.last_started)

        return [self._waiting[owner] for owner in sorted(self._waiting, key=rank)]

    def _has_had_less(self, job: PrefillJob, now_s: float) -> bool:
        """Return whether a job may overtake the only prompt in mid-pass because its owner's prompts, itself
        included, ran less of late than those of the running prompt's owner."""
        running = self._started[0]
        if len(self._started) > 1 or job.owner == running.job.owner or not self._is_timed:
            return False
        had_s, others_s = [
            share.of_late_s(now_s) if (share := self._shares.get(owner)) is not None else 0.0
            for owner in (job.owner, running.job.owner)
        ]
        return had_s + self._estimate(job) < others_s + running.ran_s(now_s)

    @property
    def _is_timed(self) -> bool:
        return self._speeds[""].work > 0

    def _estimate(self, job: PrefillJob) -> float:
        """Return the seconds that a job takes alone; units of work before any has been timed."""
        speed = self._speeds.get(job.method, self._speeds[""])
        return job.work * (speed.ran_s / speed.work if speed.work else 1.0)

    def _left(self, started: Started) -> float:
        """Return the part of the estimate that is still to be done."""
        return self._estimate(started.job) * (1 - started.fraction)

    def _whole_s(self, started: Started, now_s: float) -> float:
        """Return the estimate, or how long it has run already if that is longer."""
        return max(self._estimate(started.job), started.ran_s(now_s))

    def _longest_s(self, now_s: float) -> float:
        """Return how long the next to overtake may take so that none in mid-pass waits too long."""
        longest_s, above_s = float("inf"), 0.0
        for started in reversed(self._started):
            ran_s, whole_s = started.ran_s(now_s), self._whole_s(started, now_s)
            patience_s = min(whole_s, ran_s + HEAD_START * whole_s) - started.waited_s(now_s)
            longest_s = min(longest_s, patience_s - above_s)
            above_s += self._left(started)
        return longest_s


class Pauses(TorchFunctionMode):
    """A context in which `pause` is called before each torch operation of this thread, while it is allowed.

    The operations and their results do not change. In `pause` the context is suspended: what runs there is
    not paused, unless it enters another one. An error raised there ends the pass.

    Attributes:
        allowed: set by the code in the context: only where it holds no lock, has selected no other stream,
            and has nothing half done that another pass uses.
    """

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.allowed = False
        self._pause = pause

    def offer(self) -> None:
        """Call `pause` now, where no torch operation follows for long, and where it would be allowed."""
        self._pause()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.allowed:
            self._pause()
        return function(*args, **(kwargs or {}))
