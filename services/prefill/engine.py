"""The prefill engine: one thread that owns the model and runs prompts; a short one overtakes a long one.

Place in the request's path: between the service, which submits jobs on the event loop and awaits their first
token, and the block sender, whose own thread ships each layer while the next is computed. The service waits
for the acknowledgement, and commits history when the router asks for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from functools import partial

import structlog
import torch

from kvferry.kernels.quarantine import is_lost
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.host_copies import host_copies
from kvferry.services.prefill.job import PrefillJob, PromptLogprobs, SessionTurns, Shipped
from kvferry.services.prefill.parts import PrefillRanks
from kvferry.services.prefill.prompt_pass import PassTimes, PromptPass
from kvferry.services.prefill.schedule import MAX_STARTED, Pauses, Schedule, Started
from kvferry.services.prefill.turns import HistoryReceiver
from kvferry.shared.compression.draft_steps import DraftSteps
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.kept import kept_fractions
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, plan_digest, repeats_prompt
from kvferry.shared.compression.rdkv.epsilon import stand_in
from kvferry.shared.control.messages import FirstToken, TokenGenerated
from kvferry.shared.device.cuda_device import step_device
from kvferry.shared.device.warm_up import CollectingPass, needs_warm_up, shown_progress, warm_prefill
from kvferry.shared.errors import CapacityExceeded, KvferryError, WorkerUnavailable
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.process.freeing_rate import LONGEST_S
from kvferry.shared.process.heartbeat import Heartbeat
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry.metrics import PrefillMetrics
from kvferry.shared.telemetry.tracing import carrier, stage
from kvferry.shared.wire.messages import EndRecord, Manifest
from kvferry.shared.wire.receiver import model_fields

log = structlog.get_logger(__name__)

_JOIN_TIMEOUT_S = 30.0
_LOOK_INTERVAL_S = 0.002
"""How often a running pass looks whether another prompt overtakes it."""
_PROBE_INTERVAL_S = 30.0
"""An idle engine runs one token this often to check that it works."""
_READY_TIMEOUT_S = 120.0
"""The worker is not ready if no layer and no probe has finished for this long."""
_PROJECTIONS = 4
"""A token's projections take about as long as attending to this many times the layer's width of tokens."""
_HISTORY_CREDIT_BYTES = 64 << 20
"""Credit for one turn's returned KV."""


