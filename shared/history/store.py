"""The history store: every session's full KV at one prefill worker, addressed by token ids.

    begin ──► staged turn: load(layer), append(layer)... while the prompt runs
                       │   append(layer) of the generated KV that decode returns
                       └─► commit: the session's new record  |  abort, lease: dropped

Place in the request's path: the prefill engine begins a staged turn (`turn.py`) before a prompt's pass, and
the router's commit publishes it. Nobody else sees a staged turn's rows before that. Host memory is the first
tier (`records.py`); the tiers behind it (`back_tier.py`) outlive the worker:

    begin    the tier whose record shares the longest prefix with the prompt is continued from
    load     rows from memory; those that it lacks from a tier behind it, and into memory
    commit   memory first, then the tiers behind it

A tier that is dead, slow, empty or damaged costs a turn a bounded wait and its stored rows, but does not fail
it: `load` raises HistoryMiss, and the prompt is run from its token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvferry.shared.control.messages import HistoryInfo, ReuseSource, SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.history.back_tier import BackRows, BackTier
from kvferry.shared.history.records import RecordTable, StoredRecord
from kvferry.shared.history.rows import RowPrecision
from kvferry.shared.history.storage import Storage
from kvferry.shared.history.stored_format import TierRecord
from kvferry.shared.history.turn import StagedTurn, TurnState, record_info

_NUM_READERS = 2


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

    Every byte is counted once: what is staged, and each segment and each checkpoint's states for as long as a
    record or a turn names them, a segment whole even if only a slice of it is used. Above `max_bytes` whole
    sessions are evicted, least recently used first, but none that has an open turn; rows that wait to be
    written to another tier stay until they are. A turn that still finds no room goes on without staging, and
    its commit publishes the reused prefix alone.

    Attributes:
        turns: staged turns that are not yet committed, aborted or expired, by request id. Guarded by
            `records.lock`.
        readers: threads that make rows in memory ready.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        num_layers: int,
        num_states: int = 0,
        turn_lease_s: float,
        clock: Callable[[], float],
        precision: RowPrecision | None = None,
        on_miss: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Begin without history.

        Args:
            max_bytes: limit on `size_bytes`.
            num_layers: layers with rows, which are numbered without the others.
            num_states: layers with a state. If there are any, sessions are continued from checkpoints.
            turn_lease_s: a turn is dropped by `sweep` if for this long nothing was appended to it, and
                nothing was heard of its router.
            clock: monotonic seconds.
            precision: how rows are stored; None: as they come.
            on_miss: called with a reason if a session that has had turns is in no tier, and once if a tier
                that may have it did not answer or has a damaged record. Misses during `load` are raised.
        """
        self.records = RecordTable(max_bytes=max_bytes, has_states=num_states > 0)
        self.turns: dict[str, StagedTurn] = {}
        self.num_layers = num_layers
        self.num_states = num_states
        self.precision = precision or RowPrecision()
        self.turn_lease_s = turn_lease_s
        self.clock = clock
        self._on_miss = on_miss
        self._tiers: list[BackTier] = []
        self.readers = ThreadPoolExecutor(_NUM_READERS, "kvferry-history-memory")

    def add_tier(
        self,
        storage: Storage,
        *,
        turn_timeout_s: float,
        commit_timeout_s: float,
        on_failure: Callable[[str], None],
    ) -> None:
        """Add a tier behind the present ones, before the first turn. The store closes it. Arguments as in
        `BackTier`."""
        self._tiers.append(
            BackTier(
                storage,
                self.records,
                turn_timeout_s=turn_timeout_s,
                commit_timeout_s=commit_timeout_s,
                clock=self.clock,
                on_failure=on_failure,
            )
        )

    @property
    def size_bytes(self) -> int:
        """Host memory in use."""
        return self.records.size_bytes

    @property
    def max_bytes(self) -> int:
        """Limit on `size_bytes`."""
        return self.records.max_bytes

    @property
    def tier_bytes(self) -> dict[str, Callable[[], int]]:
        """Functions that return the bytes in each tier, by its name; those behind memory as of this worker's
        last write or deletion there, of all workers' sessions."""
        behind = {tier.name: partial(getattr, tier.storage, "size_bytes") for tier in self._tiers}
        return {"memory": lambda: self.size_bytes, **behind}

    @property
    def tier_waiting(self) -> dict[str, Callable[[], int]]:
        """Functions that return how many committed turns are not written to each tier behind memory yet."""
        return {tier.name: partial(getattr, tier, "num_waiting") for tier in self._tiers}

    def record(self, session: SessionKey) -> StoredRecord | None:
        """Return the session's committed record in memory."""
        with self.records.lock:
            return self.records.get(session)

    def num_reusable(self, session: SessionKey, prompt_token_ids: tuple[int, ...]) -> int:
        """Return how many of the prompt's first tokens can be reused from the session's record in memory."""
        with self.records.lock:
            return self.records.num_reusable(session, prompt_token_ids)

    def num_shared(self, owner: str, block_hashes: Sequence[int]) -> int:
        """Say how many of a prompt's first tokens memory has for an owner; see `RecordTable.num_shared`."""
        with self.records.lock:
            return self.records.num_shared(owner, block_hashes)

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
        max_reused_tokens: int | None = None,
    ) -> StagedTurn:
        """Begin a staged turn that continues from the longest prefix of the prompt that is stored, but runs
        at least the prompt's last token, which gives the logits. A request that begins again aborts its
        former turn.

        Args:
            method: the turn's compression method, stored with the record behind memory.
            document: a record of the same owner that may be continued from as if it were the session's own.
            num_observed: how many of the prompt's last tokens must be run if another session's record is
                continued from, so that the method observes the same queries; None: other sessions' records
                are not used. They are looked up in memory only.
            has_history: whether the session has had turns; if nothing is stored for it, that is counted as a
                miss.
            max_reused_tokens: continue from at most so many tokens; None: from all that are stored.

        Raises: InvalidRequest: the prompt is empty, another session's turn has this request id, or the
            document belongs to another owner.
        """
        if not prompt_token_ids:
            raise InvalidRequest("the prompt has 0 tokens; it must have at least 1")
        if document is not None and document.owner != session.owner:
            raise InvalidRequest("the document belongs to another owner")
        limit = len(prompt_token_ids) - 1
        limit = limit if max_reused_tokens is None else min(limit, max_reused_tokens)
        with self.records.lock:
            former = self.turns.get(request_id)
            if former is not None and former.session != session:
                raise InvalidRequest(f"request id {request_id!r} is in use by another session's turn")
            if former is not None:
                former.abort()
            found = self.records.find(session, prompt_token_ids, document, num_observed, limit)
            turn = StagedTurn(self, session, request_id, prompt_token_ids, found)
        tiers = [] if session.is_implicit else self._tiers
        looked_up = [(tier, *tier.look_up(session)) for tier in tiers]
        if turn.is_first and not any(record for _, record, _ in looked_up):
            problems = [problem for _, _, problem in looked_up if problem]
            if problems:
                self._on_miss(problems[0])
            elif any(tier.wrote(session) for tier in self._tiers):
                self._on_miss("evicted")
            elif has_history:
                self._on_miss("absent")
        answered = {tier: record for tier, record, problem in looked_up if problem != tier.unavailable}
        candidates = [(tier, session, record) for tier, record in answered.items()]
        for tier, record in answered.items():
            if record is None:
                continue
            if tier.reusable(record, prompt_token_ids, limit) > record.num_exact_tokens:
                # KV of generated tokens is always the session's own.
                turn.keep_own(record.num_exact_tokens)
                document = None
        if document is not None and turn.reuse_source != "document":
            candidates += [(tier, document, tier.look_up(document)[0]) for tier in answered]
        fences: dict[BackTier, bytes | None] = dict.fromkeys(tiers)
        fences |= {tier: record.fence if record is not None else b"" for tier, record in answered.items()}
        turn.attach(self._longest_prefix(turn, prompt_token_ids, candidates, limit), fences, method)
        return turn

    def turn(self, request_id: str) -> StagedTurn | None:
        """Return the turn that this request began, until it is committed, aborted or expired."""
        with self.records.lock:
            return self.turns.get(request_id)

    def info(self, session: SessionKey) -> HistoryInfo:
        """Return what the first tier that has the session stores of it; tier "none" if none has it."""
        info = record_info(self.record(session))
        for tier in self._tiers:
            if not info.num_tokens:
                info = tier.info(session)
        return info

    def drop(self, session: SessionKey) -> HistoryInfo:
        """Delete the session's history; return what was stored. Its open turns will not commit:
        SessionNotFound. A tier that does not answer deletes its part when it does."""
        info = self.info(session)
        with self.records.lock:
            self.records.forget(session)
            for turn in self.turns.values():
                if turn.session == session and turn.is_open:
                    turn.end(TurnState.DROPPED)
        for wait in [tier.delete(session) for tier in self._tiers if not session.is_implicit]:
            wait()
        return info

    def extend_leases(self, router: str) -> None:
        """Extend the leases of a router's turns, because it lives."""
        with self.records.lock:
            for turn in self.turns.values():
                if turn.router == router:
                    turn.extend_lease()

    def sweep(self) -> int:
        """Drop turns whose lease has expired; return how many. Retry deletions that a tier has not taken yet.
        Called periodically."""
        for tier in self._tiers:
            tier.sweep()
        with self.records.lock:
            now_s = self.clock()
            expired = [turn for turn in self.turns.values() if turn.deadline_s <= now_s]
            for turn in expired:
                turn.end(TurnState.EXPIRED)
            return len(expired)

    def write_behind(self, timeout_s: float) -> int:
        """Write what only memory has of sessions to the tiers behind it, in bounded time; what a tier did not
        take before is tried again. Return how many sessions are in no tier but memory after it."""
        deadline_s = self.clock() + timeout_s
        for tier in self._tiers:
            tier.flush(deadline_s)
        with self.records.lock:
            sessions = [key for key in self.records.sessions() if not key.is_implicit]
        return sum(not any(tier.wrote(session) for tier in self._tiers) for session in sessions)

    def close(self) -> None:
        """Finish pending writes, in bounded time. Idempotent."""
        for tier in self._tiers:
            tier.close()
        self.readers.shutdown(wait=False, cancel_futures=True)

    def _longest_prefix(
        self,
        turn: StagedTurn,
        prompt: tuple[int, ...],
        candidates: list[tuple[BackTier, SessionKey, TierRecord | None]],
        limit: int,
    ) -> BackRows | None:
        """Return the rows after those of memory, from the record that has most of the prompt's first `limit`
        tokens, the first tier's among equals; None if none has more than memory."""
        start = stop = turn.reused_tokens
        rows = None
        for tier, session, record in candidates:
            if record is not None and (length := tier.reusable(record, prompt, limit)) > stop:
                stop = length
                source: ReuseSource = "session" if session == turn.session else "document"
                rows = BackRows(tier, session, record, start, stop, source=source)
        return rows
