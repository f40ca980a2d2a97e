"""The history store in host memory: every session's full KV at one prefill worker.

Place in the request's path: the prefill engine begins a turn, loads and appends layer by layer; decode's
returned rows are appended; the router's commit publishes. Does not know models, compression or the wire.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import structlog
from torch import Tensor

from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.errors import HistoryMiss, InvalidRequest, SessionBusy, SessionNotFound
from kvferry.shared.history.interface import HistoryRecord
from kvferry.shared.history.precision import LayerKV, RowChunk, RowPrecision, chunk_bytes
from kvferry.shared.history.prefix import common_prefix
from kvferry.shared.history.records import RecordTable
from kvferry.shared.history.segment import Piece, Segment, chunk_rows, first_pieces, piece_chunks
from kvferry.shared.history.turn import MemoryHistoryTurn, StagedTurn, StoredRecord, TurnState

log = structlog.get_logger(__name__)


class MemoryHistoryStore:
    """Implements `HistoryStore`. Thread-safe: one lock, not held while KV is copied in or out.

        begin ──► turn (staged rows, references on the reused pieces)
                    │ commit                            drop, abort, lease
                    ▼                                          ▼
        sessions: key ──► record ──► pieces ──► segments     freed at once
                  (least recently used first)

    A session's prompt that starts with tokens of another session of the same owner continues from that one's
    KV: whole segments are shared, of a slice the session gets a copy, so that no session keeps rows of
    another one's alone. Sessions of two owners share nothing.

    A byte is counted once: while staged, with its turn; after that, with its segment for as long as a record
    or a turn names it, whole even where only a slice of it is in use. Above `max_bytes` whole sessions go,
    least recently used first, but none that has a turn under way; a turn that still finds no room goes on
    without staging, and its commit keeps the base prefix alone.
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
        max_bytes: bound on `size_bytes`.
        turn_lease_s: a turn that nothing was appended to for so long is dropped by `sweep`.
        clock: monotonic seconds.
        precision: how rows are stored; as they come if None.
        on_miss: told the reason where a session that has had turns has no record here.
        """
        self._on_miss = on_miss
        self._precision = precision or RowPrecision()
        self._num_layers = num_layers
        self._turn_lease_s = turn_lease_s
        self._clock = clock
        self._lock = threading.RLock()
        self._turns: dict[str, StagedTurn] = {}
        self._records = RecordTable(max_bytes=max_bytes)

    # ---- the store's side --------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return self._records.size_bytes

    @property
    def max_bytes(self) -> int:
        return self._records.max_bytes

    @property
    def tier_bytes(self) -> dict[str, Callable[[], int]]:
        """See `HistoryStore.tier_bytes`."""
        return {"memory": lambda: self.size_bytes}

    def record(self, session: SessionKey) -> HistoryRecord | None:
        """The session's committed record."""
        with self._lock:
            stored = self._records.get(session)
        if stored is None:
            return None
        return HistoryRecord(session=session, token_ids=stored.token_ids, version=stored.version)

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
    ) -> MemoryHistoryTurn:
        """See `HistoryStore.begin`. A request that begins again gives up its former turn.

        Raises: InvalidRequest: an empty prompt, another session's turn has this request id, or the document
            is another owner's.
        """
        if not prompt_token_ids:
            raise InvalidRequest("the prompt has 0 tokens; it must have at least 1")
        if document is not None and document.owner != session.owner:
            raise InvalidRequest("the document is another owner's")
        with self._lock:
            former = self._turns.get(request_id)
            if former is not None and former.session != session:
                raise InvalidRequest(f"request id {request_id!r} is in use by another session's turn")
            if former is not None:
                self.abort_turn(former)
            source, record, reused = self._records.continued_from(
                session, prompt_token_ids, document, num_observed
            )
            turn = StagedTurn(
                session=session,
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                base=self._records.get(session),
                pieces=first_pieces(record.pieces, reused) if record is not None else (),
                reused_tokens=reused,
                num_exact_reused=min(reused, record.num_exact_tokens) if record is not None else 0,
                reuse_source=source,
                staged=[[] for _ in range(self._num_layers)],
                deadline_s=self._clock() + self._turn_lease_s,
            )
            self._records.retain(turn.pieces)
            self._turns[request_id] = turn
        if has_history and turn.base is None:
            self._on_miss("absent")
        return MemoryHistoryTurn(self, turn)

    def turn(self, request_id: str) -> MemoryHistoryTurn | None:
        """See `HistoryStore.turn`."""
        with self._lock:
            turn = self._turns.get(request_id)
            return MemoryHistoryTurn(self, turn) if turn is not None else None

    def info(self, session: SessionKey) -> HistoryInfo:
        """See `HistoryStore.info`; tier "none" where nothing is held."""
        with self._lock:
            return _info(self._records.get(session))

    def drop(self, session: SessionKey) -> HistoryInfo:
        """See `HistoryStore.drop`. Wins over turns under way: their commits raise SessionNotFound."""
        with self._lock:
            info = _info(self._records.get(session))
            self._records.forget(session)
            for turn in self._turns.values():
                if turn.session == session and turn.under_way:
                    self._close(turn, TurnState.DROPPED)
            return info

    def evict(self, session: SessionKey) -> None:
        """Forget a session's record; unlike `drop`, a turn under way for it goes on, but will not commit."""
        with self._lock:
            self._records.forget(session)

    @contextmanager
    def pinned(self, session: SessionKey) -> Iterator[StoredRecord | None]:
        """The session's record, its rows kept and counted until the block ends."""
        with self._lock:
            record = self._records.get(session)
            if record is not None:
                self._records.retain(record.pieces)
        try:
            yield record
        finally:
            if record is not None:
                with self._lock:
                    self._records.release(record.pieces)

    def close(self) -> None:
        """See `HistoryStore.close`: nothing to do."""

    def sweep(self) -> int:
        """Drop turns whose lease ran out; returns how many."""
        with self._lock:
            now_s = self._clock()
            expired = [turn for turn in self._turns.values() if turn.deadline_s <= now_s]
            for turn in expired:
                self._close(turn, TurnState.EXPIRED)
                del self._turns[turn.request_id]
            return len(expired)

    # ---- the turns' side ---------------------------------------------------------------------------------

    def load_turn(self, turn: StagedTurn, layer: int) -> LayerKV | None:
        """See `HistoryTurn.load`."""
        with self._lock:
            if turn.reused_tokens == 0:
                return None
            if not turn.under_way:
                raise HistoryMiss(
                    f"history of request {turn.request_id} is gone: its turn is {turn.state.value}",
                    reason=turn.state.value,
                )
            pieces = turn.pieces
        return chunk_rows(piece_chunks(pieces, layer))

    def limit_turn(self, turn: StagedTurn, num_tokens: int) -> None:
        """See `HistoryTurn.limit`."""
        with self._lock:
            pieces = first_pieces(turn.pieces, num_tokens)
            self._records.retain(pieces)
            self._records.release(turn.pieces)
            turn.pieces = pieces
            turn.reused_tokens = min(turn.reused_tokens, num_tokens)
            turn.num_exact_reused = min(turn.num_exact_reused, num_tokens)

    def append_turn(self, turn: StagedTurn, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `HistoryTurn.append`."""
        assert keys.ndim == 3, keys.shape
        assert keys.shape == values.shape, (keys.shape, values.shape)
        with self._lock:
            if turn.state is TurnState.COMMITTED:
                raise HistoryMiss(f"the turn of request {turn.request_id} is committed", reason="late")
            if turn.state is not TurnState.OPEN or keys.shape[1] == 0:
                return
        chunk = self._precision.encode(keys, values)
        with self._lock:
            self._stage(turn, layer, chunk)

    def adopt_turn(self, turn: StagedTurn, layer: int, chunks: Iterable[RowChunk]) -> None:
        """Stage rows as another tier stores them, after those already staged for this layer; they must be on
        memory of their own."""
        with self._lock:
            turn.adopted = True
            for chunk in chunks:
                self._stage(turn, layer, chunk)

    def restart_turn(self, turn: StagedTurn) -> None:
        """See `HistoryTurn.restart`."""
        with self._lock:
            self._unstage(turn)
            self._records.release(turn.pieces)
            turn.pieces, turn.reused_tokens, turn.num_exact_reused = (), 0, 0
            turn.adopted = False

    def commit_turn(self, turn: StagedTurn, token_ids: tuple[int, ...]) -> HistoryInfo:
        """See `HistoryTurn.commit`. The turn is over afterwards, whatever the outcome.

        Raises:
            SessionNotFound: the session was dropped since `begin`.
            SessionBusy: another turn of the session committed since.
            HistoryMiss: the turn is already over.
            InvalidRequest: `token_ids` contradict the prompt that the staged rows belong to.
        """
        pieces = self._own_pieces(turn)
        with self._lock:
            if turn.state is TurnState.DROPPED:
                self.abort_turn(turn)
                raise SessionNotFound(f"session {turn.session.session_id!r} was deleted during the turn")
            if not turn.under_way:
                raise HistoryMiss(
                    f"the turn of request {turn.request_id} is already {turn.state.value}",
                    reason=turn.state.value,
                )
            try:
                self._check_commit(turn, token_ids)
            except (SessionBusy, InvalidRequest):
                self.abort_turn(turn)
                raise
            return self._publish(turn, token_ids, pieces)

    def abort_turn(self, turn: StagedTurn) -> None:
        """See `HistoryTurn.abort`."""
        with self._lock:
            if turn.state is TurnState.COMMITTED:
                return
            self._close(turn, TurnState.ABORTED)
            if self._turns.get(turn.request_id) is turn:
                del self._turns[turn.request_id]

    def _own_pieces(self, turn: StagedTurn) -> tuple[Piece, ...]:
        """The reused pieces as the session may keep them: of another session's segments, whole ones or a
        copy. Copies without the lock; the turn's references keep the segments."""
        with self._lock:
            pieces = turn.pieces
        if turn.reuse_source == "session":
            return pieces
        return tuple(
            piece
            if piece.length == piece.segment.num_tokens
            else Piece(segment=piece.segment.first(piece.length), length=piece.length)
            for piece in pieces
        )

    # ---- lock held ---------------------------------------------------------------------------------------

    def _busy(self) -> set[SessionKey]:
        return {turn.session for turn in self._turns.values()}

    def _stage(self, turn: StagedTurn, layer: int, chunk: RowChunk) -> None:
        if turn.state is not TurnState.OPEN:
            return
        if not self._records.make_room(chunk_bytes(chunk), busy=self._busy()):
            log.warning("history has no room for a turn", request_id=turn.request_id)
            self._unstage(turn)
            turn.state = TurnState.OVERFLOWED
            return
        self._records.size_bytes += chunk_bytes(chunk)
        turn.staged[layer].append(chunk)
        turn.deadline_s = self._clock() + self._turn_lease_s

    def _check_commit(self, turn: StagedTurn, token_ids: tuple[int, ...]) -> None:
        if self._records.get(turn.session) is not turn.base:
            raise SessionBusy(f"session {turn.session.session_id!r} was changed by another turn")
        prompt = turn.prompt_token_ids
        if common_prefix(prompt, token_ids) < min(len(prompt), len(token_ids)):
            raise InvalidRequest(f"the turn's token ids differ from request {turn.request_id}'s prompt")

    def _publish(
        self, turn: StagedTurn, token_ids: tuple[int, ...], reused: tuple[Piece, ...]
    ) -> HistoryInfo:
        """Swap the session's record: the base prefix, then the staged rows as one segment."""
        reused, num_reused = self._records.with_room(first_pieces(reused, len(token_ids)), busy=self._busy())
        num_tokens = num_reused
        if num_reused == turn.reused_tokens:
            num_tokens = min(len(token_ids), num_reused + turn.num_staged_tokens)
        pieces = reused
        if num_tokens > num_reused:
            segment = Segment(turn.staged, num_tokens - num_reused)
            self._records.size_bytes += segment.size_bytes
            pieces = (*pieces, Piece(segment=segment, length=num_tokens - num_reused))
        self._records.retain(pieces)
        former = self._records.get(turn.session)
        version = former.version + 1 if former is not None else 1
        self._records.forget(turn.session)
        record = None
        if num_tokens > 0:
            exact = turn.num_exact_reused
            if exact == turn.reused_tokens and not turn.adopted:
                exact = len(turn.prompt_token_ids)
            record = StoredRecord(
                token_ids=token_ids[:num_tokens],
                version=version,
                pieces=pieces,
                num_exact_tokens=min(exact, num_tokens),
            )
            self._records.add(turn.session, record)
        self._close(turn, TurnState.COMMITTED)
        del self._turns[turn.request_id]
        return _info(record)

    def _close(self, turn: StagedTurn, state: TurnState) -> None:
        """Let go of everything that the turn holds. Idempotent."""
        self._unstage(turn)
        self._records.release(turn.pieces)
        turn.pieces = ()
        turn.state = state

    def _unstage(self, turn: StagedTurn) -> None:
        self._records.size_bytes -= turn.staged_bytes
        turn.staged = [[] for _ in range(self._num_layers)]


def _info(record: StoredRecord | None) -> HistoryInfo:
    if record is None:
        return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")
    return HistoryInfo(num_tokens=len(record.token_ids), size_bytes=record.size_bytes)
