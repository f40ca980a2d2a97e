"""A staged turn: one request's new history until it is committed or dropped, and what it reuses from earlier
turns.

Place in the request's path: the prefill engine loads and appends layer by layer, decode's returned rows are
appended, and the router's commit publishes them. The committed records and their byte count are in
`records.py`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import structlog
from torch import Tensor

from kvferry.shared.control.messages import HistoryInfo, ReuseSource, SessionKey
from kvferry.shared.errors import HistoryMiss, InvalidRequest, SessionBusy, SessionNotFound
from kvferry.shared.history.back_tier import BackRows, BackTier, Commit
from kvferry.shared.history.checkpoints import Checkpoint, LayerState, States, host_copy, thinned
from kvferry.shared.history.records import Found, StoredRecord, common_prefix, parts_of
from kvferry.shared.history.rows import LayerKV, Piece, RowChunk, Segment, first_pieces
from kvferry.shared.history.rows_ahead import RowsAhead

if TYPE_CHECKING:
    from kvferry.shared.history.store import HistoryStore

log = structlog.get_logger(__name__)

T = TypeVar("T")


class TurnState(enum.Enum):
    OPEN = "open"
    OVERFLOWED = "overflowed"
    DROPPED = "dropped"
    EXPIRED = "expired"
    COMMITTED = "committed"
    ABORTED = "aborted"


class StagedTurn:
    """Owned by the request that began it. Thread-safe: it uses the store's lock, but copies KV without it.

        OPEN ──commit──► COMMITTED                staged rows become a segment of the session's record
          ├──abort──► ABORTED ◄──abort──┐         rows freed
          ├──lease expires──► EXPIRED ──┤         rows freed; commit raises HistoryMiss
          ├──session dropped─► DROPPED ─┘         rows freed; commit raises SessionNotFound
          └──no room──► OVERFLOWED                rows freed, later ones ignored; otherwise like OPEN, and
                                                  commit publishes the reused prefix alone

        tokens   0 ......... m ............. r ........... prompt ....... generated
                 memory    another tier    run by prefill  returned by decode
        states                             loaded      checkpoint       checkpoint

    While OPEN or OVERFLOWED it has references on the parts that it reuses, so that neither eviction nor
    another turn's commit frees them. Rows appended in any other state are ignored: the commit fails.

    Attributes:
        router: the one that will commit it.
        deadline_s: when its lease expires, on the store's clock.
    """

    def __init__(
        self,
        store: HistoryStore,
        session: SessionKey,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        found: Found,
    ) -> None:
        """Register the turn. The caller holds the store's lock. Args: found: see `RecordTable.find`."""
        self.session = session
        self.request_id = request_id
        record = found.record
        self._memory_source, self._memory_tokens = found.source, found.num_tokens
        self._shares_slices = found.session == session or (found.session.is_implicit and session.is_implicit)
        self._store = store
        self.router, self._limit_s = "", math.inf
        self.extend_lease()
        self._records = store.records
        self._prompt = prompt_token_ids
        # The commit replaces this record of the session and no other.
        self._base = self._records.get(session)
        self._pieces = first_pieces(record.pieces, self._memory_tokens) if record is not None else ()
        checkpoints = record.checkpoints if record is not None else ()
        self._checkpoints = tuple(
            checkpoint for checkpoint in checkpoints if checkpoint.num_tokens <= self._memory_tokens
        )
        self._num_exact_reused = (
            min(self._memory_tokens, record.num_exact_tokens) if record is not None else 0
        )
        self._adopted = False  # whether rows of another tier were staged
        self._back_rows: BackRows | None = None
        self._ahead: RowsAhead | None = None
        self._fences: Mapping[BackTier, bytes | None] = {}
        self._method = ""
        self._rebuild = False
        self._clear_staged()
        self._state = TurnState.OPEN
        self._records.retain(parts_of(self._pieces, self._checkpoints))
        self._records.busy[session] += 1
        store.turns[request_id] = self

    @property
    def is_first(self) -> bool:
        """Say whether host memory had no record of the session when the turn began."""
        return self._base is None

    @property
    def is_open(self) -> bool:
        return self._state in (TurnState.OPEN, TurnState.OVERFLOWED)

    @property
    def reused_tokens(self) -> int:
        """The number of the prompt's first tokens that the turn continues from."""
        return self._memory_tokens + (self._back_rows.num_tokens if self._back_rows is not None else 0)

    @property
    def reuse_source(self) -> ReuseSource:
        """The source of the record that the turn continues from."""
        return self._back_rows.source if self._back_rows is not None else self._memory_source

    @property
    def reused_by_tier(self) -> dict[str, int]:
        """`reused_tokens` by where their rows come from, memory first."""
        rows = self._back_rows
        return {"memory": self._memory_tokens} | ({rows.tier: rows.num_tokens} if rows is not None else {})

    def keep_own(self, num_tokens: int) -> None:
        """Use at most so many tokens' rows of another session's record in memory, because the session has its
        own rows of those that follow. Before `attach`."""
        if self.reuse_source != "session" and num_tokens < self._memory_tokens:
            with self._records.lock:
                released = parts_of(self._pieces, self._checkpoints)
                self._pieces = first_pieces(self._pieces, num_tokens)
                self._checkpoints = tuple(
                    checkpoint for checkpoint in self._checkpoints if checkpoint.num_tokens <= num_tokens
                )
                self._records.retain(parts_of(self._pieces, self._checkpoints))
                self._records.release(released)
                self._memory_tokens = num_tokens
                self._num_exact_reused = min(self._num_exact_reused, num_tokens)

    def attach(self, rows: BackRows | None, fences: Mapping[BackTier, bytes | None], method: str) -> None:
        """Add the tiers behind memory, before anything is loaded.

        Args:
            rows: of the tokens that follow those which host memory has.
            fences, method: of the commits to these tiers; see `Commit`.
        """
        self._back_rows, self._fences, self._method = rows, fences, method

    def load(self, layer: int) -> LayerKV | None:
        """Return K and V `[H_kv, reused_tokens, D]`; None if nothing is reused. Must not be written to.

        Raises: HistoryMiss: the rows are gone.
        """
        return self.load_prepared(layer, lambda rows: rows)

    def load_prepared(self, layer: int, prepare: Callable[[LayerKV], T]) -> T | None:
        """Do what `load` does, and return what `prepare` makes of K and V. It is called on another thread,
        also for the next layer."""
        with self._records.lock:
            if self._memory_tokens and not self.is_open:
                raise self._over(f"history of request {self.request_id} is gone: its turn is")
            if not self.reused_tokens:
                return None
            if self._ahead is None:
                self._ahead = RowsAhead(
                    self._store.readers, self._pieces, self._back_rows, self._store.num_layers
                )
            ahead = self._ahead
        fetched, prepared = ahead.take(layer, prepare)
        if self._back_rows is not None:
            with self._records.lock:
                self._adopted = True
                for chunk in fetched:
                    self._stage(layer, chunk)
        return prepared

    def load_state(self, layer: int) -> LayerState | None:
        """Return the state after `reused_tokens` tokens; None if nothing is reused. Must not be written to.

        Args: layer: of the model, one that has a state.
        Raises: HistoryMiss: it is gone.
        """
        with self._records.lock:
            if self._memory_tokens and not self.is_open:
                raise self._over(f"history of request {self.request_id} is gone: its turn is")
            checkpoints = self._checkpoints
        if self._back_rows is not None:
            state = self._back_rows.load_state(layer)
            self._stage_state(self.reused_tokens, layer, state, self._back_rows.ends_turn)
            return state
        return checkpoints[-1].states.layers[layer] if checkpoints else None

    def append_state(self, layer: int, state: LayerState, num_tokens: int) -> None:
        """Copy a layer's state after the first `num_tokens` tokens to the host. They are the prompt, or all
        tokens whose KV decode returned.

        Raises: HistoryMiss: the turn is already committed.
        """
        if self._state is TurnState.COMMITTED:
            raise HistoryMiss(f"the turn of request {self.request_id} is already committed", reason="late")
        if self._state is TurnState.OPEN:
            self._stage_state(num_tokens, layer, host_copy(state), num_tokens > len(self._prompt))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy `[H_kv, n, D]` rows to the host, after those already staged for this layer. Of latent rows
        `values` are the keys' first channels and are not copied.

        Raises: HistoryMiss: the turn is already committed.
        """
        assert keys.ndim == 3, keys.shape
        assert keys.shape[:2] == values.shape[:2], (keys.shape, values.shape)
        if self._state is TurnState.COMMITTED:
            raise HistoryMiss(f"the turn of request {self.request_id} is already committed", reason="late")
        if self._state is not TurnState.OPEN or keys.shape[1] == 0:
            return
        chunk = self._store.precision.encode(keys, values)
        with self._records.lock:
            self._stage(layer, chunk)

    def restart(self) -> None:
        """Drop what was staged and continue from nothing, because rows to be reused are gone. Whether the
        turn may commit does not change."""
        with self._records.lock:
            self._release_parts()
            if self._back_rows is not None:
                self._back_rows, self._rebuild = None, True
            self._memory_tokens = self._num_exact_reused = 0
            self._adopted = False

    def commit(self, token_ids: tuple[int, ...], *, pinned: bool = False) -> HistoryInfo:
        """Publish the reused prefix and the staged rows as the session's record. The turn is over afterwards,
        whatever the outcome. Tokens of `token_ids` beyond the rows that have KV are ignored.

        Raises:
            SessionNotFound: the session was dropped since `begin`.
            SessionBusy: another turn of the session has committed since, here or at another worker.
            HistoryMiss: the turn is already over.
            InvalidRequest: `token_ids` contradict the prompt that the staged rows belong to.
        """
        reused = self._own_pieces()
        with self._records.lock:
            if self._state is TurnState.DROPPED:
                self.abort()
                raise SessionNotFound(f"session {self.session.session_id!r} was deleted during the turn")
            if not self.is_open:
                raise self._over(f"the turn of request {self.request_id} is already")
            try:
                self._check_commit(token_ids)
            except (SessionBusy, InvalidRequest):
                self.abort()
                raise
            record = self._publish(token_ids, reused, pinned)
            waits = self._write_behind(record) if record is not None else []
        for wait in waits:
            wait()
        return record_info(record)

    def abort(self) -> None:
        """Drop what was staged. Idempotent; does nothing after a commit."""
        with self._records.lock:
            if self._state is not TurnState.COMMITTED:
                self.end(TurnState.ABORTED)

    def end(self, state: TurnState) -> None:
        """Free the turn's rows. If its session was dropped it stays registered, so that its commit fails."""
        with self._records.lock:
            self._release_parts()
            self._state = state
            turns = self._store.turns
            if state is not TurnState.DROPPED and turns.get(self.request_id) is self:
                del turns[self.request_id]
                self._records.no_longer_busy(self.session)

    def _over(self, what: str) -> HistoryMiss:
        return HistoryMiss(f"{what} {self._state.value}", reason=self._state.value)

    def _own_pieces(self) -> tuple[Piece, ...]:
        """Return the reused pieces as the session may store them: slices of another session's segments are
        copied, so that its deletion frees them. Implicit sessions share slices: a prompt that branches off
        another stores its own rows only. The lock is not needed: the turn's references keep the segments."""
        if self._shares_slices:
            return self._pieces
        return tuple(
            piece
            if piece.length == piece.segment.num_tokens
            else Piece(segment=piece.segment.first(piece.length), length=piece.length)
            for piece in self._pieces
        )

    def _stage_state(self, num_tokens: int, layer: int, state: LayerState, ends_turn: bool) -> None:
        with self._records.lock:
            if self._stage_bytes(sum(tensor.nbytes for tensor in state.values())):
                self._staged_states.setdefault((num_tokens, ends_turn), {})[layer] = state

    def _stage(self, layer: int, chunk: RowChunk) -> None:
        if self._stage_bytes(chunk.size_bytes):
            self._staged[layer].append(chunk)
            self._staged_tokens[layer] += chunk.num_tokens

    def _stage_bytes(self, num_bytes: int) -> bool:
        """Count bytes that are about to be staged. Return False if they must not be."""
        if self._state is not TurnState.OPEN:
            return False
        if not self._records.make_room(num_bytes):
            log.warning("history has no room for a turn", request_id=self.request_id)
            self._unstage()
            self._state = TurnState.OVERFLOWED
            return False
        self._records.size_bytes += num_bytes
        self._staged_bytes += num_bytes
        self.extend_lease()
        return True

    def belong_to(self, router: str, limit_s: float) -> None:
        """Let a router's signs of life extend the lease, up to this time on the store's clock."""
        self.router, self._limit_s = router, limit_s
        self.extend_lease()

    def extend_lease(self) -> None:
        """Extend the lease, because the turn has made progress or its router lives."""
        self.deadline_s = min(self._store.clock() + self._store.turn_lease_s, self._limit_s)

    def _check_commit(self, token_ids: tuple[int, ...]) -> None:
        if self._records.get(self.session) is not self._base:
            raise SessionBusy(f"session {self.session.session_id!r} was changed by another turn")
        if common_prefix(self._prompt, token_ids) < min(len(self._prompt), len(token_ids)):
            raise InvalidRequest(f"the turn's token ids differ from request {self.request_id}'s prompt")

    def _publish(
        self, token_ids: tuple[int, ...], reused: tuple[Piece, ...], pinned: bool
    ) -> StoredRecord | None:
        """Replace the session's record by the reused prefix and, as one new segment, the staged rows."""
        records = self._records
        pieces = records.add_copies(first_pieces(reused, len(token_ids)))
        num_tokens = sum(piece.length for piece in pieces)
        checkpoints = self._checkpoints
        if num_tokens == self._memory_tokens:
            num_new = min(len(token_ids) - num_tokens, self._num_staged())
            if num_new > 0:
                segment = Segment(self._staged, num_new)
                records.size_bytes += segment.size_bytes
                pieces = (*pieces, Piece(segment=segment, length=num_new))
                num_tokens += num_new
                checkpoints = (*checkpoints, *self._new_checkpoints())
        if self._store.num_states:
            known = {
                checkpoint.num_tokens: checkpoint
                for checkpoint in checkpoints
                if checkpoint.num_tokens <= num_tokens
            }
            checkpoints = thinned(known.values(), num_exact=self._num_exact(num_tokens))
        new_states = {checkpoint.states for checkpoint in checkpoints if checkpoint.states.references == 0}
        records.size_bytes += sum(states.size_bytes for states in new_states)
        records.retain(parts_of(pieces, checkpoints))
        records.forget(self.session)
        record = None
        if num_tokens > 0:
            record = StoredRecord(
                token_ids=token_ids[:num_tokens],
                pieces=pieces,
                num_exact_tokens=self._num_exact(num_tokens),
                checkpoints=checkpoints,
                pinned=pinned,
            )
            records.add(self.session, record)
        self.end(TurnState.COMMITTED)
        return record

    def _write_behind(self, record: StoredRecord) -> list[Callable[[], None]]:
        """Queue the record at the tiers behind memory. Return functions that wait until they have it."""
        return [
            tier.write(
                self.session, Commit(record=record, fence=fence, rebuild=self._rebuild, method=self._method)
            )
            for tier, fence in self._fences.items()
        ]

    def _num_exact(self, num_tokens: int) -> int:
        """Compute `StoredRecord.num_exact_tokens` of a record of this many tokens."""
        exact, reused = self._num_exact_reused, self._memory_tokens
        if self._adopted and self._back_rows is not None and exact == reused:
            reused = self.reused_tokens
            exact = max(exact, min(self._back_rows.num_exact_tokens, reused))
        return min(exact if exact < reused else len(self._prompt), num_tokens)

    def _num_staged(self) -> int:
        """Count the tokens after those of memory that have rows in every layer or, if no layer has rows, that
        are followed by a checkpoint."""
        if self._staged_tokens:
            return min(self._staged_tokens)
        return (
            max((checkpoint.num_tokens for checkpoint in self._new_checkpoints()), default=0)
            - self._memory_tokens
        )

    def _new_checkpoints(self) -> list[Checkpoint]:
        """Return the staged states that are whole."""
        return [
            Checkpoint(num_tokens=num_tokens, states=States(layers), ends_turn=ends_turn)
            for (num_tokens, ends_turn), layers in self._staged_states.items()
            if len(layers) == self._store.num_states
        ]

    def _cancel_ahead(self) -> None:
        """Drop what is read ahead of the pass, and the references to its rows."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _release_parts(self) -> None:
        self._cancel_ahead()
        self._unstage()
        self._records.release(parts_of(self._pieces, self._checkpoints))
        self._pieces, self._checkpoints = (), ()

    def _unstage(self) -> None:
        self._records.size_bytes -= self._staged_bytes
        self._clear_staged()

    def _clear_staged(self) -> None:
        self._staged_bytes = 0
        self._staged_tokens = [0] * self._store.num_layers
        self._staged: list[list[RowChunk]] = [[] for _ in range(self._store.num_layers)]
        self._staged_states: dict[tuple[int, bool], dict[int, LayerState]] = {}


def record_info(record: StoredRecord | None) -> HistoryInfo:
    """Return what host memory has of a session."""
    if record is None:
        return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")
    return HistoryInfo(num_tokens=len(record.token_ids), size_bytes=record.size_bytes)
