"""The history store: every session's full KV at one prefill worker, in host memory, addressed by token ids.

    begin ──► staged turn: load(layer), append(layer)... while the prompt runs
                       │   append(layer) of the generated KV that decode returns
                       └─► commit: the session's new record  |  abort, lease: dropped

Place in the request's path: the prefill engine begins a staged turn (`turn.py`) before a prompt's pass, and
the router's commit publishes it. Nobody else sees a staged turn's rows before that. The committed records are
in `records.py`; `tiered.py` puts Redis behind this store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypedDict

from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.history.records import RecordTable, StoredRecord
from kvferry.shared.history.rows import RowPrecision
from kvferry.shared.history.turn import StagedTurn, TurnContext, TurnState, record_info


class StoreOptions(TypedDict):
    """Arguments of `HistoryStore`."""

    max_bytes: int
    num_layers: int
    turn_lease_s: float
    clock: Callable[[], float]
    precision: RowPrecision | None
    on_miss: Callable[[str], None]


class HistoryStore:
    """All sessions' history at one worker. Thread-safe: one lock, which is not held while KV is copied.

        begin ──► staged turn (its own rows, references on the reused pieces)
                    │ commit                            drop, abort, lease
                    ▼                                          ▼
        sessions: key ──► record ──► pieces ──► segments     freed at once
                  (least recently used first)

    A session whose prompt starts as another session of the same owner did continues from that session's KV.
    Whole segments are shared; a slice is copied, so that no session keeps rows alive that only another one
    uses. Sessions of two owners share nothing.

    Every byte is counted once: staged rows, and each segment for as long as a record or a turn names it,
    whole even if only a slice of it is used. Above `max_bytes` whole sessions are evicted, least recently
    used first, but none that has an open turn. A turn that still finds no room goes on without staging, and
    its commit publishes the reused prefix alone.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        num_layers: int,
        turn_lease_s: float,
        clock: Callable[[], float],
        precision: RowPrecision | None = None,
        on_miss: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Args:
        max_bytes: limit on `size_bytes`.
        turn_lease_s: a turn that nothing was appended to for this long is dropped by `sweep`.
        clock: monotonic seconds.
        precision: how rows are stored; None: as they come.
        on_miss: called with a reason if a session that has had turns has no record here.
        """
        self._on_miss = on_miss
        self._records = RecordTable(max_bytes=max_bytes)
        self._lock = self._records.lock
        self._context = TurnContext(
            records=self._records,
            num_layers=num_layers,
            precision=precision or RowPrecision(),
            lease_s=turn_lease_s,
            clock=clock,
        )

    @property
    def size_bytes(self) -> int:
        """Host memory in use."""
        return self._records.size_bytes

    @property
    def max_bytes(self) -> int:
        """Limit on `size_bytes`."""
        return self._records.max_bytes

    @property
    def tier_bytes(self) -> dict[str, Callable[[], int]]:
        """Functions that return the bytes in each tier: "memory", "redis"."""
        return {"memory": lambda: self.size_bytes}

    def record(self, session: SessionKey) -> StoredRecord | None:
        """The session's committed record."""
        with self._lock:
            return self._records.get(session)

    def begin(
        self,
        session: SessionKey,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        *,
        method: str = "",
        document: SessionKey | None = None,
        num_observed: int | None = None,
        has_history: bool = False,
    ) -> StagedTurn:
        """Begin a staged turn that continues from the longest prefix of the prompt that is stored, but runs
        at least the prompt's last token, which gives the logits. A request that begins again aborts its
        former turn.

        Args:
            method: the turn's compression method, stored with the record in Redis.
            document: a record of the same owner that may be continued from as if it were the session's own.
            num_observed: how many of the prompt's last tokens must be run if another session's record is
                continued from, so that the method observes the same queries; None: other sessions' records
                are not used.
            has_history: whether the session has had turns; if nothing is stored for it, that is counted as a
                miss.

        Raises: InvalidRequest: the prompt is empty, another session's turn has this request id, or the
        document
            belongs to another owner.
        """
        if not prompt_token_ids:
            raise InvalidRequest("the prompt has 0 tokens; it must have at least 1")
        if document is not None and document.owner != session.owner:
            raise InvalidRequest("the document belongs to another owner")
        with self._lock:
            former = self._context.turns.get(request_id)
            if former is not None and former.session != session:
                raise InvalidRequest(f"request id {request_id!r} is in use by another session's turn")
            if former is not None:
                former.abort()
            found = self._records.find(session, prompt_token_ids, document, num_observed)
            turn = StagedTurn(self._context, session, request_id, prompt_token_ids, found)
        if has_history and turn.is_first:
            self._on_miss("absent")
        return turn

    def turn(self, request_id: str) -> StagedTurn | None:
        """The turn that this request began, until it is committed, aborted or expired."""
        with self._lock:
            return self._context.turns.get(request_id)

    def info(self, session: SessionKey) -> HistoryInfo:
        """What is stored for the session; tier "none" if nothing is."""
        return record_info(self.record(session))

    def drop(self, session: SessionKey) -> HistoryInfo:
        """Delete the session's history; returns what was stored. Its open turns will not commit:
        SessionNotFound."""
        with self._lock:
            info = record_info(self._records.get(session))
            self._records.forget(session)
            for turn in self._context.turns.values():
                if turn.session == session and turn.is_open:
                    turn.end(TurnState.DROPPED)
            return info

    def evict(self, session: SessionKey) -> None:
        """Remove a session's record. Unlike `drop` its open turns go on, but they will not commit."""
        with self._lock:
            self._records.forget(session)

    @contextmanager
    def pinned(self, session: SessionKey) -> Iterator[StoredRecord | None]:
        """The session's record, whose rows are not freed before the block ends."""
        with self._lock:
            record = self._records.get(session)
            self._records.retain(record.pieces if record is not None else ())
        try:
            yield record
        finally:
            with self._lock:
                self._records.release(record.pieces if record is not None else ())

    def sweep(self) -> int:
        """Drop turns whose lease has expired; returns how many. Called periodically."""
        with self._lock:
            now_s = self._context.clock()
            expired = [turn for turn in self._context.turns.values() if turn.deadline_s <= now_s]
            for turn in expired:
                turn.end(TurnState.EXPIRED)
            return len(expired)

    def close(self) -> None:
        """Finish pending writes, in bounded time. Idempotent."""
