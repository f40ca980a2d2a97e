"""One tier of history behind host memory: reads ahead of a turn's pass, writes and deletions behind commits.

    look_up ──► record ──► rows: fetch(layer), one layer ahead of the pass (`rows_ahead.py`)
    commit  ──► queue(session) ──► newest record in memory, record in the storage ──► rows that the storage
                lacks, new record
    drop    ──► queue(session) ──► delete; if the storage does not answer, retried at each sweep

One thread writes and deletes, in order. Several commits of one session that wait together become one write;
rows that wait stay in memory. A record in the storage that is neither the one which the turn began from nor
one that this worker wrote belongs to another worker's turn: the commit is refused, and the session is evicted
from memory here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog

from kvferry.shared.control.messages import HistoryInfo, ReuseSource, SessionKey
from kvferry.shared.errors import HistoryMiss, KvferryError, SessionBusy, StoreUnavailable
from kvferry.shared.history.checkpoints import LayerState, longest
from kvferry.shared.history.records import RecordTable, StoredRecord, common_prefix
from kvferry.shared.history.rows import RowChunk
from kvferry.shared.history.storage import Storage, new_record
from kvferry.shared.history.stored_format import TierRecord

log = structlog.get_logger(__name__)

T = TypeVar("T")

_MAX_REMEMBERED = 65_536
_MAX_WAITING = 64
# The router gives a deletion two seconds; one that takes longer is still done, later.
_DELETE_WAIT_S = 1.5
_CLOSE_TIMEOUT_S = 8.0
_NUM_FETCHERS = 4


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What a committed turn knows about a tier.

    Attributes:
        fence: of the tier's record that it began from; b"" if there was none, None if the tier did not
            answer.
        rebuild: rows that the tier should have had were missing, so that nothing of its record may be reused.
    """

    record: StoredRecord
    fence: bytes | None
    rebuild: bool
    method: str


