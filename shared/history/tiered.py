"""Two tiers as one store: host memory in front of Redis, which outlives the worker.

    begin    the tier whose record shares the longer prefix with the prompt is continued from
    load     rows from memory; those that it lacks from Redis, one layer ahead of the pass, and into memory
    commit   memory first, then Redis, for which the commit waits a bounded time

A Redis that is dead, slow, empty or damaged costs a turn a bounded wait and its stored rows, but does not
fail it: `load` raises HistoryMiss, and the prompt is run from its token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Unpack

import structlog

from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.errors import HistoryMiss, StoreUnavailable
from kvferry.shared.history.prefix import common_prefix
from kvferry.shared.history.redis_format import RemoteRecord
from kvferry.shared.history.redis_history import RedisHistory
from kvferry.shared.history.remote_rows import RemoteRows
from kvferry.shared.history.replicator import Replicator, WriteRequest
from kvferry.shared.history.store import HistoryStore, StoreOptions
from kvferry.shared.history.turn import StagedTurn

log = structlog.get_logger(__name__)

# The router gives a deletion two seconds; one that takes longer is still done, later.
_DELETE_WAIT_S = 1.5
_CLOSE_TIMEOUT_S = 8.0
_NUM_FETCHERS = 4


class TieredHistoryStore(HistoryStore):
    """A history store with Redis behind it. Owns the threads that read from Redis and write to it."""

    def __init__(
        self,
        remote: RedisHistory,
        *,
        turn_timeout_s: float,
        commit_timeout_s: float,
        on_failure: Callable[[str], None],
        **options: Unpack[StoreOptions],
    ) -> None:
        """Args:
        turn_timeout_s: how long one turn waits for rows from Redis in all.
        commit_timeout_s: how long a commit waits for Redis; after that the write goes on behind it.
        on_failure: called with a reason if Redis did not take a commit.
        options: `on_miss` is called with a reason if Redis could not be asked, or lacks a session that has
            had turns, and memory lacks it as well. Misses during `load` are raised instead.
        """
        super().__init__(**options)
        self._remote = remote
        self._turn_timeout_s = turn_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._clock = options["clock"]
        self._replicator = Replicator(self, remote, on_failure=on_failure)
        self._fetchers = ThreadPoolExecutor(_NUM_FETCHERS, "kvferry-history-fetch")

    @property
    def tier_bytes(self) -> dict[str, Callable[[], int]]:
        """See `HistoryStore.tier_bytes`. Redis: all workers' sessions, as of this worker's last write or
        deletion."""
        return {**super().tier_bytes, "redis": lambda: self._remote.size_bytes}

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
        """See `HistoryStore.begin`. Other sessions' prefixes are looked up in memory only, a document in
        both."""
        turn = super().begin(
            session, request_id, prompt_token_ids, document=document, num_observed=num_observed
        )
        reachable, record = self._look_up(session)
        if record is None and turn.is_first:
            if not reachable:
                self._on_miss("redis_unavailable")
            elif self._replicator.wrote(session):
                self._on_miss("evicted")
            elif has_history:
                self._on_miss("absent")
        candidates = [(session, record)]
        if document is not None and reachable and turn.reuse_source != "document":
            candidates.append((document, self._look_up(document)[1]))
        fence = None if not reachable else record.fence if record is not None else b""
        turn.attach(
            remote=self._longer_prefix(turn, prompt_token_ids, candidates),
            replicate=lambda rebuild: self._replicate(
                WriteRequest(session=session, fence=fence, rebuild=rebuild, method=method)
            ),
        )
        return turn

    def info(self, session: SessionKey) -> HistoryInfo:
        """See `HistoryStore.info`: of memory, otherwise of Redis."""
        info = super().info(session)
        return info if info.num_tokens else self._remote_info(session)

    def drop(self, session: SessionKey) -> HistoryInfo:
        """See `HistoryStore.drop`. If Redis does not answer, its part is deleted when it does."""
        info = super().drop(session)
        if not info.num_tokens:
            info = self._remote_info(session)
        try:
            self._replicator.delete(session).result(_DELETE_WAIT_S)
        except FutureTimeout:
            log.warning("history in Redis will be deleted later")
        return info

    def sweep(self) -> int:
        """See `HistoryStore.sweep`. Also retries deletions that Redis has not taken yet."""
        self._replicator.retry_deletions()
        return super().sweep()

    def close(self) -> None:
        """See `HistoryStore.close`."""
        self._replicator.close(_CLOSE_TIMEOUT_S)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._remote.close()

    def _longer_prefix(
        self,
        turn: StagedTurn,
        prompt: tuple[int, ...],
        candidates: list[tuple[SessionKey, RemoteRecord | None]],
    ) -> RemoteRows | None:
        """The rows after those of memory, from the record in Redis that has most of the prompt; None if none
        has more than memory."""
        start = stop = turn.reused_tokens
        source: tuple[SessionKey, RemoteRecord] | None = None
        for session, record in candidates:
            if record is not None and self._remote.serves(record):
                length = min(common_prefix(record.token_ids, prompt), len(prompt) - 1)
                if length > stop:
                    source, stop = (session, record), length
        if source is None:
            return None
        session, record = source
        return RemoteRows(
            lambda layer: self._fetchers.submit(self._remote.load, session, record, layer, start, stop),
            num_tokens=stop - start,
            num_layers=self._remote.num_layers,
            source="session" if session == turn.session else "document",
            timeout_s=self._turn_timeout_s,
            clock=self._clock,
        )

    def _replicate(self, request: WriteRequest) -> None:
        """Bring a committed turn to Redis. Raises: SessionBusy: another worker's turn committed first."""
        try:
            self._replicator.write(request).result(self._commit_timeout_s)
        except FutureTimeout:
            log.warning(
                "commit goes on without Redis, which is written later", waited_s=self._commit_timeout_s
            )

    def _look_up(self, session: SessionKey) -> tuple[bool, RemoteRecord | None]:
        """Whether Redis could be asked, and the session's record there."""
        if self._replicator.is_deleted(session):
            return True, None
        try:
            return True, self._remote.record(session)
        except StoreUnavailable as error:
            log.debug("Redis could not be asked for history", reason=error.reason)
            return False, None
        except HistoryMiss as miss:
            log.warning("history record in Redis is unusable", reason=miss.reason, error=miss.message)
            self._on_miss(miss.reason)
            return True, None

    def _remote_info(self, session: SessionKey) -> HistoryInfo:
        _, record = self._look_up(session)
        if record is None:
            return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")
        return HistoryInfo(num_tokens=len(record.token_ids), size_bytes=record.size_bytes, tier="redis")
