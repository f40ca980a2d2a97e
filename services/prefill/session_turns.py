"""What the engine does for a session around a prompt's pass: begins the staged turn, decides what history and
decode's retained rows are used for, and remembers what was shipped.

Place in the request's path: called on the engine's thread before a prompt's pass and after it. It does not
run the model, ship anything or commit.
"""

from __future__ import annotations

import structlog

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.job import PrefillJob
from kvferry.services.prefill.prompt_pass import PromptPass
from kvferry.services.prefill.receiver import HistoryReceiver
from kvferry.services.prefill.shipped import ShippedSelection, ShippedSelections
from kvferry.shared.cache.delta import RetainedChain
from kvferry.shared.compression.formats import num_observed_queries
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.spec import ModelSpec

log = structlog.get_logger(__name__)

_SHIPPED_INDEX_BYTES = 256 << 20
"""Host memory for the positions that each session's decode worker was last sent."""


class SessionTurns:
    """The sessions of one engine.

    begin ──► pass ──► end
               └─ HistoryMiss ──► missed ──► pass over the whole prompt

    History that is stored is always used: its rows are loaded, not computed again. If decode still has rows
    of the session's last turns as history would give them, only the others are shipped ("delta"); otherwise
    all of the selection is ("fetch"). "recompute" means that nothing was stored, or that it turned out to be
    gone.
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
        """Begin the staged turn if the request has a session; the job owns it from here on."""
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
        """After the last layer was handed to the sender: remember which rows decode will have."""
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
        # Rows that were computed again after a miss need not equal those of earlier turns.
        self._shipped.put(
            session, selection, retained=job.retained if job.turn and job.turn.reused_tokens else None
        )

    def forget(self, session: SessionKey) -> None:
        """Forget what was shipped for a dropped session. Any thread may call this."""
        self._shipped.drop(session)

    def _retained(self, job: PrefillJob, turn: StagedTurn) -> RetainedChain | None:
        """Rows that decode retains from the last turns and that equal, bit for bit, what history would
        give."""
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