class BackTier:
    """Thread-safe. Owns the storage and the threads that read and write it.

    Args:
        records: host memory's; its lock guards what waits here.
        turn_timeout_s: how long one turn waits for rows in all.
        commit_timeout_s: how long a commit waits for its write, which then goes on behind it; 0: not at all.
        clock: monotonic seconds.
        on_failure: called with a reason for each commit that the storage did not take.
    """

    def __init__(
        self,
        storage: Storage,
        records: RecordTable,
        *,
        turn_timeout_s: float,
        commit_timeout_s: float,
        clock: Callable[[], float],
        on_failure: Callable[[str], None],
    ) -> None:
        self.storage = storage
        self.name = storage.name
        self.unavailable = f"{self.name}_unavailable"
        self._records = records
        self.turn_timeout_s = turn_timeout_s
        self.clock = clock
        self._commit_timeout_s = commit_timeout_s
        self._on_failure = on_failure
        self._waiting: dict[SessionKey, Commit] = {}
        self._num_writing = 0
        self._fences: OrderedDict[SessionKey, bytes] = OrderedDict()
        self._rebuilds: set[SessionKey] = set()
        self._failed: OrderedDict[SessionKey, Commit] = OrderedDict()
        """The last commit of sessions whose write failed, without its rows."""
        self._deletions: OrderedDict[SessionKey, object] = OrderedDict()
        """The pending ones, each with an object of its own that tells it from a later one of the session."""
        self._writer = ThreadPoolExecutor(1, f"kvferry-history-{self.name}-writer")
        self.fetchers = ThreadPoolExecutor(_NUM_FETCHERS, f"kvferry-history-{self.name}")

    def look_up(self, session: SessionKey) -> tuple[TierRecord | None, str]:
        """Return the session's record, and why there is none although there may be one: "", `unavailable`
        (the tier did not answer), "key" or "corrupt"."""
        with self._records.lock:
            if session in self._deletions:  # it may not be deleted yet
                return None, ""
        try:
            return self.storage.record(session), ""
        except StoreUnavailable as error:
            log.debug("history tier did not answer", tier=self.name, reason=error.reason)
            return None, self.unavailable
        except HistoryMiss as miss:
            log.warning("history record is unusable", tier=self.name, reason=miss.reason, error=miss.message)
            return None, miss.reason

    def info(self, session: SessionKey) -> HistoryInfo:
        """Return what the tier has of a session; tier "none" if nothing."""
        record, _ = self.look_up(session)
        if record is None:
            return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")
        return HistoryInfo(num_tokens=len(record.token_ids), size_bytes=record.size_bytes, tier=self.name)

    def reusable(self, record: TierRecord, prompt: tuple[int, ...], limit: int) -> int:
        """Return how many of the prompt's first `limit` tokens can be continued from."""
        if not self.storage.shape.serves(record):
            return 0
        num_shared = min(common_prefix(record.token_ids, prompt), limit)
        return longest(record.body.checkpoints, num_shared) if self.storage.shape.states else num_shared

    def wrote(self, session: SessionKey) -> bool:
        """Say whether this worker has written the session, and it was not deleted since."""
        with self._records.lock:
            return session in self._fences

    @property
    def num_waiting(self) -> int:
        """The number of committed turns that are not written yet."""
        return len(self._waiting) + self._num_writing

    def write(self, session: SessionKey, commit: Commit) -> Callable[[], None]:
        """Queue a committed turn, whose rows stay in memory until it is written.

        Returns: a function that waits for the write and raises SessionBusy if another worker's turn came
            first. Other failures only call `on_failure`.
        """
        with self._records.lock:
            if commit.rebuild:
                self._rebuilds.add(session)
            if not self._unqueue(session) and len(self._waiting) >= _MAX_WAITING:
                self._note_failed(session, commit, "queue_full")
                return lambda: None
            self._records.retain(commit.record.parts)
            self._waiting[session] = commit
        written = self._writer.submit(self._write, session)
        message = "commit goes on while the history is written"
        return partial(self._wait, written, self._commit_timeout_s, message)

    def delete(self, session: SessionKey) -> Callable[[], None]:
        """Queue a deletion, which is remembered until it is done. Return a function that waits for it."""
        with self._records.lock:
            self._unqueue(session)
            self._fences.pop(session, None)
            self._failed.pop(session, None)
            self._rebuilds.discard(session)
            _remember(self._deletions, session, deletion := object())
        deleted = self._writer.submit(self._delete, session, deletion)
        return partial(self._wait, deleted, _DELETE_WAIT_S, "history will be deleted later")

    def sweep(self) -> None:
        """Queue the pending deletions again, oldest first, until one fails."""
        if self._deletions:
            self._writer.submit(self._delete_all)

    def flush(self, deadline_s: float) -> None:
        """Write what waits, and retry what failed if memory still has it, until `deadline_s` on `clock`."""
        with self._records.lock:
            for session, commit in tuple(self._failed.items()):
                if (record := self._records.get(session)) is None or session in self._waiting:
                    continue
                self._records.retain(record.parts)
                self._waiting[session] = replace(commit, record=record)
                self._writer.submit(self._write, session)
        self._wait(
            self._writer.submit(lambda: None),
            max(0.001, deadline_s - self.clock()),
            "the history of some sessions is not written",
        )

    def close(self) -> None:
        """Wait a bounded time for the queue, then drop the rest. Idempotent."""
        try:
            self._writer.submit(lambda: None).result(_CLOSE_TIMEOUT_S)
        except RuntimeError:
            return  # already closed
        except FutureTimeout:
            log.warning("history not written at shutdown", tier=self.name, waited_s=_CLOSE_TIMEOUT_S)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self.fetchers.shutdown(wait=False, cancel_futures=True)
        self.storage.close()

    def _wait(self, done: Future[T], timeout_s: float, message: str) -> None:
        try:
            if timeout_s:
                done.result(timeout_s)
        except FutureTimeout:
            log.warning(message, tier=self.name, waited_s=timeout_s)

    def _unqueue(self, session: SessionKey) -> bool:
        """Forget a commit that waits, if there is one. The caller holds the lock."""
        commit = self._waiting.pop(session, None)
        if commit is not None:
            self._records.release(commit.record.parts)
        return commit is not None

    def _write(self, session: SessionKey) -> None:
        with self._records.lock:
            commit = self._waiting.pop(session, None)
            if commit is None:
                return  # deleted, or written together with an earlier commit
            # A deletion that comes from now on is one of this commit, too, and waits for the write.
            earlier = self._deletions.get(session)
            self._num_writing = 1
        try:
            if self._delete(session, earlier):
                self._bring(session, commit)
        except SessionBusy:
            with self._records.lock:
                self._records.forget(session)
            self._on_failure("fenced")
            raise
        except KvferryError as error:
            log.warning("history not written", tier=self.name, reason=error.reason, error=error.message)
            self._note_failed(session, commit, error.reason)
        except Exception:
            log.exception("history not written", tier=self.name)
            self._note_failed(session, commit, "internal")
        finally:
            with self._records.lock:
                self._num_writing = 0
                self._records.release(commit.record.parts)

    def _note_failed(self, session: SessionKey, commit: Commit, reason: str) -> None:
        without_rows = replace(commit.record, token_ids=(), pieces=(), checkpoints=())
        with self._records.lock:
            _remember(self._failed, session, replace(commit, record=without_rows))
        self._on_failure(reason)

    def _bring(self, session: SessionKey, commit: Commit) -> None:
        try:
            self._bring_onto(session, commit, self._base(session, commit))
        except HistoryMiss:
            # The base is damaged or partly gone: a whole copy replaces it.
            self.storage.delete(session)
            self._bring_onto(session, commit, None)

    def _base(self, session: SessionKey, commit: Commit) -> TierRecord | None:
        """Return the record in the storage, if the turn may replace it."""
        base = self.storage.record(session)
        with self._records.lock:
            known = {fence for fence in (commit.fence, self._fences.get(session)) if fence is not None}
        if base is not None and known and base.fence not in known:
            raise SessionBusy(f"session {session.session_id!r} was changed by another turn", reason="fenced")
        return base

    def _bring_onto(self, session: SessionKey, commit: Commit, base: TierRecord | None) -> None:
        record = commit.record
        num_base_tokens = 0
        if base is not None and self.storage.shape.serves(base) and session not in self._rebuilds:
            num_base_tokens = common_prefix(base.token_ids, record.token_ids)
        if base is not None and num_base_tokens == len(record.token_ids):
            self.storage.touch(session, base)
            written = base
        else:
            new = new_record(
                session,
                record,
                shape=self.storage.shape,
                base=base,
                num_base_tokens=num_base_tokens,
                method=commit.method,
                value_bytes=self.storage.value_bytes,
            )
            self.storage.write(session, base, new)
            written = new.record
        with self._records.lock:
            self._rebuilds.discard(session)
            self._failed.pop(session, None)
            _remember(self._fences, session, written.fence)

    def _delete(self, session: SessionKey, deletion: object | None) -> bool:
        """Delete the session if this deletion is pending; return whether it no longer is."""
        with self._records.lock:
            if deletion is None or self._deletions.get(session) is not deletion:
                return True
        try:
            self.storage.delete(session)
        except KvferryError as error:
            log.warning("history not deleted yet", tier=self.name, reason=error.reason, error=error.message)
            return False
        with self._records.lock:
            self._fences.pop(session, None)
            if self._deletions.get(session) is deletion:
                del self._deletions[session]
        return True

    def _delete_all(self) -> None:
        with self._records.lock:
            pending = list(self._deletions.items())
        all(self._delete(*each) for each in pending)


