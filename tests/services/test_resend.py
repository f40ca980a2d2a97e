"""A decode worker that dies before it has a prompt's KV: prefill ships what it has to another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio
from kvtest.parallel import in_ranks, same_or_tied

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.service import DecodeService
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.parts import PrefillRanks
from kvferry.services.prefill.service import PrefillService
from kvferry.services.router.turn.attempt import TurnRequest
from kvferry.services.router.turn.runner import BackgroundTasks, TurnRunner
from kvferry.services.router.turn.turn import Turn
from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import PrefillRequest, RedirectRequest, SessionKey, Ticket
from kvferry.shared.errors import KvferryError, TransferFailed
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.worker import ProcessTransport, RankTransport
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.telemetry.metrics import DecodeMetrics, PrefillMetrics, RouterMetrics
from kvferry.shared.wire.in_process import InProcessHub
from kvferry.shared.wire.messages import BlockHeader
from kvferry.shared.wire.receiver import BlockServer, BlockSink
from kvferry.shared.wire.sender import BlockSender
from kvferry.tools.oracle import OneProcessGenerator

WAIT_S = 60.0
SAMPLING = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = tuple(10 + (7 * n) % 300 for n in range(160))
CREDIT_BYTES = 40_000


class Stack:
    """A prefill service, two decode services and a router's turns."""

    def __init__(
        self,
        model: LanguageModel,
        folder: Path,
        *,
        buffer_bytes: int = 1 << 24,
        in_parts: Mapping[str, LanguageModel] = MappingProxyType({}),
    ) -> None:
        """Args: in_parts: the decode services that take a prompt in parts, with their models."""
        self.model = model
        settings = DecodeConfig(tensor_parallel=2)
        self.hub = ProcessTransport(settings, "decode") if in_parts else InProcessHub()
        self.prefill_metrics, self.router_metrics = PrefillMetrics(), RouterMetrics()
        self.blocks_before_death: int | None = None
        self.dying: asyncio.Task[None] | None = None
        self.loop = asyncio.get_running_loop()
        store = HistoryStore(
            max_bytes=1 << 26, num_layers=model.spec.num_layers, turn_lease_s=WAIT_S, clock=time.monotonic
        )
        self.prefill = PrefillService(
            model=model,
            store=store,
            ranks=PrefillRanks(
                model, BlockSender(self.hub.connecting(), buffer_bytes=buffer_bytes, timeout_s=WAIT_S)
            ),
            server_factory=self.hub.server,
            metrics=self.prefill_metrics,
            config=PrefillConfig(transfer_timeout_s=WAIT_S),
            clock=time.monotonic,
        )
        tokenizer = ChatTokenizer.load(folder)
        self.decode: dict[str, DecodeService] = {}
        for name in ("a", "b"):
            self.decode[name] = DecodeService(
                DecodeConfig(arena_bytes=32 << 20, credit_bytes=CREDIT_BYTES),
                model=in_parts.get(name, model),
                tokenizer=tokenizer,
                metrics=DecodeMetrics(),
                server_factory=lambda sink, name=name: self._serve(sink, name),
                sender=BlockSender(self.hub.connecting(), buffer_bytes=1 << 24, timeout_s=WAIT_S),
                rank_transport=RankTransport.of(settings, "decode") if name in in_parts else None,
            )

    def _serve(self, sink: BlockSink, name: str) -> BlockServer:
        return self.hub.server(sink if name == "b" else DyingSink(sink, self._on_block))

    def _on_block(self) -> None:
        """Called for each block at worker a, on its wire's thread."""
        if self.blocks_before_death is None:
            return
        self.blocks_before_death -= 1
        if self.blocks_before_death < 0:
            self.blocks_before_death = None
            asyncio.run_coroutine_threadsafe(self._die(), self.loop).result(WAIT_S)

    async def _die(self) -> None:
        """Begin to close worker a: its stream fails at once."""
        self.dying = asyncio.create_task(self.decode["a"].close())

    async def turn(self, plan: CompressionPlan, session: SessionKey | None = None) -> tuple[list[int], Turn]:
        prefill = WorkerPool.of_clients("prefill", {"p": self.prefill}, status_interval_s=0.1)
        decode = WorkerPool.of_clients("decode", dict(self.decode), status_interval_s=0.1)
        runner = TurnRunner(
            prefill=prefill,
            decode=decode,
            tasks=BackgroundTasks(),
            metrics=self.router_metrics,
            max_recoveries=3,
            backoff_s=0.05,
            recovery_wait_s=WAIT_S,
        )
        async with AsyncExitStack() as stack:
            for pool in (prefill, decode):
                await pool.start()
                stack.push_async_callback(pool.close)
                await pool.wait_ready(self.model.spec.fingerprint, timeout_s=WAIT_S)
            turn = Turn(
                runner,
                TurnRequest(
                    request_id="r",
                    model=self.model.spec,
                    prompt_token_ids=PROMPT,
                    plan=plan,
                    sampling=SAMPLING,
                    deadline_s=self.loop.time() + WAIT_S,
                    session=session,
                    prefer_decode=("a",),
                ),
            )
            async with aclosing(turn.events()) as events:
                tokens = [event.token_id async for event in events if isinstance(event, SampledToken)]
            await runner.tasks.close(WAIT_S)
        return tokens, turn

    def prefilled(self) -> float:
        return self.prefill_metrics.prefill_tokens.labels("demo")._value.get()

    def resent_bytes(self) -> float:
        (family,) = self.prefill_metrics.kv_resent_bytes.collect()
        return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))

    def recoveries(self) -> float:
        return self.router_metrics.recoveries.labels("decode")._value.get()


