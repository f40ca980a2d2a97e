"""The leading rank: starts the followers, tells them what to run, and notices when one is lost.

    start ──► join ──► load ──► passes ... ──► close
                │        │         │
                └────────┴─────────┴── a follower ends or hangs ──► all are killed, `on_lost`

A lost rank is the worker's end: its part of the weights is gone. Exchanges under way fail then, and later
passes are refused.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import repeat
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import structlog
import torch.distributed as dist

from kvferry.shared.errors import ConfigurationError, InvalidRequest, KvferryError, WorkerUnavailable
from kvferry.shared.model.parallel.passes import RankDecodePass, RankPrefillPass
from kvferry.shared.model.parallel.ranks import Call, Join, Question, Ranks, Word

_log = structlog.get_logger(__name__)

FOLLOWER = "kvferry.shared.model.parallel.follower:FollowingRank"
_PING_INTERVAL_S = 1.0
_HUNG_S = 8.0
"""A follower that has not answered for this long is lost. It also answers while it computes."""
_NAMED_S = 1.0
"""How long a failed exchange waits to be told which rank is lost."""


class _Follower:
    """A follower's process, and this end of its pipes: for commands, for signs of life, and for its notes."""

    def __init__(self, rank: int, follower_class: str) -> None:
        self.rank = rank
        own, theirs = zip(*(Pipe() for _ in range(3)), strict=True)
        self.commands, self.life, self.notes = own
        descriptors = [end.fileno() for end in theirs]
        self.process = subprocess.Popen(
            [
                # without the current folder on the path, because its kernels/ may hide a package
                *(sys.executable, "-P", "-m", "kvferry.shared.model.parallel.follower"),
                *map(str, descriptors),
                follower_class,
            ],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"LOCAL_RANK": str(rank)},
        )
        for end in theirs:
            end.close()