def _remember(table: OrderedDict[SessionKey, T], session: SessionKey, value: T) -> None:
    """Add an entry to a table of bounded size; the oldest gives way."""
    table[session] = value
    table.move_to_end(session)
    if len(table) > _MAX_REMEMBERED:
        table.popitem(last=False)


class BackRows:
    """The rows of tokens [start, stop) of a tier's record, and the states after them; nothing is read yet.

    Args: source: whose record it is.

    Attributes:
        tier: its name.
        num_exact_tokens: of the record, from its first token; see `StoredRecord`.
    """

    def __init__(
        self,
        tier: BackTier,
        session: SessionKey,
        record: TierRecord,
        start: int,
        stop: int,
        *,
        source: ReuseSource,
    ) -> None:
        self.num_tokens = stop - start
        self.num_exact_tokens = record.num_exact_tokens
        self.source = source
        self.tier = tier.name
        self._back_tier = tier
        self._session, self._record, self._start, self._stop = session, record, start, stop
        self._entry = next((entry for entry in record.body.checkpoints if entry.num_tokens == stop), None)
        self.ends_turn = self._entry is not None and self._entry.ends_turn
        self._states: Future[dict[int, LayerState]] | None = None
        self._remaining_s = tier.turn_timeout_s

    def fetch(self, layer: int, then: Callable[[list[RowChunk]], T]) -> Future[tuple[list[RowChunk], T]]:
        """Begin to read a layer's rows, and call `then` with them on the thread that has read them."""

        def read() -> tuple[list[RowChunk], T]:
            storage = self._back_tier.storage
            chunks = storage.load(self._session, self._record, layer, self._start, self._stop)
            return chunks, then(chunks)

        return self._back_tier.fetchers.submit(read)

    def load_state(self, layer: int) -> LayerState:
        """Wait for the states, and return one layer's. Raises: as `wait`."""
        assert self._entry is not None, "the model has no states"
        if self._states is None:
            load_states = self._back_tier.storage.load_states
            self._states = self._back_tier.fetchers.submit(load_states, self._session, self._entry)
        return self.wait(self._states, "the states were")[layer]

    def wait(self, fetch: Future[T], what: str) -> T:
        """Wait for what `fetch` began, for as long as the turn may in all.

        Args: what: subject and verb of the error, such as "layer 3 was".
        Raises: HistoryMiss, reason "TIER_slow", "TIER_unavailable", "evicted" or "corrupt".
        """
        clock = self._back_tier.clock
        begin_s = clock()
        try:
            return fetch.result(max(0.0, self._remaining_s))
        except FutureTimeout:
            message = f"{self.tier} was too slow: {what} not read in the time that a turn may wait"
            raise HistoryMiss(message, reason=f"{self.tier}_slow") from None
        except StoreUnavailable as error:
            raise HistoryMiss(error.message, reason=self._back_tier.unavailable) from error
        finally:
            self._remaining_s -= clock() - begin_s
