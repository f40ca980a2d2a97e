"""One attempt at a turn: one decode worker and one prefill worker, whose two streams become one.

`turn.py` retries. An attempt says which worker failed it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import structlog

from kvferry.services.router.turn.waiting import cancelled, until
from kvferry.services.router.turn.worker_pool import Role, Worker
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.control.calls import DecodeControl, PrefillControl
from kvferry.shared.control.messages import (
    FinishReason,
    FirstToken,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    PrefillPrompt,
    PrefillRequest,
    RedirectRequest,
    SharedStart,
    Ticket,
    TicketIssued,
    TokenGenerated,
    TransferAccepted,
    TransferDone,
)
from kvferry.shared.errors import (
    OTHER_RELEASE,
    Cancelled,
    InvalidRequest,
    KvferryError,
    Overloaded,
    TransferFailed,
    WorkerUnavailable,
)
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.version import VERSION
from kvferry.shared.sampling.params import SampledToken

_Told = TypeVar("_Told", GenerateRequest, PrefillRequest)

CUT_OFF_S = 10.0
"""Time limit for returning the delivered tokens of a cut-off turn to the history."""
_REDIRECT_TIMEOUT_S = 10.0
_ACCEPT_TIMEOUT_S = 10.0
"""How long after a whole transfer decode may take to say that it has it."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest(PrefillPrompt):
    """One completion of one prompt.

    Of an implicit session only the prompt's history is stored, and decode retains rows as `retained_as` says.

    Attributes:
        request_id: the client's; each attempt derives its own id for the workers.
        keeps_cut_off: whether the delivered tokens of a cut-off completion become part of the session.
        prefer_prefill: addresses that may have the session's history, best first.
        prefer_decode: addresses that may have retained the session's last selection, best first.
        deadline_s: when the whole turn must have ended, on the event loop's clock.
    """

    request_id: str
    model: ModelSpec
    plan: CompressionPlan
    deadline_s: float
    keeps_cut_off: bool = False
    prefer_prefill: tuple[str, ...] = ()
    prefer_decode: tuple[str, ...] = ()


@dataclass(kw_only=True)
class TurnStats:
    """What a turn has cost so far; sums over all attempts where not stated otherwise.

    Attributes:
        token_ids: the completion so far.
        first: prefill's answer of the first attempt that delivered a token. Its prompt is the client's.
        shipped_bytes: everything that crossed the wire.
        delta_bytes: newly selected rows, where decode had retained the others; else None.
        cache_bytes: decode's memory for the sequence at its end.
        retained_fractions: of the first attempt that shipped; see `TransferDone`.
        smaller_budget: the least budget in tokens with which decode, short of memory, served an attempt; None
            if it never gave less than the request asked for.
        prefill_address, worker_request_id: where, and under which id, history was staged last.
        decode_address: where the last attempt decoded.
    """

    token_ids: list[int] = field(default_factory=list)
    first: FirstToken | None = None
    shipped_bytes: int = 0
    delta_bytes: int | None = None
    cache_bytes: int = 0
    smaller_budget: int | None = None
    prefill_s: float = 0.0
    retained_fractions: tuple[float, ...] = ()
    transfer_s: float = 0.0
    replays: int = 0
    prefill_address: str = ""
    decode_address: str = ""
    worker_request_id: str = ""

    @property
    def method(self) -> str:
        """The method in effect; "" before the first token."""
        return self.first.method if self.first is not None else ""


PromptShare = asyncio.Future["Attempt | None"]
"""Of several choices: the first one's attempt, once decode has the prompt, with which the others begin; None
has each of the others run the prompt for itself."""


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """Decode has reserved memory for the turn."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """No more tokens; the turn's stats are final."""

    reason: FinishReason


TurnEvent = Admitted | SampledToken | Finished


