"""The history store's protocol: full KV of every session, token-addressed, append-only, committed turn by
turn.

    lookup ──► record (immutable) ──► load(layer, n) while the turn's prefill runs
    begin ──► turn: append(layer)... [append(layer) of returned generated KV...] ──► commit | abort

A turn stages new segments that nobody sees; `commit` swaps the session's record in one step, `abort` (or
the lease) drops them. Segments are shared between records up to a branch and freed when no record names
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvferry.shared.control.messages import HistoryInfo, ReuseSource, SessionKey


@dataclass(frozen=True, kw_only=True)
class HistoryRecord:
    """A session's committed history.

    Attributes:
        token_ids: tokens that have KV, from position 0.
        version: grows by one with each commit; fences concurrent turns.
    """

    session: SessionKey
    token_ids: tuple[int, ...]
    version: int


class HistoryTurn(Protocol):
    """One turn's staging area. Owned by the request that began it."""

    @property
    def session(self) -> SessionKey: ...

    @property
    def reused_tokens(self) -> int:
        """Tokens of the base record that this turn continues from."""
        ...

    @property
    def reused_by_tier(self) -> dict[str, int]:
        """`reused_tokens` by where their rows come from: "memory", "redis"."""
        ...

    @property
    def reuse_source(self) -> ReuseSource: ...

    def limit(self, num_tokens: int) -> None:
        """Continue from the first `num_tokens` of the reused tokens alone. Before anything is loaded."""
        ...

    def load(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """K and V `[H_kv, reused_tokens, D]` of the base record, or None where nothing is reused.

        Raises HistoryMiss where the bytes are gone."""
        ...

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stage `[H_kv, n, D]` rows after those already staged for this layer (copied to the host)."""
        ...

    def restart(self) -> None:
        """Drop what was staged and continue from nothing, `reused_tokens` 0: the base record's bytes are
        gone. Whether the turn may commit does not change."""
        ...

    def commit(self, token_ids: tuple[int, ...]) -> HistoryInfo:
        """Publish the base prefix and the staged rows as the session's record; `token_ids` beyond the rows
        that have KV are ignored. Raises SessionNotFound if the session was dropped since `begin`,
        SessionBusy if another turn committed first."""
        ...

    def abort(self) -> None:
        """Drop what was staged. Idempotent."""
        ...


class HistoryStore(Protocol):
    """All sessions' history at one prefill worker. Thread-safe."""

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
    ) -> HistoryTurn:
        """Start a turn: finds the longest common token prefix with the session's record, capped at one
        token less than the prompt (the last prompt token must be run to give logits).

        Args:
            method: the turn's compression; goes into the record where one is kept for others.
            document: a record of the same owner that the session may begin with, as if it were an earlier
                turn of it.
            num_observed: at least so many of the prompt's last tokens are run if another session's record of
                the same owner is continued from, so that the turn sees the queries which it would see
                alone; None never continues from one.
            has_history: whether the session has had turns: to hold none of them is a miss, which is counted.
        """
        ...

    def turn(self, request_id: str) -> HistoryTurn | None:
        """The turn that this request began, while it is neither committed nor aborted."""
        ...

    def info(self, session: SessionKey) -> HistoryInfo: ...

    def drop(self, session: SessionKey) -> HistoryInfo: ...

    def sweep(self) -> int:
        """Drop turns whose lease ran out, on a clock of the caller's; returns how many."""
        ...

    def close(self) -> None:
        """Finish what is still to be written elsewhere, in bounded time. Idempotent."""
        ...

    @property
    def size_bytes(self) -> int:
        """Host memory in use."""
        ...

    @property
    def max_bytes(self) -> int:
        """Bound on `size_bytes`."""
        ...

    @property
    def tier_bytes(self) -> dict[str, Callable[[], int]]:
        """What each tier holds, to be asked for when it is wanted."""
        ...
