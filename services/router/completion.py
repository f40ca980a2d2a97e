"""One completion request from its typed fields to its deltas: session, prompt, plan, turns, record.

Runs as a task of its own, so that what follows a client's last chunk (generated KV coming home, the session's
record) does not depend on the client's connection. `routes.py` reads its events and ends it where the client
leaves early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import structlog

from kvferry.services.router.choice import Choice, ChoiceDelta, RequestTimer
from kvferry.services.router.documents import DocumentService, NamedDocuments
from kvferry.services.router.errors import internal_error
from kvferry.services.router.history import WorkerHistory
from kvferry.services.router.plans import ChosenPlan, PlanChoice
from kvferry.services.router.prompt import Preamble, Prompt, PromptBuilder
from kvferry.services.router.quota import KeyQuota
from kvferry.services.router.responses import usage_object
from kvferry.services.router.sampling import sampling_params, with_seed_of
from kvferry.services.router.schemas import ChatRequest, TextRequest
from kvferry.services.router.session_record import SessionRecord
from kvferry.services.router.sessions import SessionLease, SessionStore
from kvferry.services.router.turn import TurnRunner
from kvferry.services.router.turn_state import TurnProgress, TurnRequest, TurnStats
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import KvferryError, Overloaded
from kvferry.shared.metrics import RouterMetrics
from kvferry.shared.model.spec import ModelSpec

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompletionEnd:
    """After the last delta of the last choice."""

    usage: dict[str, Any]
    kv: dict[str, Any]


CompletionEvent = ChoiceDelta | CompletionEnd | KvferryError


@dataclass(frozen=True, kw_only=True)
class CompletionService:
    """What every completion needs of its router.

    Attributes:
        default_max_tokens: bounds chat completions that give no limit.
    """

    runner: TurnRunner
    sessions: SessionStore
    documents: DocumentService
    history: WorkerHistory
    quota: KeyQuota
    prompts: PromptBuilder
    plans: PlanChoice
    metrics: RouterMetrics
    default_max_tokens: int
    request_timeout_s: float
    on_success: Callable[[], None]
    clock: Callable[[], float]

    def start(
        self,
        request: ChatRequest | TextRequest,
        *,
        model: ModelSpec,
        owner: str,
        session: SessionKey | None,
        request_id: str,
        arrival_s: float,
    ) -> Completion:
        """Begin a completion; its events come from `Completion.events`."""
        completion = Completion(self, request, model, owner, session, request_id, arrival_s)
        completion.task = self.runner.tasks.start(completion.run(), name="completion")
        return completion


class Completion:
    """One request's choices.

        session ─► prompt ─► turns ─► end ─► history home ─► commit ─► session free
        └─────────── cancelled if the client leaves ───┘└── goes on without it ───┘
                          └─ a session's stream is cut off instead: what was delivered is its end

    Attributes:
        events: deltas, then one CompletionEnd or one error.
    """

    def __init__(
        self,
        service: CompletionService,
        request: ChatRequest | TextRequest,
        model: ModelSpec,
        owner: str,
        session: SessionKey | None,
        request_id: str,
        arrival_s: float,
    ) -> None:
        self.events: asyncio.Queue[CompletionEvent] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.choices: list[Choice] = []
        self.num_prompt_tokens = 0
        self.timer = RequestTimer(service.metrics, model.name, arrival_s)
        self._service = service
        self._request = request
        self._model = model
        self._owner = owner
        self._session = session
        self._request_id = request_id
        self._deadline_s = asyncio.get_running_loop().time() + service.request_timeout_s
        self._chosen: ChosenPlan | None = None
        self._ended = False
        self._cut_off = False
        self._turns: list[TurnProgress] = []
        self._timer_closed = False
        self._admitted = False
        self._log = _logger.bind(request_id=request_id)

    def cancel(self) -> None:
        """The client left. A completion that has ended goes on to its commit, and so does what a session's
        stream has delivered."""
        if self._ended or self.task is None:
            return
        if self._cut_off or any(turn.cut() for turn in self._turns):
            self._cut_off = True
            self._close_timer()
        else:
            self.task.cancel()

    async def run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                lease = None
                if self._session is not None:
                    lease = await stack.enter_async_context(
                        self._service.sessions.lease(self._session, needs_record=not self._request.is_whole)
                    )
                await self._run_turn(lease)
        except KvferryError as error:
            if self._ended:
                self._log.warning("turn ended well, its commit did not", error=error.message)
            else:
                self.events.put_nowait(error)
        except asyncio.CancelledError:
            # The client left, and nobody reads this; or the router is stopping, and the client is told.
            self.events.put_nowait(Overloaded("The server is shutting down"))
            raise
        except Exception:
            # The task's top: whoever waits for events must get one.
            self._log.exception("completion failed unexpectedly")
            self.events.put_nowait(internal_error())
        finally:
            self._close_timer()

    async def _run_turn(self, lease: SessionLease | None) -> None:
        service = self._service
        record = lease.record if lease is not None else None
        if record is not None and record.model_fingerprint != self._model.fingerprint:
            record = None  # token ids of another model
        named, preamble = await self._documents()
        prompt = await service.prompts.build(self._request, record, self._model, preamble)
        self.num_prompt_tokens = len(prompt.token_ids)
        if lease is not None:
            await service.quota.check(
                service.sessions,
                lease.key,
                is_new=lease.record is None,
                num_tokens=self.num_prompt_tokens,
            )
        compression = self._request.kv_compression
        if compression is None and named is not None:
            compression = named.compression
        self._chosen = await service.plans.choose(compression, prompt.token_ids, self._model)
        stats = await self._run_choices(self._turn(record, prompt, named, self._chosen.plan))
        if lease is not None:
            await self._commit(lease, record, prompt, stats)

    async def _documents(self) -> tuple[NamedDocuments | None, Preamble | None]:
        """The documents that the request names, and what it says of them: nothing, or none, or which."""
        ids = self._request.document_ids if isinstance(self._request, ChatRequest) else None
        if ids is None:
            return None, None
        named = await self._service.documents.named(self._owner, ids)
        return named, named.preamble if named is not None else Preamble()

    def _turn(
        self,
        record: SessionRecord | None,
        prompt: Prompt,
        named: NamedDocuments | None,
        plan: CompressionPlan,
    ) -> TurnRequest:
        request, service = self._request, self._service
        prefer = record.prefill_addresses if record is not None else ()
        return TurnRequest(
            request_id=self._request_id,
            model=self._model,
            prompt_token_ids=prompt.token_ids,
            plan=plan,
            sampling=sampling_params(
                request, self.num_prompt_tokens, self._model, service.default_max_tokens
            ),
            deadline_s=self._deadline_s,
            session=self._session,
            document=named.history if named is not None and self._session is not None else None,
            has_history=record is not None,
            keeps_cut_off=self._session is not None and bool(request.stream),
            prefer_prefill=prefer or (named.prefill_addresses if named is not None else ()),
            kept_bins=request.kv_kept_bins or 0,
            prefer_decode=(record.decode_address,) if record is not None else (),
        )

    async def _run_choices(self, turn: TurnRequest) -> TurnStats:
        request, service = self._request, self._service
        self.choices = [
            Choice(
                index,
                assembler=service.prompts.assembler(request.stop_strings),
                with_logprobs=request.num_alternatives is not None,
                timer=self.timer,
                emit=self.events.put_nowait,
                on_admitted=self._on_admitted,
                on_finished=self._on_finished,
                on_cut_off=self._on_cut_off,
            )
            for index in range(request.n or 1)
        ]
        self._turns = [TurnProgress(_for_choice(turn, choice.index), choice) for choice in self.choices]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(service.runner.run(progress)) for progress in self._turns]
        except* KvferryError as failures:
            first = failures.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            error = first
        else:
            return tasks[0].result()
        raise error

    def _on_admitted(self) -> None:
        if not self._admitted:
            self._admitted = True
            self.timer.admitted()

    def _on_cut_off(self, error: KvferryError) -> None:
        self._cut_off = True
        self._close_timer()
        self.events.put_nowait(error)

    def _on_finished(self) -> None:
        if self._cut_off:  # for the session's sake; the client has gone, or has its error
            self._ended = True
            return
        if any(choice.finish_reason is None for choice in self.choices):
            return
        metrics, model, first = self._service.metrics, self._model.name, self.choices[0].stats
        metrics.prompt_tokens.labels(model=model).inc(self.num_prompt_tokens)
        if first.reused_tokens:
            metrics.prompt_tokens_reused.labels(model=model, source=first.reuse_source).inc(
                first.reused_tokens
            )
        for choice in self.choices:
            metrics.request_success.labels(model=model, finish_reason=choice.finish_reason).inc()
        self.timer.finished(first.method)
        self._ended = True
        self._close_timer()
        self._service.on_success()
        self.events.put_nowait(CompletionEnd(usage=self._usage(), kv=self.kv()))

    def _close_timer(self) -> None:
        if not self._timer_closed:
            self._timer_closed = True
            self.timer.close()

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(choice.stats.token_ids) for choice in self.choices)

    def _usage(self) -> dict[str, Any]:
        cached_tokens = self.choices[0].stats.reused_tokens
        return usage_object(self.num_prompt_tokens, self.num_completion_tokens, cached_tokens)

    def kv(self) -> dict[str, Any]:
        """The `kv` extras: bytes are summed over choices, times are the longest choice's."""
        stats = [choice.stats for choice in self.choices]
        kept = [round(fraction, 4) for fraction in stats[0].kept]
        deltas = [entry.delta_bytes for entry in stats if entry.delta_bytes is not None]
        return {
            "method": stats[0].method,
            **(self._chosen.report if self._chosen is not None else {}),
            "prompt_tokens": self.num_prompt_tokens,
            "reused_tokens": stats[0].reused_tokens,
            **({"history": stats[0].history_way} if stats[0].history_way else {}),
            **({"history_tier": stats[0].history_tier} if stats[0].history_tier else {}),
            "full_bytes": stats[0].full_bytes,
            "shipped_bytes": sum(entry.shipped_bytes for entry in stats),
            **({"delta_bytes": sum(deltas)} if deltas else {}),
            "cache_bytes": sum(entry.cache_bytes for entry in stats),
            "prefill_ms": round(max(entry.prefill_s for entry in stats) * 1000, 3),
            "transfer_ms": round(max(entry.transfer_s for entry in stats) * 1000, 3),
            **({"kept": kept} if kept else {}),
        }

    async def _commit(
        self, lease: SessionLease, before: SessionRecord | None, prompt: Prompt, stats: TurnStats
    ) -> None:
        """Publish the staged history, then the record."""
        await self._service.history.publish(lease, stats, prompt.token_ids)
        earlier = before.prefill_addresses if before is not None else ()
        record = prompt.record(self._model, tuple(stats.token_ids), self.choices[0].text)
        kept = await lease.commit(
            replace(
                record,
                turns=(before.turns if before is not None else 0) + 1,
                last_plan={name: value for name, value in self.kv().items() if name != "kept"},
                prefill_addresses=tuple(dict.fromkeys((stats.prefill_address, *earlier))),
                created_at_s=before.created_at_s if before is not None else self._service.clock(),
                decode_address=stats.decode_address,
            )
        )
        if not kept:
            self._log.warning("turn not kept: its session was deleted or taken over")


def _for_choice(turn: TurnRequest, index: int) -> TurnRequest:
    return replace(turn, sampling=with_seed_of(turn.sampling, index))
