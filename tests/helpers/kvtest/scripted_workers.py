"""Scripted workers: both control interfaces in memory, without a model.

A completion is a fixed function of the prompt and the token's index (`scripted_token`), so that a replay
which is right gives the same tokens as an undisturbed turn. Faults are set from outside, a turn at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    FirstToken,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryInfo,
    HistoryReturned,
    PrefillEvent,
    PrefillRequest,
    PrefixRequest,
    RedirectRequest,
    SessionKey,
    Ticket,
    TicketIssued,
    TokenGenerated,
    TransferAccepted,
    TransferDone,
    WorkerStatus,
)
from kvferry.shared.errors import KvferryError, TransferFailed, WorkerUnavailable
from kvferry.shared.history.records import BLOCK_TOKENS, block_hashes
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.wire.messages import PROTOCOL_VERSION

TRANSFER_BYTES = {"rows": 1000, "index": 20, "manifest": 3}
TIMEOUT_S = 60.0


@dataclass
class Transfer:
    """One reservation: the scripted prefill puts the tokens that it draws here for the scripted decode."""

    drawn: asyncio.Future[list[SampledToken]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Wire:
    """What connects the two sides: reservations by transfer id."""

    def __init__(self) -> None:
        self.transfers: dict[int, Transfer] = {}

    def open(self, request: GenerateRequest, spec: ModelSpec) -> Ticket:
        """A ticket for a request, as a decode worker gives it that is short of memory.

        Its plan is resolved with the least budget that the request allows.
        """
        budget = (request.plan.budget, *request.plan.budget.smaller())[-1]
        transfer_id = secrets.randbits(63)
        self.transfers[transfer_id] = Transfer()
        return Ticket(
            endpoint="inproc://scripted",
            transfer_id=transfer_id,
            generation=1,
            credit_bytes=1 << 20,
            lease_s=30.0,
            reserved_bytes=4096,
            plan=resolve_plan(
                replace(request.plan, budget=budget),
                num_prompt_tokens=len(request.prompt_token_ids),
                max_new_tokens=request.sampling.max_tokens,
                num_layers=spec.num_layers,
                head_dim=spec.head_dim,
                layers=spec.layers,
            ),
        )


def failing_at(count: int, error: KvferryError) -> Callable[[int], None]:
    """Return a fault that raises once so many tokens were sent."""

    def fault(num_tokens: int) -> None:
        if num_tokens == count:
            raise error

    return fault


def lost() -> KvferryError:
    return WorkerUnavailable("the connection broke")


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class Script:
    """How both sides behave.

    Attributes:
        token: the completion's token at an index, given the client's prompt.
        token_delay_s: between two tokens.
        prefill_delay_s: before the first token.
        num_drafted: how many tokens prefill draws after the first one.
        may_draft: while it is cleared, the second of them waits.
        may_prefill, may_decode, may_return: while one is cleared, first tokens, later tokens or returns of
            history wait. A turn that is to finish waits for no later token.
    """

    spec: ModelSpec
    token: Callable[[tuple[int, ...], int, SamplingParams], int]
    new_assembler: Callable[[SamplingParams], TextAssembler]
    token_delay_s: float = 0.0
    prefill_delay_s: float = 0.0
    num_drafted: int = 0
    may_draft: asyncio.Event = field(default_factory=_open)
    may_prefill: asyncio.Event = field(default_factory=_open)
    may_decode: asyncio.Event = field(default_factory=_open)
    may_return: asyncio.Event = field(default_factory=_open)

    def sample(self, prompt: tuple[int, ...], sampling: SamplingParams, index: int) -> SampledToken:
        """Token `index` of the completion; a replay's prompt ends with the tokens before it."""
        client_prompt = prompt[: len(prompt) - sampling.first_index]
        token_id = self.token(client_prompt, index, sampling)
        if sampling.logprobs is None:
            return SampledToken(token_id=token_id, index=index)
        top = tuple((token_id + rank, -0.5 - rank) for rank in range(sampling.logprobs))
        return SampledToken(token_id=token_id, index=index, logprob=-0.5, top_logprobs=top)

    def stops(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Callable[[int], bool]:
        """Return what takes each token of a completion and says whether it ends with it."""
        assembler = self.new_assembler(sampling)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.spec.eos_token_ids)}
        for token_id in prompt[len(prompt) - sampling.first_index :]:
            assembler.push(token_id)
        return lambda token_id: assembler.push(token_id).stopped or token_id in ends


