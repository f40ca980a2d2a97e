"""What becomes of a finished sequence's KV. Last stage of a request.

RETURNING ──► a copy of the generated rows goes to prefill, for the session's history
    └───────► the bytes stay, so that the session's next transfer can leave their rows out; or are freed
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.parts import Parts, RetainedPart, retained_layout
from kvferry.services.decode.sequence import Pinned, Sequence, SequenceState
from kvferry.shared.cache.arena import Allocation, ByteArena
from kvferry.shared.cache.delta import RetainedChain, RetainedRows
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.control.messages import HistoryReturned, SessionKey, Ticket
from kvferry.shared.errors import CapacityExceeded, KvferryError
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import MAX_RETAINED_SELECTIONS, EndRecord, Manifest, NamedTensor
from kvferry.shared.wire.receiver import model_fields
from kvferry.shared.wire.sender import BlockSender

_MAX_ENDPOINTS = 64
"""Prefill workers for which threads stay."""
_log = structlog.get_logger(__name__)
_SHRINK_BELOW = 0.75
"""An older selection is copied to less memory once it needs at most this part of what it has."""


@dataclass(eq=False, kw_only=True)
class RetainedSelection:
    """The rows in the arena after one turn of a session.

    Attributes:
        retained: the prompt's rows, and those of generated tokens, of all heads; its `num_tokens` are all of
            them.
        token_ids: int64, of the tokens that have rows.
        part: rank 0's.
        allocation: its bytes; less once rows that newer selections have are dropped from an older one.
        num_users: reservations that pin it; its bytes are not freed while there are any.
        listed: whether new reservations can still find it.
        is_settled: whether `shrink` has looked at it.
    """

    session: SessionKey
    retained: RetainedRows
    token_ids: npt.NDArray[np.int64]
    part: RetainedPart
    allocation: Allocation
    num_users: int = 0
    listed: bool = True
    is_settled: bool = False

    @property
    def name(self) -> int:
        """The name by which the ranks know it."""
        return self.retained.transfer_id

    @property
    def is_unused(self) -> bool:
        """True if its bytes can be freed: nobody uses it, and nobody can find it."""
        return not self.listed and self.num_users == 0

    def num_common_tokens(self, prompt_token_ids: tuple[int, ...]) -> int:
        """Count the tokens of the common prefix of the prompt and this selection."""
        prompt = np.asarray(prompt_token_ids, np.int64)
        length = min(len(prompt), len(self.token_ids))
        differs = np.flatnonzero(prompt[:length] != self.token_ids[:length])
        return int(differs[0]) if differs.size else length

    def is_extended_by(self, manifest: Manifest) -> bool:
        """Return whether the transfer left out these rows and its prompt begins with this whole prompt."""
        left_out = manifest.retained_transfer_id == self.retained.transfer_id
        return left_out and self.retained.is_extended_by(manifest.retained_tokens)


@dataclass(eq=False, kw_only=True)
class _Chain:
    """A session's selections, newest first; each was shipped without rows that older ones have."""

    selections: list[RetainedSelection]
    lease_until_s: float

    @property
    def is_unproven(self) -> bool:
        """True for a prompt without a session id that no request has continued: most are never continued."""
        return len(self.selections) == 1 and self.selections[0].session.is_implicit


