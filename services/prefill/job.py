"""One request in the prefill engine, shared by the event loop and the engine's thread, and the session's turn
that it continues: what is cached of its prompt, and what decode retains of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from kvferry.services.prefill.opening import Opening
from kvferry.services.prefill.parts import PromptTransfer
from kvferry.services.prefill.turns import HistoryReceiver
from kvferry.shared.cache.delta import RetainedChain, RetainedRows, ShippedRows, ShippedSelections
from kvferry.shared.compression.formats import make_formats, num_observed_queries
from kvferry.shared.compression.plan import num_draft_tokens, repeats_prompt
from kvferry.shared.compression.reconstruct import chunk_tokens
from kvferry.shared.control.messages import (
    FirstToken,
    HistorySource,
    PrefillRequest,
    SessionKey,
    Ticket,
    TokenGenerated,
    calling_router,
)
from kvferry.shared.errors import HistoryMiss, KvferryError, TransferFailed
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.model.ending import Ending
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.grammar import TokenMatcher
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.shared.telemetry.metrics import PrefillMetrics
from kvferry.shared.telemetry.tracing import begin, current_context
from kvferry.shared.wire.messages import TransferKey

log = structlog.get_logger(__name__)

_COMMIT_GRACE_S = 30.0
"""How long after its request's deadline a staged turn may still be committed."""
_SHIPPED_INDEX_BYTES = 256 << 20
"""The most host memory for the positions of shipped rows, over all sessions."""
_SHIPPED_INDEX_SHARE = 16
"""It is at most this part of the memory for history, without which the positions are of no use."""


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A prompt of which the sender has everything. Attributes: as of `FirstToken` and `TransferDone`."""

    method: str
    full_bytes: int
    queue_s: float
    prefill_s: float
    compress_s: float
    retained_fractions: tuple[float, ...]


class PrefillJob:
    """A request, its transfer and its staged turn.

        WAITING ──engine──► RUNNING ──► SHIPPED ──acknowledged──► DONE
           │                  │            │
           └──────────────────┴── cancel ──┴──► transfer aborted, staged turn dropped

    The engine's thread attaches the transfer and the turn while RUNNING, and resolves `shipped` at the end.
    `cancel` may be called from any thread at any time. It ends what is attached at that time. The engine
    checks for cancellation after attaching something and before each layer, and then ends that too.

    Attributes:
        deadline_s: of the whole request; nobody commits its turn much later.
        metrics: where it is counted.
        router: whose request it is.
        work: how much computing its pass takes, in units of the engine's; set when it is submitted.
        history_source: how the turn got its history; None if there was none.
        ticket: decode's reservation; another one once `redirect` was called.
        lock: held while the transfer is opened or redirected.
        opening: the completion's first tokens.
        tell: given them as events, by the engine's thread.
        sibling_samplers, sibling_tokens: of the request's siblings, and their first tokens.
        has_plain_rows: whether every layer has, which decode can retain.
        retained: rows that decode retains and that need not be shipped; set before the transfer opens.
        num_observed: see `num_observed_queries`.
    """

    def __init__(
        self,
        request: PrefillRequest,
        spec: ModelSpec,
        *,
        submitted_s: float,
        deadline_s: float,
        metrics: PrefillMetrics,
        ending: Ending,
        matchers: Sequence[TokenMatcher | None] = (),
    ) -> None:
        """Args: request: its ticket has a plan; ending: of its completion; matchers: at the beginning of its
            grammar, one for each completion; none where it has no grammar.

        Raises: InvalidRequest: a token id or a sampling parameter is out of the model's range, or its window
            has no room for a prompt's repetition.
        """
        assert request.ticket.plan is not None
        self.request = request
        self.resolved = request.ticket.plan
        self.formats = make_formats(spec, self.resolved)
        self.has_plain_rows = all([fmt.is_plain for fmt in self.formats])
        self.num_observed = num_observed_queries(self.resolved, self.formats, request.question)
        if repeats_prompt(self.resolved):
            chunk_tokens(self.resolved, spec.max_model_len)
        sampler, *self.sibling_samplers = [
            SequenceSampler(
                sampling,
                request.prompt_token_ids,
                spec.vocab_size,
                eos_token_ids=spec.eos_token_ids,
                matcher=matchers[number] if matchers else None,
            )
            for number, sampling in enumerate((request.sampling, *request.siblings))
        ]
        most = num_draft_tokens(self.resolved) if self.ships_draft else 0
        self.opening = Opening(sampler, ending, most=min(most, self.resolved.max_new_tokens - 1))
        self.tell: Callable[[FirstToken | TokenGenerated], None] = lambda event: None
        self.sibling_tokens: tuple[SampledToken, ...] = ()
        self.submitted_s = submitted_s
        self.deadline_s = deadline_s
        self.metrics = metrics
        self.work = 0.0
        self.owner = request.owner or (request.session.owner if request.session is not None else "")
        self.priority = request.priority
        self.ticket = request.ticket
        self.router = calling_router.get()
        self.lock = threading.Lock()
        self.trace_context = current_context()
        self.queue_span = begin("queue")
        self.shipped: Future[Shipped] = Future()
        self.transfer: PromptTransfer | None = None
        self.turn: StagedTurn | None = None
        self.history_source: HistorySource | None = None
        self.retained: RetainedChain | None = None
        self._cancellation: KvferryError | None = None

    @property
    def key(self) -> TransferKey:
        """The transfer's. Decode returns the generated KV under the same one."""
        return TransferKey(transfer_id=self.ticket.transfer_id, generation=self.ticket.generation)

    @property
    def retained_as(self) -> SessionKey | None:
        """Return the session under which decode retains the rows, or None if it retains none."""
        session = self.request.session
        return self.request.retained_as if session is not None and session.is_implicit else session

    @property
    def ships_draft(self) -> bool:
        """True if a draft's tokens are the completion's: not where siblings share the prompt."""
        return not self.request.siblings

    @property
    def method(self) -> str:
        return self.resolved.method

    @property
    def num_reused(self) -> int:
        """The number of the prompt's first tokens that the staged turn continues from."""
        return self.turn.reused_tokens if self.turn is not None else 0

    def check_cancelled(self) -> None:
        """Raise the error that `cancel` was called with, if it was called."""
        if self._cancellation is not None:
            raise self._cancellation

    def redirect(self, ticket: Ticket) -> None:
        """Ship to another reservation. Any thread may call this.

        Raises:
            TransferFailed: it is for another plan, rows were left out that only the first worker retains, or
                see `PromptTransfer.redirect` ("resend").
        """
        with self.lock:
            if ticket.plan != self.resolved or self.retained is not None:
                raise TransferFailed(
                    f"request {self.request.request_id} cannot be shipped to another worker: its ticket must"
                    " have the same plan, and no row may have been left out as retained",
                    reason="resend",
                )
            if self.transfer is not None:
                self.transfer.redirect(ticket)
            self.ticket = ticket

    def cause(self, error: KvferryError) -> KvferryError:
        """Return why the work ended: the cancellation if there was one, because it caused `error`."""
        return self._cancellation or error

    def cancel(self, error: KvferryError) -> None:
        """Stop the work at any stage with this error and free its resources. Idempotent."""
        if self._cancellation is None:
            self._cancellation = error
        self._abandon(error.reason)

    def fail(self, error: KvferryError) -> None:
        """Free everything, then pass the error to the waiting request, unless it has one already."""
        self._abandon(error.reason)
        with contextlib.suppress(InvalidStateError):
            self.shipped.set_exception(error)

    def _abandon(self, reason: str) -> None:
        """End the transfer and the staged turn, if they are attached. Idempotent."""
        transfer, turn = self.transfer, self.turn
        if transfer is not None:
            transfer.abort(reason)
        if turn is not None:
            turn.abort()