class _Worker:
    def __init__(self, role: str, script: Script) -> None:
        self.role = role
        self.script = script
        self.instance_id = secrets.token_hex(4)
        self.ready = True
        self.version = PROTOCOL_VERSION
        self.active: set[str] = set()
        self.requests: list[GenerateRequest | PrefillRequest] = []
        self.timeouts_s: list[float] = []
        self.faults: list[Callable[[int], None]] = []
        """One entry a turn: called with the number of tokens sent so far, may raise."""
        self.status_error: KvferryError | None = None
        self.num_statuses = 0

    async def asked(self) -> None:
        """Wait until a pool has asked for the status once more, and noted it."""
        before = self.num_statuses
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_statuses == before:
                await asyncio.sleep(0.005)

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        self.num_statuses += 1
        if self.status_error is not None:
            raise self.status_error
        return WorkerStatus(
            role=self.role,
            instance_id=self.instance_id,
            protocol_version=self.version,
            ready=self.ready,
            running=len(self.active),
            waiting=0,
            free_bytes=1 << 20,
            total_bytes=1 << 20,
            model=self.script.spec,
            methods=("full", "rocketkv", "snapkv"),
            kernel_paths={"an_op": "torch"},
        )

    def _next_fault(self, probe: bool) -> Callable[[int], None]:
        return self.faults.pop(0) if self.faults and not probe else lambda _: None

    @contextlib.contextmanager
    def _turn(self, request: GenerateRequest | PrefillRequest, timeout_s: float):
        if not request.probe:
            self.active.add(request.request_id)
            self.requests.append(request)
            self.timeouts_s.append(timeout_s)
        try:
            yield
        finally:
            self.active.discard(request.request_id)


class ScriptedDecode(_Worker):
    """Yields the script's tokens once the scripted prefill has answered its ticket."""

    def __init__(self, script: Script, wire: Wire) -> None:
        super().__init__("decode", script)
        self._wire = wire
        self.history_error: KvferryError | None = None
        self.dropped: list[SessionKey] = []
        self.finishing: set[str] = set()
        self.shared: set[str] = set()
        """Requests whose prompts siblings may share."""

    async def finish(self, request_id: str, *, timeout_s: float) -> None:
        self.finishing.add(request_id)

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        self.dropped.append(session)
        return HistoryInfo(num_tokens=0, size_bytes=0, tier="retained")

    async def next_step(self) -> None:
        """Wait until the next token is there."""
        await asyncio.sleep(self.script.token_delay_s)

    async def _may_go_on(self, request_id: str) -> None:
        while not self.script.may_decode.is_set() and request_id not in self.finishing:
            await asyncio.sleep(0.005)

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        fault = self._next_fault(request.probe)
        with self._turn(request, timeout_s):
            fault(-1)
            ticket = self._wire.open(request, self.script.spec)
            yield TicketIssued(ticket=ticket)
            if request.shares is not None:
                assert request.shares.request_id in self.shared
                drawn = [request.shares.first_token]
            else:
                drawn = await asyncio.wait_for(self._wire.transfers[ticket.transfer_id].drawn, TIMEOUT_S)
            fault(0)
            if request.num_siblings:
                self.shared.add(request.request_id)
            yield TransferAccepted(transfer_s=0.001)
            sampling = request.sampling
            stops = self.script.stops(request.prompt_token_ids, sampling)
            for count in itertools.count(1):
                if count <= len(drawn):
                    token = drawn[count - 1]
                else:
                    await self.next_step()
                    await self._may_go_on(request.request_id)
                    fault(count - 1)
                    index = sampling.first_index + count - 1
                    token = self.script.sample(request.prompt_token_ids, sampling, index)
                    yield TokenGenerated(token=token)
                stopped = stops(token.token_id)
                is_cut = request.request_id in self.finishing and count >= len(drawn)
                if stopped or count == sampling.max_tokens or is_cut:
                    reason = "stop" if stopped else "length"
                    yield GenerationFinished(finish_reason=reason, num_tokens=count, cache_bytes=2048)
                    break
            if request.store_history:
                await self.script.may_return.wait()
                if self.history_error is not None:
                    raise self.history_error
                yield HistoryReturned(num_tokens=count - 1)


