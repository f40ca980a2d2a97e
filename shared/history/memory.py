"""The history store in host memory: every session's full KV at one prefill worker.

Place in the request's path: the prefill engine begins a staged turn (`turn.py`) before a prompt's pass, and
the router's commit ends it. The committed records are in `records.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.history.precision import RowPrecision
from kvferry.shared.history.records import RecordTable, StoredRecord
from kvferry.shared.history.turn import StagedTurn, TurnContext, TurnState, record_info


class MemoryHistoryStore:
    """Implements `HistoryStore`. One lock, which is not held while KV is copied in or out.

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
        return self._records.size_bytes

    @property
    def max_bytes(self) -> int:
        return self._records.max_bytes

    @property
    def tier_bytes(self) -> dict[str, Callable[[], int]]:
        """See `HistoryStore.tier_bytes`."""
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
        """See `HistoryStore.begin`."""
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
        """See `HistoryStore.turn`."""
        with self._lock:
            return self._context.turns.get(request_id)

    def info(self, session: SessionKey) -> HistoryInfo:
        """See `HistoryStore.info`."""
        return record_info(self.record(session))

    def drop(self, session: SessionKey) -> HistoryInfo:
        """See `HistoryStore.drop`."""
        with self._lock:
            info = self.info(session)
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
        """See `HistoryStore.sweep`."""
        with self._lock:
            now_s = self._context.clock()
            expired = [turn for turn in self._context.turns.values() if turn.deadline_s <= now_s]
            for turn in expired:
                turn.end(TurnState.EXPIRED)
            return len(expired)

    def close(self) -> None:
        """See `HistoryStore.close`: nothing is pending."""
