"""Two tiers as one store: host memory, hot, over Redis, which outlives the worker.

    begin    the longer common prefix of the two tiers' records wins
    load     rows from memory; what memory lacks from Redis, one layer ahead of the layer that computes, and
             on into memory
    commit   memory first, then Redis: "through" waits for it (a bounded time), "behind" does not

A Redis that is dead, slow, emptied or damaged costs a turn a bounded wait and its stored rows, never the
turn: `load` raises HistoryMiss, and the prompt runs from its token ids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Literal

import structlog
import torch
from torch import Tensor

from kvferry.shared.control.messages import HistoryInfo, ReuseSource, SessionKey
from kvferry.shared.errors import HistoryMiss, StoreUnavailable
from kvferry.shared.history.memory import MemoryHistoryStore
from kvferry.shared.history.precision import LayerKV, RowChunk
from kvferry.shared.history.prefix import common_prefix
from kvferry.shared.history.redis_format import RemoteRecord
from kvferry.shared.history.redis_history import RedisHistory
from kvferry.shared.history.replicator import Replicator, WriteRequest
from kvferry.shared.history.segment import chunk_rows
from kvferry.shared.history.turn import MemoryHistoryTurn

log = structlog.get_logger(__name__)

WriteMode = Literal["through", "behind"]

# The router gives a deletion two seconds; what takes longer is done all the same, later.
_DELETE_WAIT_S = 1.5
_NUM_FETCHERS = 4


class TieredHistoryStore:
    """Implements `HistoryStore`. Thread-safe. Owns the writer's and the fetchers' threads."""

    def __init__(
        self,
        memory: MemoryHistoryStore,
        remote: RedisHistory,
        *,
        write_mode: WriteMode,
        turn_timeout_s: float,
        write_timeout_s: float,
        on_miss: Callable[[str], None],
        on_failure: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Args:
        turn_timeout_s: one turn waits at most so long for rows from Redis, in all.
        write_timeout_s: a commit waits at most so long for Redis, and closing as well.
        on_miss: told the reason where Redis could not be asked, or lacks a session that has had turns, and
            memory does not have it either; misses during `load` are raised instead.
        on_failure: told the reason where Redis did not take a commit.
        clock: monotonic seconds.
        """
        self._memory = memory
        self._remote = remote
        self._write_mode = write_mode
        self._turn_timeout_s = turn_timeout_s
        self._write_timeout_s = write_timeout_s
        self._on_miss = on_miss
        self._clock = clock
        self._lock = threading.Lock()
        self._turns: dict[str, TieredHistoryTurn] = {}
        self._replicator = Replicator(memory, remote, on_failure=on_failure)
        self._fetchers = ThreadPoolExecutor(_NUM_FETCHERS, "kvferry-history-fetch")

    @property
    def size_bytes(self) -> int:
        return self._memory.size_bytes

    @property
    def max_bytes(self) -> int:
        return self._memory.max_bytes

    @property
    def tier_bytes(self) -> dict[str, Callable[[], int]]:
        """See `HistoryStore.tier_bytes`. Redis's is what all workers' sessions took when this one last wrote
        or deleted."""
        return {**self._memory.tier_bytes, "redis": lambda: self._remote.size_bytes}

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
    ) -> TieredHistoryTurn:
        """See `HistoryStore.begin`. Only memory is searched for other sessions' prefixes; a document is
        sought in both."""
        local = self._memory.begin(
            session, request_id, prompt_token_ids, document=document, num_observed=num_observed
        )
        asked, record = self._look_up(session)
        if record is None and self._memory.record(session) is None:
            if not asked:
                self._on_miss("redis_unavailable")
            elif self._replicator.wrote(session):
                self._on_miss("evicted")
            elif has_history:
                self._on_miss("absent")
        sources = [(session, record)]
        if document is not None and asked and local.reuse_source != "document":
            sources.append((document, self._look_up(document)[1]))
        turn = TieredHistoryTurn(
            self, local, [(key, held) for key, held in sources if held and self._remote.serves(held)],
            prompt_token_ids, fence=(record.fence if record else b"") if asked else None, method=method,
        )  # fmt: skip
        with self._lock:
            self._turns[request_id] = turn
        return turn

    def turn(self, request_id: str) -> TieredHistoryTurn | None:
        """See `HistoryStore.turn`."""
        if self._memory.turn(request_id) is None:
            return None
        with self._lock:
            return self._turns.get(request_id)

    def info(self, session: SessionKey) -> HistoryInfo:
        """See `HistoryStore.info`: of memory, else of Redis."""
        info = self._memory.info(session)
        return info if info.num_tokens else self._remote_info(session)

    def drop(self, session: SessionKey) -> HistoryInfo:
        """See `HistoryStore.drop`. Where Redis does not answer, the deletion is done when it does."""
        held = self._memory.drop(session)
        if not held.num_tokens:
            held = self._remote_info(session)
        try:
            self._replicator.delete(session).result(_DELETE_WAIT_S)
        except FutureTimeout:
            log.warning("history in Redis is deleted later")
        return held

    def sweep(self) -> int:
        """See `HistoryStore.sweep`; deletions that Redis has not taken yet are tried again."""
        expired = self._memory.sweep()
        with self._lock:
            over = [name for name in self._turns if self._memory.turn(name) is None]
            for name in over:
                del self._turns[name]
        self._replicator.retry_deletions()
        return expired

    def close(self) -> None:
        """See `HistoryStore.close`."""
        self._replicator.close(self._write_timeout_s)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._remote.close()

    # ---- the turns' side ---------------------------------------------------------------------------------

    @property
    def turn_timeout_s(self) -> float:
        return self._turn_timeout_s

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock

    @property
    def num_layers(self) -> int:
        return self._remote.num_layers

    def fetch(
        self, session: SessionKey, record: RemoteRecord, layer: int, start: int, stop: int
    ) -> Future[list[RowChunk]]:
        """Begin to read a layer's rows from Redis."""
        return self._fetchers.submit(self._remote.load, session, record, layer, start, stop)

    def written(self, request: WriteRequest, request_id: str) -> None:
        """A turn is committed in memory: bring it to Redis. Raises: SessionBusy, where it waits for that."""
        self.over(request_id)
        done = self._replicator.write(request)
        if self._write_mode == "behind":
            return
        try:
            done.result(self._write_timeout_s)
        except FutureTimeout:
            log.warning("history goes to Redis behind its turn", waited_s=self._write_timeout_s)

    def over(self, request_id: str) -> None:
        with self._lock:
            self._turns.pop(request_id, None)

    def _look_up(self, session: SessionKey) -> tuple[bool, RemoteRecord | None]:
        """Whether Redis could be asked, and the session's record there."""
        if self._replicator.is_deleted(session):
            return True, None
        try:
            return True, self._remote.record(session)
        except StoreUnavailable as error:
            log.debug("history not asked for in Redis", reason=error.reason)
            return False, None
        except HistoryMiss as miss:
            log.warning("history record unusable", reason=miss.reason, error=miss.message)
            self._on_miss(miss.reason)
            return True, None

    def _remote_info(self, session: SessionKey) -> HistoryInfo:
        _, record = self._look_up(session)
        if record is None:
            return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")
        return HistoryInfo(num_tokens=len(record.token_ids), size_bytes=record.size_bytes, tier="redis")