class ScriptedPrefill(_Worker):
    """Answers with the script's first token, and stores token ids where a real worker stores KV."""

    def __init__(self, script: Script, wire: Wire) -> None:
        super().__init__("prefill", script)
        self._wire = wire
        self.history: dict[SessionKey | None, tuple[int, ...]] = {}
        self.staged: dict[str, SessionKey] = {}
        self.pins: dict[SessionKey, bool] = {}
        self.aborted: list[str] = []
        self.dropped: list[SessionKey] = []
        self.commit_error: KvferryError | None = None
        self.prefix_error: KvferryError | None = None

    async def prefill(
        self, request: PrefillRequest, *, timeout_s: float
    ) -> AsyncGenerator[PrefillEvent, None]:
        fault = self._next_fault(request.probe)
        with self._turn(request, timeout_s):
            if request.session is not None:
                self.staged[request.request_id] = request.session
            await asyncio.sleep(self.script.prefill_delay_s)
            await self.script.may_prefill.wait()
            fault(0)
            drawn = self._drawn(request)
            assert request.ticket.plan is not None
            yield FirstToken(
                token=drawn[0],
                method=request.ticket.plan.plan.method,
                reused_tokens=self._reused(request),
                full_bytes=len(request.prompt_token_ids) * self.script.spec.kv_token_bytes,
                queue_s=0.0,
                prompt_logprobs=self._prompt_logprobs(request),
                sibling_tokens=tuple(
                    self.script.sample(request.prompt_token_ids, sibling, sibling.first_index)
                    for sibling in request.siblings
                ),
            )
            for token in drawn[1:]:
                await self.script.may_draft.wait()
                yield TokenGenerated(token=token)
            transfer = self._wire.transfers.pop(request.ticket.transfer_id, None)
            if transfer is None or transfer.drawn.done():
                raise TransferFailed("The ticket is not known")
            transfer.drawn.set_result(drawn)
            fault(1)
            num_bins = request.retained_bins
            yield TransferDone(
                bytes_by_kind=TRANSFER_BYTES,
                transfer_s=0.004,
                prefill_s=0.002,
                compress_s=0.001,
                retained_fractions=tuple(b / max(1, num_bins - 1) for b in range(num_bins)),
            )

    def _drawn(self, request: PrefillRequest) -> list[SampledToken]:
        """The first token, and those of a draft, to the end of the completion at most."""
        sampling, drawn = request.sampling, list[SampledToken]()
        most = 1 if request.siblings else min(1 + self.script.num_drafted, sampling.max_tokens)
        stops = self.script.stops(request.prompt_token_ids, sampling)
        while len(drawn) < most:
            index = sampling.first_index + len(drawn)
            drawn.append(self.script.sample(request.prompt_token_ids, sampling, index))
            if stops(drawn[-1].token_id):
                break
        return drawn

    @staticmethod
    def _prompt_logprobs(request: PrefillRequest) -> tuple[SampledToken, ...]:
        """Token i has log-probability -i, and the ids after it are less likely by one each."""
        if (count := request.prompt_logprobs) is None:
            return ()
        assert request.session is None
        return tuple(
            SampledToken(
                token_id=token_id,
                index=i,
                logprob=-float(i),
                top_logprobs=tuple((token_id + rank, -float(i + rank)) for rank in range(count)),
            )
            for i, token_id in enumerate(request.prompt_token_ids[1:], 1)
        )

    def _reused(self, request: PrefillRequest) -> int:
        if request.session is None:
            return 0
        found = [self.history.get(request.session) or self.history.get(request.document) or ()]
        if request.session.is_implicit:
            owner = request.session.owner
            found += [
                stored for key, stored in self.history.items() if key is not None and key.owner == owner
            ]
        return max(self._shared(stored, request.prompt_token_ids) for stored in found)

    @staticmethod
    def _shared(stored: tuple[int, ...], prompt: tuple[int, ...]) -> int:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(stored, prompt, strict=False))
        return min(sum(1 for _ in same), len(prompt) - 1)

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo:
        if self.commit_error is not None:
            raise self.commit_error
        assert self.staged.pop(request.request_id) == request.session
        self.history[request.session] = request.token_ids[:-1]
        self.pins[request.session] = request.pin
        return self._info(request.session)

    async def redirect(self, request: RedirectRequest, *, timeout_s: float) -> None:
        raise TransferFailed("nothing is sent again here", reason="resend")

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        self.staged.pop(request_id, None)
        self.aborted.append(request_id)

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        return self._info(session)

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        info = self._info(session)
        self.history.pop(session, None)
        self.dropped.append(session)
        return info

    async def prefix_info(self, request: PrefixRequest, *, timeout_s: float) -> HistoryInfo:
        if self.prefix_error is not None:
            raise self.prefix_error
        shared = 0
        for key, stored in self.history.items():
            if key is not None and key.owner == request.owner:
                pairs = zip(block_hashes(stored, len(stored)), request.block_hashes, strict=False)
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                shared = max(shared, sum(1 for _ in same) * BLOCK_TOKENS)
        return HistoryInfo(num_tokens=shared, size_bytes=0)

    def _info(self, session: SessionKey) -> HistoryInfo:
        stored = self.history.get(session, ())
        size_bytes = len(stored) * self.script.spec.kv_token_bytes
        return HistoryInfo(num_tokens=len(stored), size_bytes=size_bytes, tier="memory" if stored else "none")
