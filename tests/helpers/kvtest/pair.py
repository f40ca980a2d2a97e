"""One prefill and one decode service in this process, over an in-process hub: whole turns of sessions."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.models import DEMO_MODEL
from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.service import DecodeService
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.parts import PrefillRanks
from kvferry.services.prefill.server import build_store
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    FirstToken,
    GenerateRequest,
    HistoryReturned,
    PrefillRequest,
    SessionKey,
    Ticket,
    TicketIssued,
    TokenGenerated,
    TransferDone,
)
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.worker import ProcessTransport, RankTransport
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.telemetry.metrics import DecodeMetrics, PrefillMetrics
from kvferry.shared.wire.in_process import InProcessHub
from kvferry.shared.wire.sender import BlockSender
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

WAIT_S = 60.0
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SESSION = SessionKey(owner="o", session_id="s")
ARENA_BYTES = 32 << 20


@dataclass(kw_only=True)
class Turn:
    """What one turn came to."""

    ticket: Ticket
    sampled: list[SampledToken]
    done: TransferDone
    reused: int

    @property
    def tokens(self) -> list[int]:
        return [token.token_id for token in self.sampled]

    @property
    def shipped(self) -> dict[str, int]:
        """Return the bytes of the tensors on the wire by their kind."""
        return {kind: size for kind, size in self.done.bytes_by_kind.items() if size and kind != "manifest"}


async def answer(
    prefill: PrefillService,
    decode: DecodeService,
    request: GenerateRequest,
    forge: Callable[[Ticket], Ticket] = lambda ticket: ticket,
) -> Turn:
    """Run a request through both. Args: forge: what prefill is given for decode's ticket."""
    stream = decode.generate(request, timeout_s=WAIT_S)
    async with aclosing(stream):
        issued = await anext(stream)
        assert isinstance(issued, TicketIssued)
        asked = PrefillRequest(
            request_id=request.request_id,
            model_fingerprint=request.model_fingerprint,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            ticket=forge(issued.ticket),
            session=request.session,
        )
        first, *later, done = [event async for event in prefill.prefill(asked, timeout_s=WAIT_S)]
        rest = [event async for event in stream]
    assert isinstance(first, FirstToken)
    assert isinstance(done, TransferDone)
    assert isinstance(rest[-1], HistoryReturned) == request.store_history
    drawn = [event.token for event in (*later, *rest) if isinstance(event, TokenGenerated)]
    return Turn(ticket=issued.ticket, sampled=[first.token, *drawn], done=done, reused=first.reused_tokens)


@dataclass(kw_only=True)
class Pair:
    """One prefill and one decode service that ship to one another."""

    model: LanguageModel
    tokenizer: ChatTokenizer
    stack: AsyncExitStack
    hub: InProcessHub | ProcessTransport = field(default_factory=InProcessHub)
    rank_transport: RankTransport | None = None
    prefill_metrics: PrefillMetrics = field(default_factory=PrefillMetrics)
    decode_metrics: DecodeMetrics = field(default_factory=DecodeMetrics)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    async def start_prefill(self, **options: object) -> None:
        """Start one, in place of the former one if there was any."""
        settings = {"history_bytes": 1 << 30, "turn_lease_s": WAIT_S} | options
        config = PrefillConfig(**settings)  # type: ignore[arg-type]
        ranked = getattr(self.model, "model", self.model)  # without a test's wrapper
        self.store = build_store(config, spec=self.model.spec, metrics=self.prefill_metrics)
        self.prefill = PrefillService(
            model=self.model,
            store=self.store,
            ranks=PrefillRanks(
                ranked, BlockSender(self.hub.connecting(), buffer_bytes=1 << 24, timeout_s=WAIT_S)
            ),
            server_factory=self.hub.server,
            metrics=self.prefill_metrics,
            config=config,
            clock=time.monotonic,
        )
        await self.prefill.start()
        self.stack.push_async_callback(self.prefill.close)

    async def start_decode(self, **options: object) -> None:
        settings = {"arena_bytes": ARENA_BYTES, "retain_s": 600.0} | options
        self.decode = DecodeService(
            DecodeConfig(**settings),  # type: ignore[arg-type]
            model=self.model,
            tokenizer=self.tokenizer,
            metrics=self.decode_metrics,
            server_factory=self.hub.server,
            sender=BlockSender(self.hub.connecting(), buffer_bytes=1 << 24, timeout_s=WAIT_S),
            sweep_interval_s=0.02,
            rank_transport=self.rank_transport,
        )
        await self.decode.start()
        self.stack.push_async_callback(self.decode.close)

    async def turn(
        self,
        prompt: list[int],
        plan: CompressionPlan,
        *,
        session: SessionKey = SESSION,
        sampling: SamplingParams = SAMPLING,
        forge: Callable[[Ticket], Ticket] = lambda ticket: ticket,
    ) -> Turn:
        """A whole turn, committed. Args: forge: what prefill is given for decode's ticket."""
        request = GenerateRequest(
            request_id=f"r{next(self._ids)}",
            model_fingerprint=self.model.spec.fingerprint,
            prompt_token_ids=tuple(prompt),
            plan=plan,
            sampling=sampling,
            store_history=True,
            session=session,
        )
        turn = await answer(self.prefill, self.decode, request, forge)
        said = (*prompt, *turn.tokens)
        commit = CommitTurnRequest(request_id=request.request_id, session=session, token_ids=said)
        await self.prefill.commit_turn(commit, timeout_s=WAIT_S)
        return turn

    async def checked_turn(
        self,
        prompt: list[int],
        plan: CompressionPlan,
        oracle: OracleSession | None = None,
        *,
        session: SessionKey = SESSION,
        sampling: SamplingParams = SAMPLING,
    ) -> Turn:
        """A turn, whose tokens are those of one process. Args: oracle: the session there."""
        turn = await self.turn(prompt, plan, session=session, sampling=sampling)
        generator = OneProcessGenerator(self.model)
        expected = generator.generate(prompt, plan=plan, sampling=sampling, session=oracle)
        assert turn.tokens == [token.token_id for token in expected], plan.method
        return turn

    def retained_bytes(self) -> int:
        return self.decode.arena.bytes_by_state()["retained"]


@asynccontextmanager
async def started_pair(folder: Path, *, max_model_len: int = 512) -> AsyncIterator[Pair]:
    """One of the model in a folder, with the demo model's tokenizer."""
    async with AsyncExitStack() as stack:
        model = load_model(folder, device="cpu", max_model_len=max_model_len)
        made = Pair(model=model, tokenizer=ChatTokenizer.load(DEMO_MODEL), stack=stack)
        await made.start_prefill()
        await made.start_decode()
        yield made