class DyingSink:
    """Passes everything on, and reports each block."""

    def __init__(self, sink: BlockSink, on_block: Callable[[], None]) -> None:
        self._sink, self._on_block = sink, on_block
        self.open, self.begin_layer, self.commit = sink.open, sink.begin_layer, sink.commit
        self.abort = sink.abort

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        self._on_block()
        self._sink.write(header, payload)


@pytest.fixture(scope="module")
def model(demo_model_dir: Path) -> LanguageModel:
    return load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=1024)


@pytest_asyncio.fixture
async def started(model: LanguageModel, demo_model_dir: Path) -> AsyncIterator[Callable[..., object]]:
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> Stack:
            made = Stack(model, demo_model_dir, **options)
            for service in (made.prefill, *made.decode.values()):
                await service.start()
                stack.push_async_callback(service.close)
            return made

        yield start


def plan_of(method: str) -> CompressionPlan:
    return plan_for(method, budget=None if method == "full" else Budget(tokens=48))


def expected_tokens(model: LanguageModel, plan: CompressionPlan) -> list[int]:
    drawn = OneProcessGenerator(model).generate(list(PROMPT), plan=plan, sampling=SAMPLING)
    return [token.token_id for token in drawn]


@pytest.mark.covering(1)
@pytest.mark.parametrize("blocks", [0, 1, 3, 7])
@pytest.mark.parametrize("method", ["full", "rocketkv"])
async def test_another_decode_worker_gets_the_blocks_and_no_token_runs_twice(
    started: Callable[..., object], method: str, blocks: int
) -> None:
    stack: Stack = await started()
    stack.blocks_before_death = blocks
    session = SessionKey(owner="o", session_id="s")
    tokens, turn = await stack.turn(plan_of(method), session)
    assert tokens == expected_tokens(stack.model, plan_of(method))
    assert stack.dying is not None
    assert turn.stats.decode_address == "b"
    assert stack.prefilled() == len(PROMPT)
    assert stack.recoveries() == 1
    assert stack.resent_bytes() > 0
    await stack.dying
    # the generated KV came back from the other worker
    assert stack.prefill._store.turn(turn.stats.worker_request_id) is not None
    stack.decode["b"].arena.check_integrity()


async def test_where_blocks_were_released_the_prompt_runs_again(started: Callable[..., object]) -> None:
    stack: Stack = await started(buffer_bytes=CREDIT_BYTES)
    stack.blocks_before_death = 12
    tokens, turn = await stack.turn(plan_of("full"))
    assert tokens == expected_tokens(stack.model, plan_of("full"))
    assert stack.dying is not None
    assert turn.stats.decode_address == "b"
    assert stack.prefilled() >= len(PROMPT)


@pytest.fixture(scope="module")
def several(demo_model_dir: Path) -> Iterator[LanguageModel]:
    with in_ranks(demo_model_dir, 2) as made:
        yield made


@pytest.mark.parametrize("in_parts", ["a", "b"], ids=["from parts", "to parts"])
async def test_parts_are_not_sent_again_and_the_prompt_runs_again_for_the_same_answer(
    started: Callable[..., object], several: LanguageModel, in_parts: str
) -> None:
    stack: Stack = await started(in_parts={in_parts: several})
    stack.blocks_before_death = 2
    refused: list[KvferryError] = []
    runs: list[PrefillRequest] = []
    redirect, prefill = stack.prefill.redirect, stack.prefill.prefill

    async def watched(request: RedirectRequest, *, timeout_s: float) -> None:
        try:
            await redirect(request, timeout_s=timeout_s)
        except KvferryError as error:
            refused.append(error)
            raise

    def counted(request: PrefillRequest, *, timeout_s: float) -> Any:
        runs.append(request)
        return prefill(request, timeout_s=timeout_s)

    stack.prefill.redirect, stack.prefill.prefill = watched, counted
    tokens, turn = await stack.turn(plan_of("full"))
    sampling = replace(SAMPLING, logprobs=2)
    oracle = OneProcessGenerator(stack.model).generate(list(PROMPT), plan=plan_of("full"), sampling=sampling)
    assert same_or_tied(tokens, oracle) > 0
    assert stack.dying is not None
    assert turn.stats.decode_address == "b"
    assert len(runs) == 2
    assert runs[0].prompt_token_ids == runs[1].prompt_token_ids == PROMPT
    assert stack.resent_bytes() == 0
    (error,) = refused
    assert isinstance(error, TransferFailed)
    assert error.reason == "resend"
    assert "parts" in error.message
    await stack.dying


async def test_an_unknown_request_is_not_redirected(started: Callable[..., object]) -> None:
    stack: Stack = await started()
    ticket = Ticket(
        endpoint="inproc://x", transfer_id=1, generation=1, credit_bytes=1, lease_s=1, reserved_bytes=0
    )
    with pytest.raises(TransferFailed, match="'nobody' is not running") as refused:
        await stack.prefill.redirect(RedirectRequest(request_id="nobody", ticket=ticket), timeout_s=WAIT_S)
    assert refused.value.reason == "resend"