class SessionTurns:
    """Begins the staged turn of a job, decides which of decode's retained rows need not be shipped, and
    records what was shipped.

        begin ──► pass ──► end
                   └─ HistoryMiss ──► missed ──► pass over the whole prompt

    Stored history is always loaded, never recomputed. If decode retains rows of the session's last turns that
    equal those of the history, only the other selected rows are shipped ("delta"), otherwise all of them
    ("fetch"). "recompute" means that there was no history, or that loading it failed.

    Attributes: shipped: the rows that decode may retain. Any thread may use it.
    """

    def __init__(
        self, *, store: HistoryStore, receiver: HistoryReceiver, metrics: PrefillMetrics, is_exact: bool
    ) -> None:
        """Args: is_exact: whether the store returns rows bit for bit."""
        self._store = store
        self._receiver = receiver
        self._metrics = metrics
        self._is_exact = is_exact
        index_bytes = min(_SHIPPED_INDEX_BYTES, store.max_bytes // _SHIPPED_INDEX_SHARE)
        self.shipped = ShippedSelections(max_bytes=index_bytes)

    def expected_reuse(self, request: PrefillRequest) -> int:
        """Count the prompt's first tokens that will probably be cached: those that host memory has of the
        session. Any thread may call this."""
        if request.session is None:
            return 0
        return self._store.num_reusable(request.session, request.prompt_token_ids)

    def begin(self, job: PrefillJob) -> None:
        """Begin the staged turn if the request has a session; the job owns it from now on."""
        request = job.request
        if request.session is None:
            return
        if request.session.is_implicit and (job.num_observed is None or not self._is_exact):
            return  # with the stored rows the answer would differ
        turn = job.turn = self._store.begin(
            request.session,
            request.request_id,
            request.prompt_token_ids,
            method=job.resolved.method,
            document=request.document,
            num_observed=job.num_observed,
            has_history=request.has_history,
            max_reused_tokens=request.max_reused_tokens,
        )
        turn.belong_to(job.router, job.deadline_s + _COMMIT_GRACE_S)
        self.expect(job)
        if turn.reused_tokens:
            job.retained = self._retained(job)
            job.history_source = "fetch" if job.retained is None else "delta"
            self._metrics.history_choices.labels(job.history_source, "order").inc()
        elif request.has_history:
            job.history_source = "recompute"

    def expect(self, job: PrefillJob) -> None:
        """Let decode return the KV of the turn's generated tokens, if they are part of a session's."""
        if job.turn is not None and not job.turn.session.is_implicit:
            self._receiver.expect(
                job.request.request_id,
                job.key,
                start=len(job.request.prompt_token_ids),
                max_tokens=job.request.sampling.max_tokens,
            )

    def missed(self, job: PrefillJob, miss: HistoryMiss) -> None:
        """Count a failed load and restart the staged turn without cached KV."""
        assert job.turn is not None
        log.warning("history miss", request_id=job.request.request_id, reason=miss.reason)
        self._metrics.history_miss.labels(miss.reason).inc()
        job.turn.restart()
        job.history_source = "recompute"
        self._metrics.history_choices.labels("recompute", "miss").inc()

    def end(self, job: PrefillJob, rows: ShippedRows) -> None:
        """Record the rows that decode will retain, after the last layer was passed to the sender."""
        session = job.retained_as
        if session is None:
            return
        if not job.has_plain_rows:
            self.shipped.drop(session)
            return
        selection = RetainedRows(
            transfer_id=job.key.transfer_id,
            num_prompt_tokens=job.resolved.num_prompt_tokens,
            num_tokens=job.resolved.num_prompt_tokens,
            layers=rows.layers(),
        )
        # Rows recomputed after a miss may differ from those of earlier turns.
        self.shipped.put(session, selection, retained=job.retained if job.num_reused else None)

    def _retained(self, job: PrefillJob) -> RetainedChain | None:
        """Return rows that decode retains from the last turns and that equal the history's bit for bit."""
        session, ticket, turn = job.retained_as, job.ticket, job.turn
        if session is None or turn is None:
            return None
        if turn.reuse_source != "session" and not turn.session.is_implicit:
            return None
        if not (self._is_exact and job.has_plain_rows) or ticket.retained_transfer_id == 0:
            return None
        return self.shipped.retained(
            session,
            transfer_id=ticket.retained_transfer_id,
            num_tokens=min(ticket.retained_tokens, turn.reused_tokens),
            depth=ticket.retained_depth,
            with_generated=not turn.session.is_implicit,
        )


class PromptLogprobs:
    """Each token of a prompt after the first with its log-probability given those before it, from its pass.

    Args: count: how many alternatives each token gets.
    Attributes: tokens: so far.
    """

    def __init__(self, token_ids: Sequence[int], count: int) -> None:
        self.tokens: list[SampledToken] = []
        self._token_ids = token_ids
        self._count = count

    def add(self, first: int, logits: Tensor) -> None:
        """Add a chunk. Args: logits `[t, V]` of the tokens from `first` on, which predict the next ones."""
        following = self._token_ids[first + 1 : first + 1 + logits.shape[0]]
        logprobs = logits[: len(following)].to(torch.float64).log_softmax(-1)
        own = logprobs[range(len(following)), list(following)].tolist()
        values, ids = (top.tolist() for top in logprobs.topk(min(self._count, logprobs.shape[1])))
        for i, token_id in enumerate(following):
            self.tokens.append(
                SampledToken(
                    token_id=token_id,
                    index=first + 1 + i,
                    logprob=own[i],
                    top_logprobs=tuple(zip(ids[i], values[i], strict=True)),
                )
            )