class Attempt:
    """Yields Admitted, each token once, and Finished; then waits until generated KV is back at prefill.

        decode:   ticket ────────────────────────► accepted ─► tokens ─► finished ─► history returned
                    ▲         └ failed ─► another worker's ticket, to which prefill ships again
        prefill:    └─► first token, those of a draft ─► transfer done

    Prefill's tokens are yielded at once; decode's, which go on after them, wait for them. Finished waits for
    `TransferDone`, which has the sizes.
    Closing either stream (an error, cancellation) frees what its worker has reserved.

    Attributes:
        failed_role: the worker that ended the attempt; None while nothing failed.

    Args:
        other_decode: a worker to go on with when decode has failed before it had the prompt's KV.
        share: with the request's `siblings`, which gets this attempt.
        start: with the prompt's KV that another choice's attempt has brought to decode; no prompt is run.
    """

    def __init__(
        self,
        prefill: Worker[PrefillControl],
        decode: Worker[DecodeControl],
        request: TurnRequest,
        stats: TurnStats,
        other_decode: Callable[[KvferryError], Worker[DecodeControl] | None],
        share: PromptShare | None = None,
        start: SharedStart | None = None,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.instance_ids: dict[Role, str] = {"prefill": prefill.instance_id, "decode": decode.instance_id}
        # Ids that clients choose may repeat; ids under which workers stage must not.
        self.worker_request_id = f"{request.request_id}.{secrets.token_hex(4)}"
        self.failed_role: Role | None = None
        self._request = request
        self.stats = stats
        self._due_index: int | None = None
        self._accepted = False
        self._other_decode = other_decode
        self._share = share
        self._start = start
        self.sibling_tokens: tuple[SampledToken, ...] = ()
        self._is_redirecting = False
        self._drawn: deque[SampledToken] = deque()
        self._has_first = False
        self._news: asyncio.Future[None] | None = None
        self._shipping: asyncio.Task[None] | None = None
        self._log = structlog.get_logger(__name__).bind(request_id=self.worker_request_id)

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """Yield the attempt's events. Raises: KvferryError, with `failed_role` set."""
        with self.prefill.busy():
            try:
                while True:
                    try:
                        async with aclosing(self._decoded()) as events:
                            async for event in events:
                                yield event
                        return
                    except (WorkerUnavailable, TransferFailed) as error:
                        if not self._moves(error):
                            raise
            finally:
                if self._shipping is not None:
                    await cancelled(self._shipping)

    def _moves(self, error: KvferryError) -> bool:
        """Return whether the attempt moves to another decode worker, to which prefill ships what it has."""
        shipping = self._shipping
        if self._accepted or self._is_redirecting or shipping is None or shipping.done():
            return False
        if (decode := self._other_decode(error)) is None:
            return False
        self.decode, self.instance_ids["decode"], self.failed_role = decode, decode.instance_id, None
        return True

    async def _decoded(self) -> AsyncGenerator[TurnEvent, None]:
        """Yield the events of the attempt with one decode worker."""
        with self.decode.busy(), self._blaming("decode"):
            async with aclosing(self._generate()) as decoding:
                ticket = await self._ticket(decoding)
                if self._shipping is None:
                    yield Admitted()
                    self._shipping = asyncio.create_task(self._ship(ticket))
                else:
                    await self._redirect(ticket)
                accepting = asyncio.create_task(self._acceptance(decoding))
                try:
                    while not (self._accepted and self._has_first):
                        await self._await_news(self._shipping, accepting)
                        while self._drawn:
                            yield self._in_order(self._drawn.popleft())
                    if self._share is not None and not self._share.done():
                        has_tokens = len(self.sibling_tokens) == len(self._request.siblings)
                        self._share.set_result(self if has_tokens else None)
                    finished = False
                    async for event in decoding:
                        match event:
                            case TokenGenerated(token=token):
                                async for drawn in self._drawn_before(token.index):
                                    yield drawn
                                yield self._in_order(token)
                            case GenerationFinished(finish_reason=reason, cache_bytes=cache_bytes):
                                await self.shipped()
                                while self._drawn:
                                    yield self._in_order(self._drawn.popleft())
                                self.stats.cache_bytes = cache_bytes
                                finished = True
                                yield Finished(reason=reason)
                    if not finished:
                        raise WorkerUnavailable("Decode's stream ended before the completion did")
                finally:
                    await cancelled(accepting)

    async def shipped(self) -> None:
        """Wait until prefill has sent everything, even if it was lost afterwards."""
        assert self._shipping is not None, "nothing is shipped before the first token"
        await asyncio.wait((self._shipping,))

    async def finish(self) -> None:
        """Have decode end the completion with the tokens that it has."""
        await self.decode.client.finish(self.worker_request_id, timeout_s=CUT_OFF_S)

    def _told(self, kind: type[_Told], **others: Any) -> _Told:
        """Return the request to a worker: every field that the turn has as well, and others."""
        turn, names = self._request, [field.name for field in fields(kind)]
        shared = {name: getattr(turn, name) for name in names if hasattr(turn, name)}
        ids = {"request_id": self.worker_request_id, "model_fingerprint": turn.model.fingerprint}
        return kind(**(shared | ids | others))

    def _remaining_s(self) -> float:
        """Return the workers' deadline, with time for a turn that may be cut off to return its tokens."""
        grace_s = CUT_OFF_S if self._request.keeps_cut_off else 0.0
        return max(0.001, self._request.deadline_s + grace_s - asyncio.get_running_loop().time())

    @contextmanager
    def _blaming(self, role: Role) -> Iterator[None]:
        try:
            yield
        except Cancelled as error:
            # Cancellation by this router is not a KvferryError: the worker gave up, as a stopping one does.
            self.failed_role = self.failed_role or role
            raise WorkerUnavailable(f"The {role} worker cancelled the turn: {error.message}") from error
        except KvferryError as error:
            if self.failed_role is None:
                # The surviving end reports a broken transfer.
                peer: Role = "prefill" if role == "decode" else "decode"
                self.failed_role = peer if isinstance(error, TransferFailed) else role
                if _is_of_release(error):
                    raise self._of_release(error, role) from error
            raise

    def _of_release(self, error: KvferryError, role: Role) -> KvferryError:
        """Blame the worker's release for refusing something that this router considers valid.

        Raises: InvalidRequest: the plan does not go with the prompt; its client is to be told so.
        """
        request, model = self._request, self._request.model
        for budget in (request.plan.budget, *request.plan.budget.smaller()):
            resolve_plan(
                replace(request.plan, budget=budget),
                num_prompt_tokens=len(request.prompt_token_ids),
                max_new_tokens=request.sampling.max_tokens,
                num_layers=model.num_layers,
                head_dim=model.head_dim,
                layers=model.layers,
            )
        address = (self.prefill if role == "prefill" else self.decode).address
        return Overloaded(
            f"The {role} worker {address} cannot run method {request.plan.method!r} as this router, kvferry "
            f"{VERSION}, sends it; the two are of different releases: {error.message}",
            reason=OTHER_RELEASE,
        )

    async def _redirect(self, ticket: Ticket) -> None:
        """Have prefill ship what it has to another worker's ticket. If it cannot, the attempt fails."""
        self._is_redirecting = True
        with self._blaming("prefill"):
            request = RedirectRequest(request_id=self.worker_request_id, ticket=ticket)
            await self.prefill.client.redirect(request, timeout_s=_REDIRECT_TIMEOUT_S)
        self._is_redirecting = False

    async def _ship(self, ticket: Ticket) -> None:
        """Run prefill against a ticket. Once decode has the whole transfer, losing prefill is no failure."""
        if self._start is not None:
            self._has_first = True
            self._take(self._start.first_token)
            return
        stats, sent = self.stats, False
        request = self._told(PrefillRequest, ticket=ticket)
        stream = self.prefill.client.prefill(request, timeout_s=self._remaining_s())
        with self._blaming("prefill"):
            try:
                async with aclosing(stream):
                    async for event in stream:
                        match event:
                            case TokenGenerated(token=token):
                                self._take(token)
                            case FirstToken(token=token):
                                stats.first = stats.first or event
                                self.sibling_tokens = event.sibling_tokens
                                self._has_first = True
                                self._take(token)
                            case TransferDone(delta_bytes=delta_bytes):
                                stats.prefill_s += event.prefill_s
                                stats.retained_fractions = (
                                    stats.retained_fractions or event.retained_fractions
                                )
                                stats.shipped_bytes += sum(event.bytes_by_kind.values())
                                stats.transfer_s += event.transfer_s
                                if delta_bytes is not None:
                                    stats.delta_bytes = (stats.delta_bytes or 0) + delta_bytes
                                sent = True
                if not (sent and self._has_first):
                    raise WorkerUnavailable("Prefill's stream ended before its transfer did")
            except KvferryError as error:
                if not (self._accepted and self._has_first):
                    raise
                self._log.warning("prefill lost after its transfer", error=error.message)

    def _take(self, token: SampledToken) -> None:
        """Take a token of prefill's, for the task that waits for it."""
        self._drawn.append(token)
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _await_news(self, *tasks: asyncio.Task[None]) -> None:
        """Wait for a token of prefill's, or for decode's acceptance. Args: tasks: prefill's first."""
        if not self._drawn:
            self._news = asyncio.get_running_loop().create_future()
            await until(self._news, *tasks, patience_s=_ACCEPT_TIMEOUT_S)

    async def _drawn_before(self, index: int) -> AsyncGenerator[SampledToken, None]:
        assert self._shipping is not None, "decode has the prompt"
        while self._due_index is None or self._due_index < index:
            while self._drawn:
                yield self._in_order(self._drawn.popleft())
            if self._shipping.done():
                return
            await self._await_news(self._shipping)

    def _generate(self) -> AsyncGenerator[GenerateEvent, None]:
        session = self._request.session
        is_implicit = session is not None and session.is_implicit
        request = self._told(
            GenerateRequest,
            store_history=session is not None and not is_implicit,
            session=self._request.retained_as if is_implicit else session,
            num_siblings=len(self._request.siblings),
            shares=self._start,
        )
        return self.decode.client.generate(request, timeout_s=self._remaining_s())

    async def _ticket(self, decoding: AsyncGenerator[GenerateEvent, None]) -> Ticket:
        event = await anext(decoding, None)
        if not isinstance(event, TicketIssued):
            raise WorkerUnavailable("Decode ended the turn without a ticket")
        granted = event.ticket.plan.plan.budget.tokens if event.ticket.plan is not None else None
        if granted is not None and granted < (self._request.plan.budget.tokens or 0):
            self.stats.smaller_budget = min(granted, self.stats.smaller_budget or granted)
        return event.ticket

    async def _acceptance(self, decoding: AsyncGenerator[GenerateEvent, None]) -> None:
        with self._blaming("decode"):
            if not isinstance(await anext(decoding, None), TransferAccepted):
                raise WorkerUnavailable("Decode's stream ended before the transfer was accepted")
            self._accepted = True
            self._tell()

    def _in_order(self, token: SampledToken) -> SampledToken:
        if self._due_index not in (None, token.index):
            raise TransferFailed(
                f"Token {token.index} arrived instead of token {self._due_index}", reason="token_gap"
            )
        self._due_index = token.index + 1
        return token


def _is_of_release(error: KvferryError) -> bool:
    """Return whether a worker refuses what its router made of a request; earlier releases do not say so."""
    if error.reason == OTHER_RELEASE:
        return True
    is_plain = isinstance(error, InvalidRequest) and error.reason == InvalidRequest.category
    return is_plain and (error.param or "").startswith(("kv_compression", "ticket"))