class TieredHistoryTurn:
    """Implements `HistoryTurn`: a turn of the memory store that gets rows which memory lacks from Redis.

    tokens   0 ......... m ............. r ........... prompt ....... generated
             memory      Redis, adopted   run            run by decode
    """

    def __init__(
        self,
        store: TieredHistoryStore,
        local: MemoryHistoryTurn,
        sources: Sequence[tuple[SessionKey, RemoteRecord]],
        prompt_token_ids: tuple[int, ...],
        *,
        fence: bytes | None,
        method: str,
    ) -> None:
        self._store = store
        self._local = local
        self._fence = fence
        self._method = method
        self._rebuild = False
        self._start = local.reused_tokens
        shared = [common_prefix(record.token_ids, prompt_token_ids) for _, record in sources]
        longest = max(shared, default=0)
        self._source = sources[shared.index(longest)] if sources else None
        self._stop = max(self._start, min(longest, len(prompt_token_ids) - 1))
        self._waited_s = 0.0
        self._fetched: dict[int, Future[list[RowChunk]]] = {}

    @property
    def session(self) -> SessionKey:
        return self._local.session

    @property
    def request_id(self) -> str:
        return self._local.request_id

    @property
    def reused_tokens(self) -> int:
        return self._stop

    @property
    def reused_by_tier(self) -> dict[str, int]:
        """See `HistoryTurn.reused_by_tier`."""
        return {"memory": self._start, "redis": self._stop - self._start}

    @property
    def reuse_source(self) -> ReuseSource:
        """See `HistoryTurn.reuse_source`."""
        if self._source is None or self._stop == self._start:
            return self._local.reuse_source
        return "session" if self._source[0] == self.session else "document"

    def limit(self, num_tokens: int) -> None:
        """See `HistoryTurn.limit`. What Redis has of the session stays."""
        if num_tokens < self._start:
            self._local.limit(num_tokens)
        self._start = min(self._start, num_tokens)
        self._stop = min(self._stop, num_tokens)

    def load(self, layer: int) -> LayerKV | None:
        """See `HistoryTurn.load`. Starts reading the next layer."""
        if self._stop == 0:
            return None
        local = self._local.load(layer)
        if self._stop == self._start:
            return local
        chunks = self._chunks(layer)
        self._local.adopt(layer, chunks)
        keys, values = chunk_rows(chunks)
        if local is None:
            return keys, values
        return torch.cat([local[0], keys], dim=1), torch.cat([local[1], values], dim=1)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `HistoryTurn.append`."""
        self._local.append(layer, keys, values)

    def restart(self) -> None:
        """See `HistoryTurn.restart`. What Redis has of the session gives way at the commit."""
        self._forget_fetches()
        self._local.restart()
        self._rebuild = self._rebuild or self._stop > self._start
        self._start = self._stop = 0

    def commit(self, token_ids: tuple[int, ...]) -> HistoryInfo:
        """See `HistoryTurn.commit`; SessionBusy also where another worker's turn committed first."""
        self._forget_fetches()
        info = self._local.commit(token_ids)
        request = WriteRequest(
            session=self.session, fence=self._fence, rebuild=self._rebuild, method=self._method
        )
        self._store.written(request, self.request_id)
        return info

    def abort(self) -> None:
        """See `HistoryTurn.abort`."""
        self._forget_fetches()
        self._local.abort()
        self._store.over(self.request_id)

    def _chunks(self, layer: int) -> list[RowChunk]:
        fetch = self._fetched.pop(layer, None) or self._fetch(layer)
        if layer + 1 < self._store.num_layers and layer + 1 not in self._fetched:
            self._fetched[layer + 1] = self._fetch(layer + 1)
        begin_s = self._store.clock()
        try:
            return fetch.result(max(0.0, self._store.turn_timeout_s - self._waited_s))
        except FutureTimeout:
            raise HistoryMiss(
                f"Redis did not give layer {layer} in time; a turn waits {self._store.turn_timeout_s:g} s",
                reason="redis_slow",
            ) from None
        except StoreUnavailable as error:
            raise HistoryMiss(error.message, reason="redis_unavailable") from error
        finally:
            self._waited_s += self._store.clock() - begin_s

    def _fetch(self, layer: int) -> Future[list[RowChunk]]:
        assert self._source is not None
        session, record = self._source
        return self._store.fetch(session, record, layer, self._start, self._stop)

    def _forget_fetches(self) -> None:
        for fetch in self._fetched.values():
            fetch.cancel()
        self._fetched.clear()