class LeadingRank(Ranks):
    """Rank 0, in the worker's process. Passes are run by one thread at a time; any thread may tell followers
    something else between them, but not while it has a lock that a pass needs.

    Args:
        follower_class: `module:name` of the followers'.
        on_lost: called once, by any thread, when a rank is lost. It should end the process.

    Attributes:
        on_note: called with a follower's rank and what it has noted (`FollowingRank.note`), in order, on a
            thread of its own for each follower; with None when it has ended.
        on_question: called likewise with what it asks (`FollowingRank.ask`); returns the answer.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        backend: str,
        num_threads: int,
        on_lost: Callable[[Exception], None],
        follower_class: str = FOLLOWER,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-ranks-")
        join = Join(
            rank=0,
            num_ranks=num_ranks,
            store=str(Path(self._folder.name) / "store"),
            backend=backend,
            num_threads=num_threads,
        )
        super().__init__(join)
        self._on_lost = on_lost
        self.on_note: Callable[[int, Any], None] = lambda rank, note: None
        self.on_question: Callable[[int, Any], Any] = lambda rank, what: None
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._aside = threading.Lock()
        self._closing = threading.Event()
        self._is_lost = threading.Event()
        self._error: WorkerUnavailable | None = None
        self._is_loaded = False
        self._followers = [_Follower(rank, follower_class) for rank in range(1, num_ranks)]
        for follower in self._followers:
            follower.commands.send(replace(join, rank=follower.rank))
            for what in (self._watch, self._read_notes):
                name = f"kvferry-rank-{follower.rank}{what.__name__}"
                threading.Thread(target=what, args=(follower,), name=name, daemon=True).start()

    def join(self) -> None:
        """Join the group, once all followers have begun to. Raises: WorkerUnavailable: one has ended."""
        self._answers()
        super().join()

    def _tell(self, words: Iterable[object]) -> None:
        """Tell each follower a word: the first one rank 1. Raises: WorkerUnavailable: a rank is lost."""
        if self._error is not None:
            raise self._error
        try:
            with self._telling:
                for follower, word in zip(self._followers, words, strict=False):
                    follower.commands.send(word)
        except OSError as error:
            raise self.fail(error) from error

    def aside(self, word: object) -> None:
        """Tell all followers something that does not wait for the pass that runs; see
        `FollowingRank.take_aside`. Any thread may."""
        with self._aside:
            for follower in self._followers:
                with suppress(OSError):  # it has ended, which is noticed elsewhere
                    follower.notes.send(word)

    def call(self, name: str, *args: Any) -> None:
        """Call a method in all followers; see `FollowingRank.target`. Raises: WorkerUnavailable: a rank is
        lost."""
        self._tell(repeat(Call(name=name, args=args)))

    def call_each(self, name: str, args: Sequence[tuple[Any, ...]]) -> None:
        """Call a method with separate arguments for each follower, rank 1 first; otherwise as `call`."""
        self._tell(Call(name=name, args=of_one) for of_one in args)

    def ask(self, name: str, *args: Any) -> Callable[..., list[Any]]:
        """Call a method in all followers. Returns: a function that waits for the results, rank 1 first, after
        the pass that runs. One thread at a time may ask, until it has the answers.

        It raises ConfigurationError if a rank has raised a KvferryError, and WorkerUnavailable if one is lost
        or has no answer in time. Raises: as `call`.
        """
        self._tell(repeat(Call(name=name, args=args, is_answered=True)))
        return self._answers

    def _answers(self, *, timeout_s: float = math.inf, what: str = "") -> list[Any]:
        """See `ask`. Args: what: the rest of the error, such as " does not load"."""
        found, deadline_s = [], time.monotonic() + timeout_s
        for follower in self._followers:
            try:
                while not follower.commands.poll(_PING_INTERVAL_S):
                    if self._error is not None:
                        raise self._error
                    if time.monotonic() > deadline_s:
                        name = f"rank {follower.rank} of {self.num_ranks}"
                        raise self._lose(f"{name} has given no answer for {timeout_s:g} s")
                found.append(follower.commands.recv())
            except (EOFError, OSError) as error:
                raise self.fail(error) from error
        for rank, answer in enumerate(found, 1):
            if isinstance(answer, KvferryError):
                raise ConfigurationError(f"rank {rank} of {self.num_ranks}{what}: {answer.message}")
        return found

    def loaded(self) -> None:
        self._answers(what=" does not load")
        self.proceed()
        self._is_loaded = True

    def proceed(self) -> None:
        self._tell(repeat(Word.PROCEED))

    @contextmanager
    def running(self, current: RankPrefillPass | RankDecodePass) -> Iterator[None]:
        """Make the context of a pass. An error while the lead is alone ends the pass, any other the worker.

        Raises: WorkerUnavailable: a rank is lost, or the ranks are no longer at the same place.
        """
        try:
            yield
        except BaseException as error:
            if current.is_lead_alone and self._error is None:
                self._tell(repeat(Word.ABORT))
                raise
            if isinstance(error, InvalidRequest) and not current.is_lead_alone:
                raise  # a refusal of the model itself, which all ranks raise
            raise self.fail(error) from error

    def fail(self, error: BaseException) -> WorkerUnavailable:
        """Return the worker's error after a failed exchange: that of the lost rank, if there is one."""
        self._is_lost.wait(_NAMED_S)
        return self._lose(f"ranks are out of step: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the followers, which have nothing to close. Idempotent. No pass may be running."""
        self._closing.set()
        for follower in self._followers:
            follower.process.kill()
            follower.process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    def _watch(self, follower: _Follower) -> None:
        """Watch a follower, on a thread for each: the pipe ends with its process."""
        while not self._closing.is_set():
            try:
                if follower.life.poll(_PING_INTERVAL_S):
                    follower.life.recv_bytes()
                if not self._is_loaded:
                    continue  # imports may take long, in which nothing else runs
                follower.life.send_bytes(b"?")
                if not follower.life.poll(_HUNG_S):
                    self._lose(f"rank {follower.rank} of {self.num_ranks} has not answered for {_HUNG_S:g} s")
                    return
                follower.life.recv_bytes()
            except (EOFError, OSError):
                with suppress(subprocess.TimeoutExpired):
                    follower.process.wait(_NAMED_S)
                code = follower.process.returncode
                self._lose(f"rank {follower.rank} of {self.num_ranks} has ended with exit code {code}")
                return

    def _read_notes(self, follower: _Follower) -> None:
        while True:
            try:
                note = follower.notes.recv()
            except (EOFError, OSError):
                note = None
            try:
                if isinstance(note, Question):
                    answer = self.on_question(follower.rank, note.content)
                    with self._aside:
                        follower.notes.send(replace(note, content=answer))
                else:
                    self.on_note(follower.rank, note)
            except Exception:
                _log.exception("a note of a rank was not taken", rank=follower.rank)
            if note is None:
                return

    def _lose(self, reason: str) -> WorkerUnavailable:
        """Declare the worker lost. Returns: its error: for this reason, unless it was lost before."""
        with self._lock:
            if self._error is not None:
                return self._error
            error = WorkerUnavailable(f"the worker is lost: {reason}", reason="rank_lost")
            if self._closing.is_set():
                return error
            self._error = error
            self._is_lost.set()
        # so that an exchange with a follower that hangs also fails
        for follower in self._followers:
            follower.process.kill()
        if self._is_loaded:
            self._on_lost(error)
        return error
