"""One completion request from its typed fields to its deltas: session, prompt, plan, turns, record.

It runs as a task of its own, because what follows the client's last chunk (returning generated KV, committing
the session) must not depend on the client's connection, and because a slow client must slow nothing. One
queue hands its deltas to `api/completions.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
from typing_extensions import TypedDict

from kvferry.services.router.completion import documents
from kvferry.services.router.completion.chain import ResponseChain
from kvferry.services.router.completion.choice import Choice, ChoiceDelta, RequestTimer, Usage, usage_of
from kvferry.services.router.completion.compression import ChosenPlan, KvReport, kv_report
from kvferry.services.router.completion.documents import NamedDocuments
from kvferry.services.router.completion.prompts import Prompt
from kvferry.services.router.completion.requests import ChatRequest, sampling_params, with_seed_of
from kvferry.services.router.completion.services import Services
from kvferry.services.router.completion.texts import TextRequest
from kvferry.services.router.http.errors import internal_error
from kvferry.services.router.http.large_work import BodyWork
from kvferry.services.router.sessions.implicit import ImplicitTurn, salted_owner
from kvferry.services.router.sessions.record import SessionRecord
from kvferry.services.router.sessions.store import SessionLease
from kvferry.services.router.turn.attempt import CUT_OFF_S, Admitted, Finished, TurnRequest
from kvferry.services.router.turn.turn import Turn, deadline_passed
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import KvferryError, Overloaded, StoreUnavailable
from kvferry.shared.model.chat_template import ChatMessage
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.telemetry.tracing import answered


class CompletionEnd(TypedDict):
    """Follows the last delta of the last choice."""

    usage: Usage
    kv: KvReport


CompletionEvent = ChoiceDelta | CompletionEnd | KvferryError
_Commit = Callable[[], Coroutine[Any, Any, None]]


@dataclass(kw_only=True, eq=False)
class Completion:
    """One request's choices.

        session ─► prompt ─► turns ─► record committed ─► end ─► history returned ─► published ─► session free
        └─ cancelled if the client leaves ─┘└───────────── goes on without the client ─────────────┘
                          └─ a session's stream is cut off instead: it ends with what was delivered

    The record is committed before the client gets the end of its answer, so whoever has the answer finds the
    turn in its session. The history follows; a turn whose history is lost is prefilled again.

    Attributes:
        arrival_s: on the clock of `time.perf_counter`.
        first_index: of its choices, where they are part of a response's.
        chain: what the answer continues and is stored as, where the request came by the Responses API.
        events: deltas, then one CompletionEnd or one error. The reader may add None to wake itself.
        tell_end: takes the last of them.
    """

    services: Services
    request: ChatRequest | TextRequest
    model: ModelSpec
    owner: str
    work: BodyWork
    session: SessionKey | None
    request_id: str
    arrival_s: float
    first_index: int = 0
    chain: ResponseChain | None = None

    def __post_init__(self) -> None:
        self.events: asyncio.Queue[CompletionEvent | None] = asyncio.Queue()
        self.tell_end: Callable[[CompletionEnd | KvferryError], None] = self.events.put_nowait
        self.choices: list[Choice] = []
        self.num_prompt_tokens = 0
        self.timer = RequestTimer(self.services.metrics, self.model.name, self.arrival_s)
        self._deadline_s = asyncio.get_running_loop().time() + self.services.config.request_timeout_s
        self._limit: asyncio.Timeout | None = None
        self._chosen: ChosenPlan | None = None
        self._implicit: ImplicitTurn | None = None
        salt = self.request.salt
        self._reuse_owner = salted_owner(self.owner, salt) if salt else self.owner
        self._task: asyncio.Task[None] | None = None
        self._recording: asyncio.Task[None] | None = None
        """Commits the record, then ends the answer; started when the last token is there."""
        self._committed = False
        self._is_unstored = False
        """The turn is not part of its session, because Redis does not take the record."""
        self._closed = False
        """The client has its last event, or has left: nothing more goes into `events`."""
        self._log = structlog.get_logger(__name__).bind(request_id=self.request_id)

    def start(self) -> None:
        running = self.services.running
        running.add(self)
        self._task = self.services.runner.tasks.start(self.run(), name="completion")
        self._task.add_done_callback(lambda _: running.discard(self))

    def cancel(self, error: KvferryError | None = None) -> None:
        """Cancel because the client has left, or gets an error. A completion that has ended goes on to its
        commit, and so do the tokens that a session's stream has delivered."""
        if self._closed or self._recording is not None or self._cut_off(error) or self._task is None:
            return
        self._close(error)
        self._task.cancel()

    async def run(self) -> None:
        try:
            if self.session is None:
                await self._answer(None)
            else:
                sessions, needs_record = self.services.sessions, not self.request.is_whole
                async with sessions.lease(self.session, needs_record=needs_record) as lease:
                    await self._answer(lease)
        except KvferryError as error:
            if self._closed:
                self._log.warning("completion failed after its answer had ended", error=error.message)
            self._close(error)
        except asyncio.CancelledError:
            # The router is stopping, or the client has left and `cancel` has closed the answer.
            self._close(Overloaded("The server is shutting down"))
            raise
        except Exception:
            # Nothing above catches an error of this task, and the reader must get an event.
            self._log.exception("completion failed unexpectedly")
            self._close(internal_error())
        finally:
            if self.services.limits is not None and self.choices:
                generated = sum(len(choice.turn.stats.token_ids) for choice in self.choices)
                count = self.services.limits.count_tokens(self.owner, self.num_prompt_tokens + generated)
                self.services.runner.tasks.start(count, name="count tokens")

    def _close(self, event: CompletionEnd | KvferryError | None) -> None:
        if not self._closed:
            self._closed = True
            self.timer.close()
            if event is not None:
                self.tell_end(event)

    async def _answer(self, lease: SessionLease | None) -> None:
        services, request = self.services, self.request
        record = lease.record if lease is not None else None
        if record is not None:
            record = record.for_model(self.model.fingerprint)
        former = record
        if self.chain is not None:
            self.chain.check(record)
            former = record or self.chain.former(self.model)
        ids = request.document_ids if isinstance(request, ChatRequest) else None
        named = NamedDocuments() if ids is None else await documents.named(services, self.owner, ids)
        prompt = await services.prompts.build(request, former, self.model, self.work, named.preamble)
        self.num_prompt_tokens = len(prompt.token_ids)
        if lease is not None:
            begun = prompt.record(self.model, (), ChatMessage("assistant", ""))
            begun = replace(begun, responses=record.responses if record is not None else ())
            await services.sessions.check_quota(lease, services.config, begun)
        compression = request.kv_compression or named.compression
        self._chosen = await services.plans.choose(compression, prompt.token_ids, self.model)
        sampling = await self._sampling(prompt)
        if lease is None and request.num_prompt_alternatives is None:
            owner = self._reuse_owner
            self._implicit = services.implicit.begin(owner, prompt.token_ids, keep_s=request.keep_s)
        known = former.prefill_addresses if former is not None else ()
        decode_addresses = self._implicit.decode_addresses if self._implicit is not None else ()
        turn = TurnRequest(
            request_id=self.request_id,
            model=self.model,
            prompt_token_ids=prompt.token_ids,
            plan=self._chosen.plan,
            sampling=sampling,
            deadline_s=self._deadline_s,
            owner=self.owner,
            session=self.session,
            document=named.history if lease is not None else None,
            has_history=record is not None and bool(record.token_ids),
            keeps_cut_off=lease is not None and bool(request.stream),
            prefer_prefill=await self._prefill_addresses(prompt, known or named.prefill_addresses),
            prefer_decode=(record.decode_address,) if record is not None else decode_addresses,
            priority=request.hinted_priority if request.priority is None else request.priority,
            retained_bins=request.kv_kept_bins or 0,
            prompt_logprobs=request.num_prompt_alternatives,
            question=prompt.question,
        )
        self._begin_choices(turn, prompt)
        commit = partial(self._record, lease, record, prompt) if lease is not None else None
        await self._run_choices(prompt, commit)
        if lease is not None:
            await self._publish(lease, prompt)

    async def _sampling(self, prompt: Prompt) -> SamplingParams:
        request, model, prompts = self.request, self.model, self.services.prompts
        return sampling_params(
            request,
            self.num_prompt_tokens,
            model,
            await prompts.grammar(request, model, self.owner) if request.has_structure else None,
            defaults=self.services.sampling_defaults,
            thinking=prompts.thinking_budget(request, prompt),
        )

    async def _prefill_addresses(self, prompt: Prompt, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return the workers to prefer, best first; `addresses` have KV that the prompt continues."""
        is_known = bool(addresses)
        if (implicit := self._implicit) is not None:
            addresses, is_known = implicit.prefill_addresses or addresses, implicit.extends_former
        if is_known or self.request.num_prompt_alternatives is not None:
            return addresses
        return await self.services.runner.with_prefix(
            self._reuse_owner, prompt.token_ids, self.model.fingerprint, prefer=addresses
        )

    def _begin_choices(self, turn: TurnRequest, prompt: Prompt) -> None:
        services, request = self.services, self.request
        samplings = [with_seed_of(turn.sampling, index) for index in range(request.n or 1)]
        share = asyncio.get_running_loop().create_future() if len(samplings) > 1 else None
        for index, sampling in enumerate(samplings):
            siblings = () if index else tuple(samplings[1:])
            of_choice = replace(turn, sampling=sampling, siblings=siblings)
            if index == 0 and (implicit := self._implicit) is not None:
                of_choice = replace(of_choice, session=implicit.key, retained_as=implicit.retained_as)
            self.choices.append(
                Choice(
                    self.first_index + index,
                    Turn(services.runner, of_choice, share=share, number=index),
                    services.prompts.tokenizer,
                    services.prompts.answer_parser(request, prompt),
                    self.timer,
                    request,
                )
            )

    async def _run_choices(self, prompt: Prompt, commit: _Commit | None) -> None:
        """Run all turns to their ends. At the deadline, or after `cancel`, a session's stream has a little
        more time to return the delivered tokens to the history.

        Args: commit: makes the turn part of its session, then ends the answer.
        """
        failed: tuple[KvferryError | BaseExceptionGroup[KvferryError], ...] = ()
        try:
            async with asyncio.timeout_at(self._deadline_s + CUT_OFF_S) as self._limit:
                deadline = asyncio.get_running_loop().call_at(self._deadline_s, self._expire)
                try:
                    async with asyncio.TaskGroup() as group:
                        for choice in self.choices:
                            group.create_task(self._run_choice(choice, prompt, commit))
                except* KvferryError as failures:
                    failed = failures.exceptions
                finally:
                    deadline.cancel()
        except TimeoutError:
            if any(choice.turn.finish_reason is None for choice in self.choices):
                raise deadline_passed() from None
        if failed:
            raise failed[0]

    def _expire(self) -> None:
        if not self._cut_off(deadline_passed()) and self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def _cut_off(self, error: KvferryError | None) -> bool:
        """End the turns with the delivered tokens, if the session keeps those; returns whether it does.

        Args: error: the client's last event; None where the client has left.
        """
        if not any([choice.turn.cut() for choice in self.choices]):
            return False
        assert self._limit is not None, "turns run within the limit"
        self._limit.reschedule(asyncio.get_running_loop().time() + CUT_OFF_S)
        self._close(error)
        return True

    async def _run_choice(self, choice: Choice, prompt: Prompt, commit: _Commit | None) -> None:
        async with aclosing(choice.turn.events()) as events:
            async for event in events:
                match event:
                    case SampledToken():
                        if len(choice.turn.stats.token_ids) == 1:
                            if self._implicit is not None and choice is self.choices[0]:
                                store = self._store_prompt(self._implicit, choice)
                                self.services.runner.tasks.start(store, name="store prompt")
                            shown = await choice.show_prompt(prompt.begun.text, prompt.token_ids)
                            if shown is not None:
                                self.events.put_nowait(shown)
                        if self.request.max_tokens == 0:
                            continue
                        if (delta := choice.token(event)) is not None:
                            self._deliver(delta)
                    case Admitted():
                        self.timer.admitted()
                    case Finished(reason=reason):
                        for delta in choice.end(reason):
                            self._deliver(delta)
                        if any(choice.turn.finish_reason is None for choice in self.choices):
                            continue
                        if commit is None:
                            self._end()
                        else:
                            self._recording = self.services.runner.tasks.start(commit(), name="record")

    def _deliver(self, delta: ChoiceDelta) -> None:
        self.events.put_nowait(delta)
        if self.chain is not None:
            self.chain.deltas.append(delta)

    async def _store_prompt(self, implicit: ImplicitTurn, choice: Choice) -> None:
        """Store the prompt, of which prefill has staged everything, if that makes more of it reusable."""
        runner, stats = self.services.runner, choice.turn.stats
        assert stats.first is not None, "there is a first token"
        is_wanted = implicit.is_worth_storing(stats.first.reused_tokens) and not self.request.releases
        if await runner.publish(implicit.key, stats, implicit.token_ids, is_current=is_wanted):
            for key, address in self.services.implicit.add(
                implicit, prefill_address=stats.prefill_address, decode_address=stats.decode_address
            ):
                await runner.drop(key, addresses=(address,))
        if self.request.releases:
            for key in self.services.implicit.remove_former(implicit):
                await runner.drop(key)

    async def _record(self, lease: SessionLease, before: SessionRecord | None, prompt: Prompt) -> None:
        """Make the turn part of its session, then end the answer."""
        try:
            await self._commit(lease, before, prompt)
        except KvferryError as error:
            self._close(error)
            raise
        except BaseException:
            self._close(internal_error())
            raise
        self._end()

    def _end(self) -> None:
        """Count the request and give the client its last event, once every choice has its last token."""
        if self._closed:
            return
        metrics, model, first = self.services.metrics, self.model.name, self.choices[0].turn.stats.first
        assert first is not None, "a turn that has finished has a first token"
        metrics.prompt_tokens.labels(model=model).inc(self.num_prompt_tokens)
        if reused := first.reused_tokens:
            metrics.prompt_tokens_reused.labels(model=model, source=first.reuse_source).inc(reused)
        reasons = [str(choice.turn.finish_reason) for choice in self.choices]
        for reason in reasons:
            metrics.request_success.labels(model=model, finish_reason=reason).inc()
        answered(
            model,
            input_tokens=self.num_prompt_tokens,
            output_tokens=self.num_completion_tokens,
            finish_reasons=reasons,
        )
        self.timer.finished(first.method)
        self._close(CompletionEnd(usage=self.usage(), kv=self.kv()))

    @property
    def num_choices(self) -> int:
        """The number of choices that the response will have."""
        return self.request.n or 1

    def choice(self, index: int) -> Choice:
        """Return a choice by its number in the response."""
        return self.choices[index - self.first_index]

    def usage(self) -> Usage:
        """Return the response's `usage` object; while the turns run, what is known so far."""
        first = self.choices[0].turn.stats.first
        cached = first.reused_tokens if first is not None else 0
        return usage_of(self.num_prompt_tokens, self.num_completion_tokens, cached)

    @property
    def num_completion_tokens(self) -> int:
        if self.request.max_tokens == 0:
            return 0
        return sum(len(choice.turn.stats.token_ids) for choice in self.choices)

    def kv(self) -> KvReport:
        """Return the response's `kv` object; while the turns run, what is known so far."""
        asked, used = self.request.token_limit, self.choices[0].turn.request.sampling.max_tokens
        report = kv_report(
            self._chosen,
            self.num_prompt_tokens,
            [choice.turn.stats for choice in self.choices],
            num_kept_bins=self.request.kv_kept_bins or 0,
            max_tokens=used if asked is not None and used < asked[1] else None,
        )
        if self._is_unstored:
            report["session"] = "not_stored"
        return report

    async def _commit(self, lease: SessionLease, before: SessionRecord | None, prompt: Prompt) -> None:
        choice, stats = self.choices[0], self.choices[0].turn.stats
        request, earlier = self.request, before.prefill_addresses if before is not None else ()
        pin, ttl_s = request.session_pin, request.session_ttl_s
        if before is not None:
            pin, ttl_s = before.pin if pin is None else pin, before.ttl_s if ttl_s is None else ttl_s
        record = replace(
            prompt.record(self.model, tuple(stats.token_ids), choice.message),
            turns=(before.turns if before is not None else 0) + 1,
            last_plan={name: value for name, value in self.kv().items() if not name.startswith("kept")},
            prefill_addresses=tuple(dict.fromkeys((stats.prefill_address, *earlier))),
            created_at_s=before.created_at_s if before is not None else self.services.clock(),
            decode_address=stats.decode_address,
            ttl_s=ttl_s or 0.0,
            pin=bool(pin),
        )
        if self.chain is not None:
            record = self.chain.added(record, before, self.choices[0], self.usage(), self.kv())
        elif before is not None:
            record = record.with_responses_of(before)
        try:
            self._committed = await lease.commit(record)
        except StoreUnavailable as error:
            lease.note_unstored()
            self._is_unstored = True
            if self.chain is not None:
                self.chain.body = None  # it says that the response is stored
            self._log.warning("turn was not stored", error=error.message)
            return
        if not self._committed:
            self._log.warning("turn was not added to its session: it was deleted or taken over")

    async def _publish(self, lease: SessionLease, prompt: Prompt) -> None:
        """Publish the staged history, unless the turn is not part of its session."""
        assert self._recording is not None, "every turn has ended"
        await asyncio.wait((self._recording,))
        is_current = self._committed and await lease.is_current()
        pin = is_current and lease.record is not None and lease.record.pin
        runner, stats = self.services.runner, self.choices[0].turn.stats
        await runner.publish(lease.key, stats, prompt.token_ids, is_current=is_current, pin=pin)
        if self.request.releases:  # the session stays, and a later turn computes its KV again
            await runner.drop(lease.key)
        await self._recording  # raises what ended it
