"""The prefill engine: one thread that owns the model and runs prompts one after another.

Place in the request's path: between the service, which submits jobs on the event loop and awaits their first
token, and the block sender, whose own thread ships each layer while the next is computed. The service waits
for the acknowledgement, and commits history when the router asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
import torch
from torch import Tensor

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.host_copies import host_copies
from kvferry.services.prefill.job import JobQueue, PrefillJob
from kvferry.services.prefill.prompt_pass import PassTimes, PromptPass
from kvferry.services.prefill.receiver import HistoryReceiver
from kvferry.services.prefill.session_turns import SessionTurns
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, plan_digest
from kvferry.shared.control.messages import FirstToken, SessionKey
from kvferry.shared.errors import CapacityExceeded, HistoryMiss, KvferryError, WorkerUnavailable
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.metrics import PrefillMetrics
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.telemetry import carrier, stage
from kvferry.shared.wire.messages import EndRecord, Manifest
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.transfer import OutgoingTransfer

log = structlog.get_logger(__name__)

_JOIN_TIMEOUT_S = 30.0
_HISTORY_CREDIT_BYTES = 64 << 20
"""Credit for one turn's returned KV."""


class _ProbeObserver:
    """No-op observer for probes."""

    def history(self, layer: int) -> None:
        return None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        pass


