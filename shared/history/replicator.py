"""Brings committed sessions from host memory to Redis, and deletions as well: one thread, in order.

    commit ──► queue(session) ──► newest record in memory, record in Redis ──► rows that Redis lacks, new
    record
    drop   ──► queue(session) ──► delete; if Redis does not answer, retried at each sweep

Several commits of one session that wait together become one write. A record in Redis that is neither the one
which the turn began from nor one that this worker wrote belongs to another worker's turn: the commit is
refused, and the session is evicted from memory here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss, KvferryError, SessionBusy
from kvferry.shared.history.prefix import common_prefix
from kvferry.shared.history.records import StoredRecord
from kvferry.shared.history.redis_format import RemoteRecord
from kvferry.shared.history.redis_history import RedisHistory
from kvferry.shared.history.rows import part_of, piece_chunks
from kvferry.shared.history.store import HistoryStore

log = structlog.get_logger(__name__)

_MAX_REMEMBERED = 65_536


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """What a committed turn knows about Redis.

    Attributes:
        fence: of the record that it began from; b"" if there was none, None if Redis did not answer.
        rebuild: rows that Redis should have had were missing, so that nothing of its record may be reused.
    """

    session: SessionKey
    fence: bytes | None
    rebuild: bool
    method: str


class Replicator:
    """Thread-safe. `on_failure` is called on its thread with a reason for each commit that Redis did not
    take."""

    def __init__(
        self, memory: HistoryStore, remote: RedisHistory, *, on_failure: Callable[[str], None]
    ) -> None:
        self._memory = memory
        self._remote = remote
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._fences: OrderedDict[SessionKey, bytes] = OrderedDict()
        self._rebuilds: set[SessionKey] = set()
        self._deletions: OrderedDict[SessionKey, None] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "kvferry-history-writer")

    def is_deleted(self, session: SessionKey) -> bool:
        """Whether the session is to be deleted from Redis and may not be yet."""
        with self._lock:
            return session in self._deletions

    def wrote(self, session: SessionKey) -> bool:
        """Whether this worker has written the session, which was not deleted since."""
        with self._lock:
            return session in self._fences

    def write(self, request: WriteRequest) -> Future[None]:
        """Queue a committed turn. The future raises SessionBusy if another worker's turn came first; other
        failures only call `on_failure`."""
        with self._lock:
            if request.rebuild:
                self._rebuilds.add(request.session)
        return self._thread.submit(self._write, request)

    def delete(self, session: SessionKey) -> Future[None]:
        """Queue a deletion, which is remembered until it is done."""
        with self._lock:
            self._deletions[session] = None
            self._fences.pop(session, None)
            while len(self._deletions) > _MAX_REMEMBERED:
                self._deletions.popitem(last=False)
        return self._thread.submit(self._delete, session)

    def retry_deletions(self) -> None:
        """Queue the pending deletions again, oldest first, until one fails."""
        if self._deletions:
            self._thread.submit(self._delete_all)

    def close(self, timeout_s: float) -> None:
        """Wait this long for the queue, then drop the rest. Idempotent."""
        try:
            self._thread.submit(lambda: None).result(timeout_s)
        except RuntimeError:
            return  # already closed
        except TimeoutError:
            log.warning("history not written to Redis at shutdown", timeout_s=timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- the writer's thread -----------------------------------------------------------------------------

    def _write(self, request: WriteRequest) -> None:
        session = request.session
        try:
            if self.is_deleted(session):
                self._delete(session)
            with self._memory.pinned(session) as record:
                if record is not None and not self.is_deleted(session):
                    self._bring(request, record)
        except SessionBusy:
            self._memory.evict(session)
            self._on_failure("fenced")
            raise
        except KvferryError as error:
            log.warning("history not written to Redis", reason=error.reason, error=error.message)
            self._on_failure(error.reason)
        except Exception:
            log.exception("history not written to Redis")
            self._on_failure("internal")

    def _bring(self, request: WriteRequest, record: StoredRecord) -> None:
        session = request.session
        try:
            self._bring_onto(request, record, self._base(request))
        except HistoryMiss:
            # The base is damaged or partly gone: a whole copy replaces it.
            self._remote.delete(session)
            self._bring_onto(request, record, None)

    def _base(self, request: WriteRequest) -> RemoteRecord | None:
        """The record in Redis, if the turn may replace it."""
        session = request.session
        base = self._remote.record(session)
        with self._lock:
            known = {fence for fence in (request.fence, self._fences.get(session)) if fence is not None}
        if base is not None and known and base.fence not in known:
            raise SessionBusy(f"session {session.session_id!r} was changed by another turn", reason="fenced")
        return base

    def _bring_onto(self, request: WriteRequest, record: StoredRecord, base: RemoteRecord | None) -> None:
        session = request.session
        with self._lock:
            rebuild = session in self._rebuilds
        num_base_tokens = 0
        if base is not None and self._remote.serves(base) and not rebuild:
            num_base_tokens = common_prefix(base.token_ids, record.token_ids)
            if num_base_tokens == len(record.token_ids):
                self._remote.touch(session, base)
                self._remember(session, base.fence)
                return
        written = self._remote.write(
            session,
            base=base,
            num_base_tokens=num_base_tokens,
            token_ids=record.token_ids,
            layers=[
                part_of(piece_chunks(record.pieces, layer), num_base_tokens, len(record.token_ids))
                for layer in range(self._remote.num_layers)
            ],
            method=request.method,
        )
        self._remember(session, written.fence)

    def _remember(self, session: SessionKey, fence: bytes) -> None:
        with self._lock:
            self._rebuilds.discard(session)
            self._fences[session] = fence
            self._fences.move_to_end(session)
            while len(self._fences) > _MAX_REMEMBERED:
                self._fences.popitem(last=False)

    def _delete(self, session: SessionKey) -> None:
        if not self.is_deleted(session):
            return
        try:
            self._remote.delete(session)
        except KvferryError as error:
            log.warning("history not deleted in Redis yet", reason=error.reason, error=error.message)
            return
        with self._lock:
            self._deletions.pop(session, None)

    def _delete_all(self) -> None:
        with self._lock:
            waiting = list(self._deletions)
        for session in waiting:
            self._delete(session)
            if self.is_deleted(session):
                return
