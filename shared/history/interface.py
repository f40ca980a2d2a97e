"""The history store's protocol: the full KV of every session, addressed by token ids and committed turn by
turn.

    begin ──► staged turn: load(layer), append(layer)... while the prompt runs
                       │   append(layer) of the generated KV that decode returns
                       └─► commit: the session's new record  |  abort, lease: dropped

Nobody else sees a staged turn's rows before its commit, which replaces the session's record in one step.
Segments of rows are shared between records and freed when no record names them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.history.turn import StagedTurn


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
        ...

    def turn(self, request_id: str) -> StagedTurn | None:
        """The turn that this request began, until it is committed, aborted or expired."""
        ...

    def info(self, session: SessionKey) -> HistoryInfo:
        """What is stored for the session; tier "none" if nothing is."""
        ...

    def drop(self, session: SessionKey) -> HistoryInfo:
        """Delete the session's history; returns what was stored. Its open turns will not commit:
        SessionNotFound."""
        ...

    def sweep(self) -> int:
        """Drop turns whose lease has expired; returns how many. Called periodically."""
        ...

    def close(self) -> None:
        """Finish pending writes, in bounded time. Idempotent."""
        ...

    @property
    def size_bytes(self) -> int:
        """Host memory in use."""
        ...

    @property
    def max_bytes(self) -> int:
        """Limit on `size_bytes`."""
        ...

    @property
    def tier_bytes(self) -> dict[str, Callable[[], int]]:
        """Functions that return the bytes in each tier: "memory", "redis"."""
        ...
