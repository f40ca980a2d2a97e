"""Session handling around a prompt's pass: begins the staged turn, decides which of decode's retained rows
need not be shipped, and records what was shipped.

Place in the request's path: called on the engine's thread before and after a pass (`prompt_pass.py`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

import structlog

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.job import PrefillJob
from kvferry.services.prefill.prompt_pass import PromptPass
from kvferry.services.prefill.receiver import HistoryReceiver
from kvferry.shared.cache.delta import Positions, RetainedChain, RetainedRows
from kvferry.shared.compression.formats import num_observed_queries
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import MAX_RETAINED_SELECTIONS


@dataclass(frozen=True, kw_only=True, eq=False)
class ShippedSelection:
    """Rows shipped by one transfer. Attributes: as in `RetainedRows`."""

    transfer_id: int
    num_prompt_tokens: int
    layers: tuple[Positions | None, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if layer is not None)

    def retained_rows(self) -> RetainedRows:
        """The rows as decode retains them, for a prompt that begins with all of this one."""
        return RetainedRows(
            transfer_id=self.transfer_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_prompt_tokens,
            layers=self.layers,
        )


_Chain = tuple[ShippedSelection, ...]
"""A session's selections, newest first; each was shipped without rows that older ones have."""


class ShippedSelections:
    """The last selections shipped for each session. Thread-safe.

    When they take too many bytes, the session that was shipped longest ago is removed first.

    Args:
        max_bytes: limit on the bytes of all positions; 0 stores none.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._chains: OrderedDict[SessionKey, _Chain] = OrderedDict()
        self._size_bytes = 0

    def put(
        self, session: SessionKey, selection: ShippedSelection, *, retained: RetainedChain | None
    ) -> None:
        """Record a transfer as the session's newest.

        Args: retained: the rows that were left out of it. Their selections stay recorded if the prompt
            extends the newest one's prompt; all others of the session are removed.
        """
        with self._lock:
            if self._max_bytes == 0:
                return
            chain: _Chain = (selection,)
            if retained is not None and retained.selections[0].is_extended_by(retained.num_tokens):
                chain += self._from(session, retained.transfer_id)[: retained.depth]
            self._forget(session)
            self._chains[session] = chain[:MAX_RETAINED_SELECTIONS]
            self._size_bytes += _size_bytes(self._chains[session])
            while self._size_bytes > self._max_bytes:
                self._forget(next(iter(self._chains)))

    def retained(
        self, session: SessionKey, *, transfer_id: int, num_tokens: int, depth: int
    ) -> RetainedChain | None:
        """The rows that a decode worker retains of this transfer and earlier ones; None if it is unknown.

        Args:
            num_tokens: length of the prefix whose rows are still the same.
            depth: how many transfers' rows the worker retains.
        """
        with self._lock:
            chain = self._from(session, transfer_id)[:depth]
        if not chain or num_tokens == 0:
            return None
        newest, *older = (selection.retained_rows() for selection in chain)
        # Of the newest transfer, decode also retains rows of generated tokens.
        newest = replace(newest, num_tokens=num_tokens)
        return RetainedChain(selections=(newest, *older)).first(depth, num_tokens)

    def drop(self, session: SessionKey) -> None:
        with self._lock:
            self._forget(session)

    def _from(self, session: SessionKey, transfer_id: int) -> _Chain:
        """The chain from this transfer on. Decode may not have retained the newer ones."""
        chain = self._chains.get(session, ())
        known = [selection.transfer_id for selection in chain]
        return chain[known.index(transfer_id) :] if transfer_id in known else ()

    def _forget(self, session: SessionKey) -> None:
        self._size_bytes -= _size_bytes(self._chains.pop(session, ()))


def _size_bytes(chain: _Chain) -> int:
    return sum(selection.size_bytes for selection in chain)


log = structlog.get_logger(__name__)

_SHIPPED_INDEX_BYTES = 256 << 20
"""Host memory for the positions of shipped rows, over all sessions."""


class SessionTurns:
    """Session handling of one engine.

        begin ──► pass ──► end
                   └─ HistoryMiss ──► missed ──► pass over the whole prompt

    Stored history is always loaded, never recomputed. If decode retains rows of the session's last turns that
    equal those of the history, only the other selected rows are shipped ("delta"), otherwise all of them
    ("fetch"). "recompute" means that there was no history, or that loading it failed.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        store: HistoryStore,
        receiver: HistoryReceiver,
        metrics: PrefillMetrics,
        config: PrefillConfig,
    ) -> None:
        self._spec = spec
        self._store = store
        self._receiver = receiver
        self._metrics = metrics
        self._stores_exact_rows = config.history_bits == "model"
        self._shipped = ShippedSelections(max_bytes=_SHIPPED_INDEX_BYTES)

    def begin(self, job: PrefillJob) -> None:
        """Begin the staged turn if the request has a session; the job owns it from now on."""
        request = job.request
        if request.session is None:
            return
        turn = job.turn = self._store.begin(
            request.session,
            request.request_id,
            request.prompt_token_ids,
            method=job.resolved.method,
            document=request.document,
            num_observed=num_observed_queries(job.resolved, job.formats),
            has_history=request.has_history,
        )
        self._receiver.expect(
            request.request_id,
            job.key,
            start=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
        )
        if turn.reused_tokens:
            job.retained = self._retained(job, turn)
            job.history_way = "fetch" if job.retained is None else "delta"
            self._metrics.history_choices.labels(job.history_way, "order").inc()
        elif request.has_history:
            job.history_way = "recompute"

    def missed(self, job: PrefillJob, miss: HistoryMiss) -> None:
        """Count a failed load and restart the staged turn without cached KV."""
        assert job.turn is not None
        log.warning("history miss", request_id=job.request.request_id, reason=miss.reason)
        self._metrics.history_miss.labels(miss.reason).inc()
        job.turn.restart()
        job.history_way = "recompute"
        self._metrics.history_choices.labels("recompute", "miss").inc()

    def end(self, job: PrefillJob, layers: PromptPass) -> None:
        """After the last layer was passed to the sender: record the rows that decode will retain."""
        session = job.request.session
        job.saved_bytes = 2 * self._spec.row_bytes * layers.num_spared_rows
        if session is None:
            return
        if not all(fmt.is_plain for fmt in job.formats):
            self._shipped.drop(session)
            return
        selection = ShippedSelection(
            transfer_id=job.key.transfer_id,
            num_prompt_tokens=job.resolved.num_prompt_tokens,
            layers=tuple(layers.positions[layer] for layer in range(self._spec.num_layers)),
        )
        # Rows recomputed after a miss may differ from those of earlier turns.
        self._shipped.put(
            session, selection, retained=job.retained if job.turn and job.turn.reused_tokens else None
        )

    def forget(self, session: SessionKey) -> None:
        """Forget the rows shipped for a dropped session. Any thread may call this."""
        self._shipped.drop(session)

    def _retained(self, job: PrefillJob, turn: StagedTurn) -> RetainedChain | None:
        """Rows that decode retains from the last turns and that equal the history's rows bit for bit."""
        session, ticket = job.request.session, job.request.ticket
        exact = self._stores_exact_rows and all(fmt.is_plain for fmt in job.formats)
        if session is None or not exact or turn.reuse_source != "session" or ticket.retained_transfer_id == 0:
            return None
        return self._shipped.retained(
            session,
            transfer_id=ticket.retained_transfer_id,
            num_tokens=min(ticket.retained_tokens, turn.reused_tokens),
            depth=ticket.retained_depth,
        )