class PrefillEngine:
    """Runs jobs on one thread, in the order of `schedule.py`.

        submit ──► waiting ──► run: begin turn, open transfer ──► layers ──► sample ──► end record ──► shipped
                                    │ error or cancelled
                                    └──► transfer aborted, turn dropped, error raised by `shipped`

    If the plan measures its layer budgets, the transfer is opened after the last layer.

    Between any two operations of a long pass a job that overtakes it is run to its end, as a call within
    that pass (`_pause`). So no pass is computed differently from one that runs alone, whatever its method,
    and those in mid-pass are a stack. A job that ends with an error ends in its own call.

    An idle engine runs one token every `_PROBE_INTERVAL_S`. It is ready if a layer or a probe has finished
    within the last `_READY_TIMEOUT_S`.
    """

    def __init__(
        self,
        *,
        model: LanguageModel,
        store: HistoryStore,
        ranks: PrefillRanks,
        receiver: HistoryReceiver,
        metrics: PrefillMetrics,
        config: PrefillConfig,
        clock: Callable[[], float],
        on_device_lost: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._ranks = ranks
        self._on_device_lost = on_device_lost
        self._model = model
        self._receiver = receiver
        self._metrics = metrics
        self._config = config
        self._clock = clock
        self._next_look_s = 0.0
        self._copies = host_copies(model.device)
        self._drafts = DraftSteps(
            model,
            step_device(model, priority=0),
            warn=lambda reason: log.warning("a draft's step is not captured; it runs eagerly", reason=reason),
        )
        # A cancelled pass may still be handing a layer over when the next one begins.
        self._handing = ThreadPoolExecutor(MAX_STARTED + 1, "kvferry-prefill-hand-over")
        self.turns = SessionTurns(
            store=store, receiver=receiver, metrics=metrics, is_exact=config.history_bits == "model"
        )
        self._condition = threading.Condition()
        self._schedule = Schedule()
        self._stopping = False
        self._history_endpoint = ""
        self.heartbeat = Heartbeat(clock, model.device.type)
        self._has_worked = False
        self._thread = threading.Thread(target=self._loop, name="kvferry-prefill-engine", daemon=True)

    def start(self, history_endpoint: str) -> None:
        """Start the thread. Args: history_endpoint: where decode workers return generated KV."""
        self._history_endpoint = history_endpoint
        self._thread.start()

    def close(self) -> None:
        """Fail waiting jobs, cancel those in mid-pass and end the thread; blocks until a short pass is done,
        or a layer of a long one. Idempotent."""
        with self._condition:
            self._stopping = True
            started = self._schedule.started
            self._condition.notify_all()
        for each in started:
            each.job.cancel(WorkerUnavailable("the prefill worker is shutting down", reason="closed"))
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
        self._handing.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        """True if a layer or a probe has finished recently."""
        is_recent = self._clock() - self.heartbeat.last_s < _READY_TIMEOUT_S
        return self._thread.is_alive() and self._has_worked and is_recent

    @property
    def is_wedged(self) -> bool:
        """See `Heartbeat.is_wedged`; for the service's sweeper."""
        ignores_work = self._has_worked and self._schedule.has_waiting and not self._schedule.started
        return self.heartbeat.is_wedged(self._thread, may_rest=self.heartbeat.waits and not ignores_work)

    @property
    def num_waiting(self) -> int:
        with self._condition:
            return len(self._schedule)

    def submit(self, job: PrefillJob) -> None:
        """Queue a job; the engine resolves its `shipped`. When the queue is full, the owner that has most of
        it gives way: its newest job is refused for one of an owner that has fewer.

        Raises:
            CapacityExceeded: too many jobs are waiting.
            WorkerUnavailable: the engine is stopped.
        """
        job.work = self._work(job)
        with self._condition:
            if self._stopping or not self._thread.is_alive():
                raise WorkerUnavailable("the prefill engine is stopped", reason="closed")
            num_waiting = len(self._schedule)
            refused: PrefillJob | None = None
            if num_waiting >= self._config.max_waiting:
                refused = self._schedule.give_way(job.owner)
                full = self._full(num_waiting)
                if refused is None:
                    raise full
            self._schedule.push(job)
            self._condition.notify_all()
        if refused is not None:
            refused.fail(full)

    def _full(self, num_waiting: int) -> CapacityExceeded:
        return CapacityExceeded(
            f"{num_waiting} requests wait for prefill; at most {self._config.max_waiting} may",
            reason="queue_full",
            retry_after_s=min(max(1.0, self._schedule.left_s), LONGEST_S),
        )

    def withdraw(self, job: PrefillJob) -> None:
        """Remove a job from the queue if it is still waiting."""
        with self._condition:
            self._schedule.remove(job)

    def _loop(self) -> None:
        if self._config.threads and self._config.tensor_parallel == 1:
            torch.set_num_threads(self._config.threads)  # in one process decode has another number
        try:
            with torch.inference_mode(), self._copies.scope():
                self._warm_up()
                self.heartbeat.waits = False
                self._probe()
                while (started := self._next()) is not None:
                    self._run(started)
        except Exception:
            log.exception("prefill engine stopped")
        finally:
            self._fail_waiting()

    def _next(self) -> Started | None:
        """Wait for the next job, and probe the model while there is none. Returns None when stopping."""
        while True:
            with self._condition:
                if not self._stopping and not self._schedule.has_waiting:
                    self.heartbeat.waits = True
                    self._condition.wait(_PROBE_INTERVAL_S)
                    self.heartbeat.waits = False
                if self._stopping:
                    return None
                if (started := self._schedule.start_next(self._clock())) is not None:
                    return started
            self._probe()

    def _pause(self, job: PrefillJob) -> None:
        """End a long pass between two operations if it was cancelled; run a job that overtakes it."""
        job.check_cancelled()
        now_s = self.heartbeat.last_s = self._clock()
        self._copies.pace()
        if not self._schedule.has_waiting or self._stopping or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_INTERVAL_S
        with self._condition:
            overtaking = self._schedule.overtake(now_s)
        if overtaking is not None:
            self._run(overtaking)
            job.check_cancelled()

    def _warm_up(self) -> None:
        """See `shared/device/warm_up.py`; the engine is not ready before its first probe."""
        progress = shown_progress(self._metrics.warm_up)
        if self._config.warm_up and needs_warm_up("prefill", self._model):
            warm_prefill(self._model, progress, self._drafts)
            progress(1.0, "")
        self._metrics.warm_up.set(1)

    def _probe(self) -> None:
        token = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        self._model.prefill(token, start=0, observer=CollectingPass(self._model))
        self.heartbeat.last_s = self._clock()
        self._has_worked = True

    def _layer_done(self, started: Started, layer: int) -> None:
        started.fraction = (layer + 1) / self._model.spec.num_layers
        self.heartbeat.last_s = self._clock()

    def _work(self, job: PrefillJob) -> float:
        """Return a prompt's work, in arbitrary units: its tokens' projections, and their attention."""
        spec = self._model.spec
        num_tokens = len(job.request.prompt_token_ids)
        num_new = num_tokens - self.turns.expected_reuse(job.request)
        projections = _PROJECTIONS * spec.num_heads * spec.head_dim
        repeated = num_tokens if repeats_prompt(job.resolved) else 0
        return num_new * (projections + num_tokens - num_new / 2) + repeated * (projections + num_tokens)

    def _run(self, started: Started) -> None:
        job, is_whole = started.job, False
        try:
            if not job.shipped.set_running_or_notify_cancel():
                return
            job.check_cancelled()
            job.queue_span.end()
            with stage("prefill", job.trace_context, prompt_tokens=job.resolved.num_prompt_tokens):
                shipped = self._prefill(started)
            job.check_cancelled()
        except KvferryError as error:
            self._give_up(job, error)
        except Exception as error:
            log.exception("prefill failed", request_id=job.request.request_id)
            if is_lost(error):
                self._give_up(job, WorkerUnavailable(f"the device is lost: {error}", reason="device_lost"))
                self._on_device_lost(error)
            else:
                self._give_up(job, KvferryError(f"request {job.request.request_id} failed in prefill"))
        else:
            with contextlib.suppress(InvalidStateError):  # given up as wedged
                job.shipped.set_result(shipped)
                is_whole = True
        finally:
            with self._condition:
                self._schedule.finish(self._clock(), is_whole=is_whole)

    def _give_up(self, job: PrefillJob, error: KvferryError) -> None:
        self._receiver.forget(job.request.request_id, job.key)
        # Without the traceback, whose frames refer to the pass's tensors.
        job.fail(job.cause(error).with_traceback(None))

    def _prefill(self, started: Started) -> Shipped:
        job, spec = started.job, self._model.spec
        request, is_long = job.request, self._schedule.is_long(job)
        self.heartbeat.waits = True
        try:
            self.turns.begin(job)
        finally:
            self.heartbeat.waits = False
        layers = PromptPass(
            job,
            model=self._model,
            copies=self._copies,
            pauses=Pauses(partial(self._pause, job)) if is_long else None,
            open_transfer=partial(self._open, job),
            progress=partial(self._layer_done, started),
            heartbeat=self.heartbeat,
            # Without the time for which it is overtaken.
            clock=(lambda: started.ran_s(self._clock())) if is_long else self._clock,
            pool=self._handing,
            pool_clock=self._clock,
            drafts=self._drafts,
        )
        job.opening.tell = partial(self._tell, started, layers.logprobs)
        logits = layers.run(partial(self.turns.missed, job))
        assert job.transfer is not None
        if not job.opening.tokens:
            job.sibling_tokens = tuple([sampler.sample(logits) for sampler in job.sibling_samplers])
            job.opening.draw(logits)
        *draft, token = job.opening.tokens
        job.transfer.finish(
            EndRecord(
                key=job.key,
                num_blocks=0,
                payload_bytes=0,
                first_token=token,
                draft=tuple([each.token_id for each in draft]),
            )
        )
        rows, now_s = job.transfer.rows, self._clock()
        self.turns.end(job, rows)
        ran_s, bins, num_tokens = started.ran_s(now_s), request.retained_bins, len(request.prompt_token_ids)
        shipped = Shipped(
            method=job.method,
            full_bytes=spec.full_bytes(num_tokens),
            queue_s=now_s - job.submitted_s - ran_s,
            prefill_s=ran_s,
            compress_s=layers.times.compress_s,
            retained_fractions=kept_fractions(rows.positions, num_tokens, bins) if bins else (),
        )
        self._observe(job, shipped, layers.times)
        return shipped

    def _tell(self, started: Started, logprobs: PromptLogprobs | None, token: SampledToken) -> None:
        """Give the service a token that the opening has drawn."""
        job = started.job
        if len(job.opening.tokens) > 1:
            job.tell(TokenGenerated(token=token))
            return
        turn, now_s = job.turn, self._clock()
        reused_by_tier = turn.reused_by_tier if turn is not None else {}
        first = FirstToken(
            token=token,
            method=job.method,
            reused_tokens=job.num_reused,
            full_bytes=self._model.spec.full_bytes(len(job.request.prompt_token_ids)),
            queue_s=now_s - job.submitted_s - started.ran_s(now_s),
            reuse_source=turn.reuse_source if turn is not None else "session",
            history_source=job.history_source,
            prompt_logprobs=tuple(logprobs.tokens) if logprobs is not None else (),
            sibling_tokens=job.sibling_tokens,
            history_tier=next((tier for tier, count in reversed(reused_by_tier.items()) if count), ""),
            epsilon_table=stand_in(job.resolved, fingerprint=self._model.spec.fingerprint)
            if "epsilon_table" in job.resolved.plan.representation.params
            else "",
        )
        job.tell(first)

    def _open(self, job: PrefillJob, measured: ResolvedPlan) -> None:
        """Open the transfer of the final plan."""
        is_final = measured is job.resolved
        with job.lock:
            job.transfer = self._ranks.open(
                job.ticket,
                self._manifest(job, measured),
                measured,
                job.formats if is_final else make_formats(self._model.spec, measured),
                job.request.question,
                retained=job.retained,
                with_positions=job.request.retained_bins > 0
                or (job.retained_as is not None and job.has_plain_rows),
                with_rows=job.turn is not None,
                keeps_failed=not job.request.probe,
                timeout_s=self._config.transfer_timeout_s,
                left_s=max(0.0, job.deadline_s - self._clock()),
            )

    def _manifest(self, job: PrefillJob, measured: ResolvedPlan) -> Manifest:
        request, resolved = job.request, job.resolved
        with_history = request.session is not None and not request.session.is_implicit
        return Manifest(
            purpose="cache",
            key=job.key,
            request_id=request.request_id,
            **model_fields(self._model.spec),
            start=0,
            num_tokens=resolved.num_prompt_tokens,
            plan_digest=plan_digest(resolved),
            layer_rows=tuple(layer.rows for layer in measured.layers) if is_measured(resolved) else (),
            history_endpoint=self._history_endpoint if with_history else "",
            history_credit_bytes=_HISTORY_CREDIT_BYTES if with_history else 0,
            traceparent=carrier().get("traceparent", ""),
            retained_transfer_id=job.retained.transfer_id if job.retained is not None else 0,
            retained_tokens=job.retained.num_tokens if job.retained is not None else 0,
            retained_depth=job.retained.depth if job.retained is not None else 0,
        )

    def _observe(self, job: PrefillJob, shipped: Shipped, times: PassTimes) -> None:
        model, metrics, turn = self._model.spec.name, job.metrics, job.turn
        metrics.prefill_tokens.labels(model).inc(len(job.request.prompt_token_ids) - job.num_reused)
        metrics.queue.labels("prefill").observe(shipped.queue_s)
        metrics.prefill.labels(model, job.method).observe(shipped.prefill_s)
        metrics.compress.labels(model, job.method).observe(times.compress_s)
        metrics.pack.labels(model, job.method).observe(times.pack_s)
        if turn is not None:
            metrics.history_store.labels(model).observe(times.history_store_s)
            for tier, num_tokens in turn.reused_by_tier.items():
                metrics.history_reused_tokens.labels(tier).inc(num_tokens)
        if job.num_reused:
            metrics.history_load.labels(model).observe(times.history_load_s)

    def _fail_waiting(self) -> None:
        with self._condition:
            self._stopping = True
            waiting = self._schedule.clear()
        for job in waiting:
            if job.shipped.set_running_or_notify_cancel():
                job.fail(WorkerUnavailable("the prefill engine is stopped", reason="closed"))