class PrefillEngine:
    """Runs jobs in fair order on one thread.

        submit ──► queue ──► run: begin turn, open transfer ──► layers ──► sample ──► end record ──► first
                                    │ error or cancelled
                                    └──► transfer aborted, turn dropped, error raised by `first`

    If the plan measures its layer budgets, the transfer is opened after the last layer.

    An idle engine runs one token every `probe_interval_s`. It is ready if a layer or a probe has finished
    within the last `ready_timeout_s`.
    """

    def __init__(
        self,
        *,
        model: LanguageModel,
        store: HistoryStore,
        sender: BlockSender,
        receiver: HistoryReceiver,
        metrics: PrefillMetrics,
        config: PrefillConfig,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._sender = sender
        self._receiver = receiver
        self._metrics = metrics
        self._config = config
        self._clock = clock
        self._copies = host_copies(model.device)
        self._turns = SessionTurns(
            spec=model.spec, store=store, receiver=receiver, metrics=metrics, config=config
        )
        self._condition = threading.Condition()
        self._queue = JobQueue()
        self._running: PrefillJob | None = None
        self._stopping = False
        self._history_endpoint = ""
        self._last_progress_s: float | None = None
        self._thread = threading.Thread(target=self._loop, name="kvferry-prefill-engine", daemon=True)

    def start(self, history_endpoint: str) -> None:
        """Start the thread. Args: history_endpoint: where decode workers return generated KV."""
        self._history_endpoint = history_endpoint
        self._thread.start()

    def close(self) -> None:
        """Fail waiting jobs, cancel the running one and end the thread; blocks until its layer is done.
        Idempotent."""
        with self._condition:
            self._stopping = True
            running = self._running
            self._condition.notify_all()
        if running is not None:
            running.cancel(WorkerUnavailable("the prefill worker is shutting down", reason="shutdown"))
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    @property
    def ready(self) -> bool:
        """Whether a layer or a probe has finished recently."""
        last_s = self._last_progress_s
        return (
            self._thread.is_alive()
            and last_s is not None
            and self._clock() - last_s < self._config.ready_timeout_s
        )

    @property
    def num_waiting(self) -> int:
        with self._condition:
            return len(self._queue)

    def submit(self, job: PrefillJob) -> None:
        """Queue a job; the engine resolves its `first`.

        Raises:
            CapacityExceeded: too many jobs are waiting.
            WorkerUnavailable: the engine is stopped.
        """
        with self._condition:
            if self._stopping or not self._thread.is_alive():
                raise WorkerUnavailable("the prefill engine is stopped", reason="stopped")
            if len(self._queue) >= self._config.max_waiting:
                raise CapacityExceeded(
                    f"{len(self._queue)} requests wait for prefill; at most {self._config.max_waiting} may",
                    reason="queue_full",
                    retry_after_s=1.0,
                )
            self._queue.push(job)
            self._condition.notify_all()

    def withdraw(self, job: PrefillJob) -> None:
        """Remove a job from the queue if it is still waiting."""
        with self._condition:
            self._queue.remove(job)

    # ---- the engine thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            with torch.inference_mode(), self._copies.scope():
                self._probe()
                while (job := self._next()) is not None:
                    self._run(job)
        except Exception:
            log.exception("prefill engine stopped")
        finally:
            self._fail_waiting()

    def _next(self) -> PrefillJob | None:
        """Wait for the next job, and probe the model while there is none. Returns None when stopping."""
        while True:
            with self._condition:
                if not self._stopping and not len(self._queue):
                    self._condition.wait(self._config.probe_interval_s)
                if self._stopping:
                    return None
                if len(self._queue):
                    self._running = self._queue.pop()
                    return self._running
            self._probe()

    def _probe(self) -> None:
        token = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        self._model.prefill(token, start=0, observer=_ProbeObserver())
        self._progress()

    def _progress(self) -> None:
        self._last_progress_s = self._clock()

    def _run(self, job: PrefillJob) -> None:
        try:
            if not job.first.set_running_or_notify_cancel():
                return
            job.check_cancelled()
            job.queue_span.end()
            with stage("prefill", job.trace_context, prompt_tokens=job.resolved.num_prompt_tokens):
                first = self._prefill(job)
            job.check_cancelled()
        except KvferryError as error:
            self._give_up(job, error)
        except Exception:
            log.exception("prefill failed", request_id=job.request.request_id)
            self._give_up(job, KvferryError(f"request {job.request.request_id} failed in prefill"))
        else:
            job.first.set_result(first)
        finally:
            with self._condition:
                self._running = None

    def _give_up(self, job: PrefillJob, error: KvferryError) -> None:
        self._receiver.forget(job.request.request_id, job.key)
        job.fail(job.cause(error))

    def _prefill(self, job: PrefillJob) -> FirstToken:
        request, resolved, spec = job.request, job.resolved, self._model.spec
        begin_s = self._clock()
        queue_s = begin_s - job.submitted_s
        self._turns.begin(job)
        layers = PromptPass(
            resolved=resolved,
            formats=job.formats,
            open_transfer=lambda measured: self._open(job, measured),
            turn=job.turn,
            retained=job.retained,
            model=self._model,
            check=job.check_cancelled,
            progress=self._progress,
            clock=self._clock,
            copies=self._copies,
            kept_bins=request.kept_bins,
        )
        layers.begin()
        logits = self._forward(job, layers)
        layers.finish()
        assert job.transfer is not None
        token = job.sampler.sample(logits)
        job.transfer.finish(EndRecord(key=job.key, num_blocks=0, payload_bytes=0, first_token=token))
        self._turns.end(job, layers)
        turn = job.turn
        reused_by_tier = turn.reused_by_tier if turn is not None else {}
        first = FirstToken(
            token=token,
            method=resolved.method,
            reused_tokens=sum(reused_by_tier.values()),
            full_bytes=spec.kv_token_bytes * len(request.prompt_token_ids),
            prefill_s=self._clock() - begin_s,
            compress_s=layers.times.compress_s,
            queue_s=queue_s,
            reuse_source=turn.reuse_source if turn is not None else "session",
            kept=layers.kept_map.fractions() if layers.kept_map is not None else (),
            history_way=job.history_way,
            history_tier=next((tier for tier, count in reversed(reused_by_tier.items()) if count), ""),
        )
        if not request.probe:
            self._observe(first, layers.times, reused_by_tier if turn is not None else None)
        return first

    def forget(self, session: SessionKey) -> None:
        """Forget the rows shipped for a dropped session. Any thread may call this."""
        self._turns.forget(session)

    def _open(self, job: PrefillJob, measured: ResolvedPlan) -> OutgoingTransfer:
        """Open the transfer of the final plan; the job owns it from now on."""
        job.transfer = self._sender.open(
            job.request.ticket, self._manifest(job, measured), timeout_s=self._config.transfer_timeout_s
        )
        job.check_cancelled()
        return job.transfer

    def _forward(self, job: PrefillJob, layers: PromptPass) -> Tensor:
        """Run the tokens that are not cached; if loading the cached KV fails, run the whole prompt."""
        try:
            return self._pass(job, layers)
        except HistoryMiss as miss:
            job.check_cancelled()
            self._turns.missed(job, miss)
            return self._pass(job, layers)

    def _pass(self, job: PrefillJob, layers: PromptPass) -> Tensor:
        start = job.turn.reused_tokens if job.turn is not None else 0
        new_ids = torch.tensor(job.request.prompt_token_ids[start:], dtype=torch.int64)
        logits = self._model.prefill(new_ids.to(self._model.device), start=start, observer=layers)
        if not job.request.probe:
            self._metrics.prefill_tokens.labels(self._model.spec.name).inc(len(new_ids))
        return logits

    def _manifest(self, job: PrefillJob, measured: ResolvedPlan) -> Manifest:
        request, resolved, spec = job.request, job.resolved, self._model.spec
        with_history = request.session is not None
        return Manifest(
            purpose="cache",
            key=job.key,
            request_id=request.request_id,
            model_fingerprint=spec.fingerprint,
            dtype=spec.dtype,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            start=0,
            num_tokens=resolved.num_prompt_tokens,
            plan_digest=plan_digest(resolved),
            layer_rows=tuple(its.rows for its in measured.layers) if is_measured(resolved) else (),
            history_endpoint=self._history_endpoint if with_history else "",
            history_credit_bytes=_HISTORY_CREDIT_BYTES if with_history else 0,
            traceparent=carrier().get("traceparent", ""),
            retained_transfer_id=job.retained.transfer_id if job.retained is not None else 0,
            retained_tokens=job.retained.num_tokens if job.retained is not None else 0,
            retained_depth=job.retained.depth if job.retained is not None else 0,
        )

    def _observe(self, first: FirstToken, times: PassTimes, reused: dict[str, int] | None) -> None:
        """Args: reused: tokens by tier; None without a session."""
        model, metrics = self._model.spec.name, self._metrics
        metrics.queue.labels("prefill").observe(first.queue_s)
        metrics.prefill.labels(model, first.method).observe(first.prefill_s)
        metrics.compress.labels(model, first.method).observe(times.compress_s)
        metrics.pack.labels(model, first.method).observe(times.pack_s)
        if reused is not None:
            metrics.history_store.labels(model).observe(times.history_store_s)
            for tier, num_tokens in reused.items():
                metrics.history_reused_tokens.labels(tier).inc(num_tokens)
        if first.reused_tokens:
            metrics.history_load.labels(model).observe(times.history_load_s)

    def _fail_waiting(self) -> None:
        with self._condition:
            self._stopping = True
            waiting = [self._queue.pop() for _ in range(len(self._queue))]
        for job in waiting:
            if job.first.set_running_or_notify_cancel():
                job.fail(WorkerUnavailable("the prefill engine is stopped", reason="stopped"))
