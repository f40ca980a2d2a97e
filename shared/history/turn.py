"""One turn's staging area in the memory store: its state, and the handle that its request holds.

Decides nothing: what is staged, evicted and published is the store's (`memory.py`), under its lock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from kvferry.shared.control.messages import HistoryInfo, ReuseSource, SessionKey
from kvferry.shared.history.precision import LayerKV, RowChunk, chunk_bytes
from kvferry.shared.history.segment import Piece


class TurnState(enum.Enum):
    OPEN = "open"
    OVERFLOWED = "overflowed"
    DROPPED = "dropped"
    EXPIRED = "expired"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """A session's committed history, immutable; turns compare it by identity.

    Attributes:
        pieces: where the tokens' KV is, in order; `length` adds up to `len(token_ids)`.
        num_exact_tokens: leading tokens whose KV prefill computed from the tokens before them alone. What
            decode generated, and what was run after it, also depends on the rows that decode had; other
            sessions do not continue from that.
    """

    token_ids: tuple[int, ...]
    version: int
    pieces: tuple[Piece, ...]
    num_exact_tokens: int

    @property
    def size_bytes(self) -> int:
        """Host memory of the segments it names, whole."""
        return sum(piece.segment.size_bytes for piece in self.pieces)


@dataclass(kw_only=True, eq=False)
class StagedTurn:
    """A turn's state, guarded by the store's lock.

        OPEN ──commit──► COMMITTED                staged rows become a segment of the session's record
          ├──abort──► ABORTED ◄──abort──┐         rows freed
          ├──lease runs out──► EXPIRED ─┤         rows freed; commit: HistoryMiss
          ├──session dropped─► DROPPED ─┘         rows freed; commit: SessionNotFound
          └──no room──► OVERFLOWED                rows freed, later ones ignored; goes on like OPEN, and
                                                  commit publishes the base prefix alone

    While OPEN or OVERFLOWED it holds references on the pieces that it reuses, so that neither eviction nor
    another turn's commit frees them; a drop or the lease does, and loading then raises HistoryMiss. Rows
    appended to a turn in any other state go nowhere: its commit tells.

    Attributes:
        base: the session's record when the turn began, or None; the commit replaces no other.
        pieces, reused_tokens: what the turn continues from, of `base` or of another record of the owner.
        num_exact_reused: how many of the reused tokens are exact, see `StoredRecord`.
        staged: chunks per layer, in order.
        adopted: whether rows of another tier are among them, which are not known to be exact.
    """

    session: SessionKey
    request_id: str
    prompt_token_ids: tuple[int, ...]
    base: StoredRecord | None
    pieces: tuple[Piece, ...]
    reused_tokens: int
    num_exact_reused: int
    reuse_source: ReuseSource
    staged: list[list[RowChunk]]
    deadline_s: float
    adopted: bool = False
    state: TurnState = field(default=TurnState.OPEN)

    @property
    def under_way(self) -> bool:
        return self.state in (TurnState.OPEN, TurnState.OVERFLOWED)

    @property
    def staged_bytes(self) -> int:
        return sum(chunk_bytes(chunk) for chunks in self.staged for chunk in chunks)

    @property
    def num_staged_tokens(self) -> int:
        """Tokens whose rows are staged in every layer."""
        return min(sum(chunk.num_tokens for chunk in chunks) for chunks in self.staged)


class TurnStore(Protocol):
    """What a handle asks of its store."""

    def load_turn(self, turn: StagedTurn, layer: int) -> LayerKV | None: ...

    def limit_turn(self, turn: StagedTurn, num_tokens: int) -> None: ...

    def append_turn(self, turn: StagedTurn, layer: int, keys: Tensor, values: Tensor) -> None: ...

    def adopt_turn(self, turn: StagedTurn, layer: int, chunks: Iterable[RowChunk]) -> None: ...

    def restart_turn(self, turn: StagedTurn) -> None: ...

    def commit_turn(self, turn: StagedTurn, token_ids: tuple[int, ...]) -> HistoryInfo: ...

    def abort_turn(self, turn: StagedTurn) -> None: ...


class MemoryHistoryTurn:
    """Implements `HistoryTurn` over a store; see `StagedTurn` for its states."""

    def __init__(self, store: TurnStore, turn: StagedTurn) -> None:
        self._store = store
        self._turn = turn

    @property
    def session(self) -> SessionKey:
        return self._turn.session

    @property
    def request_id(self) -> str:
        return self._turn.request_id

    @property
    def reused_tokens(self) -> int:
        return self._turn.reused_tokens

    @property
    def reuse_source(self) -> ReuseSource:
        return self._turn.reuse_source

    def limit(self, num_tokens: int) -> None:
        """See `HistoryTurn.limit`."""
        self._store.limit_turn(self._turn, num_tokens)

    def load(self, layer: int) -> LayerKV | None:
        """See `HistoryTurn.load`. What it returns must not be written to."""
        return self._store.load_turn(self._turn, layer)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `HistoryTurn.append`. Raises HistoryMiss where the turn is committed already."""
        self._store.append_turn(self._turn, layer, keys, values)

    def adopt(self, layer: int, chunks: Iterable[RowChunk]) -> None:
        """Stage rows that another tier holds, as they are stored; on memory of their own."""
        self._store.adopt_turn(self._turn, layer, chunks)

    @property
    def reused_by_tier(self) -> dict[str, int]:
        """See `HistoryTurn.reused_by_tier`."""
        return {"memory": self._turn.reused_tokens}

    def restart(self) -> None:
        """See `HistoryTurn.restart`."""
        self._store.restart_turn(self._turn)

    def commit(self, token_ids: tuple[int, ...]) -> HistoryInfo:
        """See `HistoryTurn.commit`."""
        return self._store.commit_turn(self._turn, token_ids)

    def abort(self) -> None:
        """See `HistoryTurn.abort`."""
        self._store.abort_turn(self._turn)
