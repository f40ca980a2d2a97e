"""A session's turn at the engine: how it begins, what is learnt of it, and what is remembered at its end.

Place in the request's path: called on the engine's thread before a prompt's pass and after it. Decides with
`history_cost.py` what the turn reuses, and knows with `shipped.py` what decode holds. Runs nothing, ships
nothing and does not commit.
"""

from __future__ import annotations

import structlog

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.history_cost import HistoryCosts, Shipment, TurnOutlook
from kvferry.services.prefill.job import PrefillJob
from kvferry.services.prefill.prompt_pass import PassTimes, PromptPass
from kvferry.services.prefill.receiver import HistoryReceiver
from kvferry.services.prefill.shipped import ShippedSelection, ShippedSelections
from kvferry.shared.compression.observation import num_observed_queries
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.interface import HistoryStore, HistoryTurn
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.held_rows import HeldSelections, ships_rows_alone

log = structlog.get_logger(__name__)


class SessionTurns:
    """The engine's side of all sessions.

    begin ──► pass ──► ran ──► end ──► (decode has all) shipped
               └─ HistoryMiss ──► missed ──► pass, from nothing
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        store: HistoryStore,
        receiver: HistoryReceiver,
        metrics: PrefillMetrics,
        config: PrefillConfig,
        costs: HistoryCosts,
    ) -> None:
        self._spec = spec
        self._store = store
        self._receiver = receiver
        self._metrics = metrics
        self._config = config
        self._costs = costs
        self._shipped = ShippedSelections(max_bytes=config.delta_index_bytes)

    def begin(self, job: PrefillJob) -> None:
        """Begin the turn, if there is a session, and choose its way; from here on the job owns it."""
        request = job.request
        if request.session is None:
            return
        job.turn = self._store.begin(
            request.session,
            request.request_id,
            request.prompt_token_ids,
            method=job.resolved.method,
            document=request.document,
            num_observed=num_observed_queries(job.resolved),
            has_history=request.has_history,
        )
        self._receiver.expect(
            request.request_id,
            job.key,
            start=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
        )
        self._choose(job, job.turn)

    def missed(self, job: PrefillJob, miss: HistoryMiss, times: PassTimes) -> None:
        """The turn's history is gone: what it waited for it counts, and the turn continues from nothing."""
        assert job.turn is not None
        log.warning("history miss", request_id=job.request.request_id, reason=miss.reason)
        self._metrics.history_miss.labels(miss.reason).inc()
        if miss.reason == "redis_slow":
            self._costs.loaded(tuple(job.turn.reused_by_tier.items()), seconds=times.history_load_s)
        job.turn.restart()
        job.history_way = "recompute"
        self._metrics.history_choices.labels("recompute", "miss").inc()

    def ran(self, job: PrefillJob, times: PassTimes) -> None:
        """The prompt's pass is over, and its selection serialised."""
        num_prompt_tokens = job.resolved.num_prompt_tokens
        reused = job.turn.reused_tokens if job.turn is not None else 0
        self._costs.ran(num_prompt_tokens - reused, num_prompt_tokens=num_prompt_tokens, seconds=times.run_s)
        if job.turn is not None and reused:
            self._costs.loaded(tuple(job.turn.reused_by_tier.items()), seconds=times.history_load_s)
        self._costs.packed(self._row_bytes(job), _shipment(job), seconds=times.pack_s)

    def end(self, job: PrefillJob, layers: PromptPass) -> None:
        """All is shipped: which rows decode has from now on, and what was spared."""
        session = job.request.session
        job.saved_bytes = 2 * self._spec.row_bytes * layers.num_spared_rows
        if session is None:
            return
        if not ships_rows_alone(self._spec, job.resolved):
            self._shipped.drop(session)
            return
        selection = ShippedSelection(
            transfer_id=job.key.transfer_id,
            num_prompt_tokens=job.resolved.num_prompt_tokens,
            layers=tuple(layers.positions[layer] for layer in range(self._spec.num_layers)),
        )
        # Rows that were computed again in the midst of it need not be those of the turns before.
        self._shipped.put(session, selection, held=job.held if job.turn and job.turn.reused_tokens else None)

    def shipped(self, job: PrefillJob, *, size_bytes: int, transfer_s: float) -> None:
        """Any thread: decode has acknowledged it all."""
        self._costs.shipped(
            job.resolved.method,
            self._row_bytes(job),
            _shipment(job),
            size_bytes=size_bytes,
            seconds=transfer_s,
        )

    def forget(self, session: SessionKey) -> None:
        """Any thread: the session is dropped."""
        self._shipped.drop(session)

    def _choose(self, job: PrefillJob, turn: HistoryTurn) -> None:
        """Settle what of its history the turn loads, and which rows it need not ship."""
        held = self._held(job, turn)
        outlook = TurnOutlook(
            num_prompt_tokens=job.resolved.num_prompt_tokens,
            tiers=tuple(turn.reused_by_tier.items()),
            decode_holds=held is not None,
            method=job.resolved.method,
            row_bytes=self._row_bytes(job),
        )
        if not outlook.num_held_tokens:
            job.history_way = "recompute" if job.request.has_history else None
            return
        choice = self._costs.choose(outlook, by_cost=self._config.history_choice == "cost")
        if choice.reused_tokens < turn.reused_tokens:
            turn.limit(choice.reused_tokens)
            held = self._held(job, turn)
        job.held = None if choice.way == "fetch" else held
        job.history_way = choice.way
        self._metrics.history_choices.labels(choice.way, "cost" if choice.by_cost else "order").inc()

    def _row_bytes(self, job: PrefillJob) -> int:
        """Of the rows that the plan keeps, were they shipped as rows."""
        num_rows = sum(layer.rows for layer in job.resolved.layers)
        return 2 * self._spec.num_kv_heads * self._spec.row_bytes * num_rows

    def _held(self, job: PrefillJob, turn: HistoryTurn) -> HeldSelections | None:
        """Rows that decode has of the last turns, and that history would give again, bit for bit."""
        session, ticket = job.request.session, job.request.ticket
        exact = self._config.history_bits == "model" and ships_rows_alone(self._spec, job.resolved)
        exact = exact and turn.reuse_source == "session"
        if session is None or not exact or ticket.held_transfer_id == 0:
            return None
        return self._shipped.held(
            session,
            transfer_id=ticket.held_transfer_id,
            num_tokens=min(ticket.held_tokens, turn.reused_tokens),
            depth=ticket.held_depth,
        )


def _shipment(job: PrefillJob) -> Shipment:
    return "whole" if job.held is None else "delta"