class RetainedSelections:
    """The selections of all sessions, at most `MAX_RETAINED_SELECTIONS` per session. Thread-safe.

        RETURNING ─retain──► listed ──lease, drop, evict, not extended──► freed
                              │ pin ▲ unpin                │ pinned: unlisted, freed at the last unpin
                              └─► pinned ──────────────────┘

    Rows that the next selection of its session has, too, are dropped from a selection: `shrink` copies the
    others to less memory, with as many rows in each head as in the one with most. Then the oldest ones are
    dropped until all but the newest take at most the bytes of its prompt's whole KV.

    Eviction begins with prompts without a session id that none has continued, then takes the oldest selection
    of the least recently used session. It skips pinned ones.

    Args:
        retain_s: how long a session's selections stay after a turn; 0 retains none.
        release: frees bytes and grants them to waiting requests; called without this object's lock.

    Attributes: has_grown: set when there is something to `shrink`, whose caller clears it.
    """

    def __init__(
        self,
        parts: Parts,
        arena: ByteArena,
        *,
        retain_s: float,
        clock: Callable[[], float],
        release: Callable[[Allocation], None],
    ) -> None:
        self._parts = parts
        self._arena = arena
        self._retain_s = retain_s
        self._clock = clock
        self._release = release
        self._lock = threading.RLock()
        self._chains: dict[SessionKey, _Chain] = {}
        self.has_grown = threading.Event()

    @property
    def spare_bytes(self) -> int:
        """Bytes of unpinned selections, which eviction can free."""
        with self._lock:
            every = [selection for chain in self._chains.values() for selection in chain.selections]
            return sum([each.allocation.size_bytes for each in every if each.num_users == 0])

    def retain(self, sequence: Sequence) -> bool:
        """Retain a finished sequence's bytes. Returns False, and takes nothing, if they cannot be reused."""
        session, manifest = sequence.request.session, sequence.manifest
        with sequence.lock:
            if (
                session is None
                or manifest is None
                or self._retain_s == 0
                or sequence.cancelled
                or not sequence.is_in_arena
                or sequence.state is not SequenceState.RETURNING
                or len(sequence.positions) != len(sequence.caches)
            ):
                return False
            num_tokens = sequence.resolved.num_prompt_tokens + sequence.num_appended
            token_ids = (*sequence.request.prompt_token_ids, *sequence.token_ids)[:num_tokens]
            rows = RetainedRows(
                transfer_id=sequence.name,
                num_prompt_tokens=sequence.resolved.num_prompt_tokens,
                num_tokens=num_tokens,
                layers=sequence.positions,
            )
            allocation = sequence.hand_over_bytes()
            selection = RetainedSelection(
                session=session,
                retained=rows,
                token_ids=np.asarray(token_ids, np.int64),
                part=self._parts.call("retain", sequence.name, rows),
                allocation=allocation,
            )
        self._arena.advance(selection.allocation, "retained")
        with self._lock:
            former = self._chains.pop(session, None)
            earlier = former.selections if former is not None else []
            stays = bool(earlier) and earlier[0].is_extended_by(manifest)
            selections = [selection, *earlier][: MAX_RETAINED_SELECTIONS if stays else 1]
            lease_until_s = self._clock() + self._retain_s
            self._chains[session] = _Chain(selections=selections, lease_until_s=lease_until_s)
            freed = self._unlist(earlier[len(selections) - 1 :])
        self._free(freed)
        self.has_grown.set()
        return True

    def pin(self, session: SessionKey | None, prompt_token_ids: tuple[int, ...]) -> Pinned | None:
        """Pin the session's rows that the prompt can reuse; None if there are none."""
        with self._lock:
            found = self._chains.get(session) if session is not None else None
            selections = tuple(found.selections) if found is not None else ()
            num_tokens = selections[0].num_common_tokens(prompt_token_ids) if selections else 0
            if num_tokens == 0:
                return None
            for selection in selections:
                selection.num_users += 1
        chain = RetainedChain(selections=tuple(each.retained for each in selections))
        return Pinned(chain=chain.first(chain.depth, num_tokens), unpin=lambda: self._unpin(selections))

    def touch(self, session: SessionKey | None) -> None:
        """Mark the session as most recently used, so that its selections are evicted last."""
        with self._lock:
            if session is not None and (chain := self._chains.pop(session, None)) is not None:
                self._chains[session] = chain

    def drop(self, session: SessionKey | None, *, transfer_id: int | None = None) -> int:
        """Drop a session's selections; with `transfer_id`, only if the newest one is of that transfer.
        Returns the bytes of those that were dropped."""
        with self._lock:
            chain = self._chains.get(session) if session is not None else None
            if session is None or chain is None or transfer_id not in (None, chain.selections[0].name):
                return 0
            del self._chains[session]
            freed = self._unlist(chain.selections)
        self._free(freed)
        return sum(selection.allocation.size_bytes for selection in chain.selections)

    def expire(self) -> None:
        """Drop the sessions whose lease has ended."""
        now_s = self._clock()
        with self._lock:
            due = [session for session, chain in self._chains.items() if chain.lease_until_s <= now_s]
            freed = [gone for session in due for gone in self._unlist(self._chains.pop(session).selections)]
        self._free(freed)

    def evict(self, wanted_bytes: int) -> bool:
        """Free the oldest selection of the least recently used session that is not pinned, without granting
        waiting requests, which the caller does.

        Returns: whether one was freed; False also if all free and unpinned bytes together are too few.
        """
        with self._lock:
            if self._arena.free_bytes + self.spare_bytes < wanted_bytes:
                return False
            unpinned = [
                candidate for candidate in self._chains.values() if candidate.selections[-1].num_users == 0
            ]
            if not unpinned:
                return False
            spare = next((candidate for candidate in unpinned if candidate.is_unproven), unpinned[0])
            selection = spare.selections.pop()
            selection.listed = False
            if not spare.selections:
                del self._chains[selection.session]
        self._parts.drop_retained(selection.name)
        self._arena.free(selection.allocation)
        return True

    def shrink(self) -> None:
        """Free rows that two selections have, and old selections where there are too many. For one thread."""
        with self._lock:
            chains = [tuple(chain.selections) for chain in self._chains.values() if len(chain.selections) > 1]
        for selections in chains:
            for newer, older in itertools.pairwise(selections):
                if not older.is_settled:
                    older.is_settled = self._shrink(older, newer.retained)
            if all(selection.is_settled for selection in selections[1:]):
                self._limit(selections[0])

    def _limit(self, newest: RetainedSelection) -> None:
        with self._lock:
            chain = self._chains.get(newest.session)
            if chain is None or chain.selections[0] is not newest:
                return
            older_bytes = sum(selection.allocation.size_bytes for selection in chain.selections[1:])
            num_kept = len(chain.selections)
            while older_bytes > newest.part.whole_bytes:
                num_kept -= 1
                older_bytes -= chain.selections[num_kept].allocation.size_bytes
            freed = self._unlist(chain.selections[num_kept:])
            del chain.selections[num_kept:]
        self._free(freed)

    def close(self) -> None:
        for session in tuple(self._chains):
            self.drop(session)

    def _shrink(self, selection: RetainedSelection, newer: RetainedRows) -> bool:
        """Free rows that `newer` has. Returns: False if that must wait: it is pinned, or memory is full."""
        left, numbers = selection.retained.left(newer)
        num_own = self._parts.spec.num_kv_heads
        _, size_bytes = retained_layout(
            selection.part.rows, [layer_numbers[:num_own] for layer_numbers in numbers]
        )
        if self._arena.needed_bytes(size_bytes) > _SHRINK_BELOW * selection.allocation.size_bytes:
            return True
        with self._lock:
            if not selection.listed:
                return True
            if selection.num_users:
                return False
            former = selection.allocation
            try:
                selection.allocation = self._arena.reserve(size_bytes, owner=former.owner, state="retained")
            except CapacityExceeded:
                return False
            selection.retained = left
            self._parts.call("shrink", selection.name, selection.allocation, left, numbers)
        self._release(former)
        return True

    def _unpin(self, selections: tuple[RetainedSelection, ...]) -> None:
        with self._lock:
            for selection in selections:
                selection.num_users -= 1
            freed = [selection for selection in selections if selection.is_unused]
        self._free(freed)

    def _unlist(self, selections: list[RetainedSelection]) -> list[RetainedSelection]:
        """Hide these from new reservations; returns the unpinned ones, whose bytes can be freed now."""
        for selection in selections:
            selection.listed = False
        return [selection for selection in selections if selection.is_unused]

    def _free(self, selections: list[RetainedSelection]) -> None:
        for selection in selections:
            self._parts.drop_retained(selection.name)
            self._release(selection.allocation)


class HistoryReturner:
    """Threads that return the generated tokens' KV of finished sequences to prefill, some for each prefill
    worker, so that one that stalls delays no session of another.

    Rows are first copied to the host (those packed during decode were copied then), and the arena bytes are
    released or retained, so a slow peer blocks no decode memory; a sequence that waits for a thread still
    occupies its arena bytes. If a return fails, the next turn prefills these tokens again; the client does
    not see an error.

    Args: retained: takes over a sequence's bytes if its session's next turn can reuse them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parts: Parts,
        sender: BlockSender,
        retained: RetainedSelections,
        config: DecodeConfig,
    ) -> None:
        self._parts = parts
        self._retained = retained
        self._spec = spec
        self._sender = sender
        self._num_threads = config.history_threads
        self._timeout_s = config.history_timeout_s
        """Limit on each wait for room in the send buffer, and on the wait for the acknowledgement."""
        self._lock = threading.Lock()
        self._pools: OrderedDict[str, ThreadPoolExecutor] = OrderedDict()
        """By the prefill worker's endpoint, the least recently used first."""

    def submit(self, sequence: Sequence) -> None:
        """Retain what a RETURNING sequence has, return its generated KV if that is stored, then close it."""
        manifest = sequence.manifest
        if sequence.num_appended == 0 or manifest is None or not manifest.history_endpoint:
            self._retained.retain(sequence)
            self._end(sequence, num_tokens=0)
            return
        endpoint = manifest.history_endpoint
        with self._lock:
            pool = self._pools.pop(endpoint, None)
            if pool is None:
                pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="kvferry-history-return")
            self._pools[endpoint] = pool
            if len(self._pools) > _MAX_ENDPOINTS:
                # its returns go on; its threads end after them
                self._pools.popitem(last=False)[1].shutdown(wait=False)
            pool.submit(self._return, sequence, manifest)

    def close(self) -> None:
        """End the threads and the sender. Drops returns that have not begun. Cancel all sequences first.
        Idempotent."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)
        self._sender.close()

    def _return(self, sequence: Sequence, manifest: Manifest) -> None:
        num_tokens = 0
        try:
            with self._parts.returning:
                with sequence.lock:
                    if sequence.state is SequenceState.CLOSED:
                        return
                    returned = self._parts.returned(sequence.name, sequence.num_appended)
                    if not self._retained.retain(sequence):
                        sequence.release_bytes()
                layers = returned()
            self._ship(sequence, manifest, layers)
            num_tokens = sequence.num_appended
        except KvferryError as error:
            _log.warning("history not returned", request_id=sequence.request.request_id, error=error.message)
        except Exception:
            _log.exception("history not returned", request_id=sequence.request.request_id)
        finally:
            if num_tokens == 0:
                self._retained.drop(sequence.request.session, transfer_id=sequence.name)
            self._end(sequence, num_tokens=num_tokens)

    def _end(self, sequence: Sequence, *, num_tokens: int) -> None:
        if sequence.close() and sequence.request.store_history:
            sequence.events.put(HistoryReturned(num_tokens=num_tokens))

    def _ship(self, sequence: Sequence, manifest: Manifest, layers: list[Tensors]) -> None:
        ticket = Ticket(
            endpoint=manifest.history_endpoint,
            transfer_id=manifest.key.transfer_id,
            generation=manifest.key.generation,
            credit_bytes=manifest.history_credit_bytes,
            lease_s=self._timeout_s,
            reserved_bytes=0,
        )
        returned = Manifest(
            purpose="history",
            key=manifest.key,
            request_id=sequence.request.request_id,
            **model_fields(self._spec),
            start=sequence.resolved.num_prompt_tokens,
            num_tokens=sequence.num_appended,
        )
        outgoing = self._sender.open(ticket, returned, timeout_s=self._timeout_s)
        with sequence.lock:
            sequence.outgoing = outgoing
            if sequence.cancelled:
                outgoing.abort("the request was cancelled")
        try:
            for layer, tensors in enumerate(layers):
                kind = "rows" if self._spec.layer(layer).has_rows else "state"
                outgoing.send_layer(
                    layer,
                    [NamedTensor(name=name, tensor=tensor, kind=kind) for name, tensor in tensors.items()],
                )
            outgoing.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
            outgoing.wait(self._timeout_s)
        finally:
            outgoing.abort("the return failed")  # no effect once acknowledged
        sent_bytes = outgoing.bytes_by_kind["rows"] + outgoing.bytes_by_kind["state"]
        sequence.metrics.history_returned_bytes.labels(self._spec.name).inc(sent_bytes)
