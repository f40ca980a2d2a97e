"""A connection cut between prefill and decode costs a few bytes: no token runs twice, and none is wrong."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from kvtest.ports import free_port
from kvtest.proxy import CuttingProxy

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.service import DecodeService
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import (
    GenerateRequest,
    PrefillRequest,
    TicketIssued,
    TokenGenerated,
    TransferDone,
)
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.metrics import DecodeMetrics, PrefillMetrics
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.wire.receiver import BlockServer, BlockSink
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel
from kvferry.tools.oracle import OneProcessGenerator

WAIT_S = 60.0
SAMPLING = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = [10 + (7 * n) % 300 for n in range(160)]
CREDIT_BYTES = 16_000


class CutPair:
    """A prefill and a decode service with a proxy between them."""

    def __init__(self, model: LanguageModel, folder: Path) -> None:
        self.model = model
        self.metrics = PrefillMetrics()
        bind = f"tcp://127.0.0.1:{free_port()}"
        self.proxy = CuttingProxy(bind)

        def listen(sink: BlockSink) -> BlockServer:
            return BlockServer(ZmqListeningChannel(bind, advertise=self.proxy.endpoint), sink)

        def sender() -> BlockSender:
            return BlockSender(ZmqConnectingChannel(), buffer_bytes=1 << 24, timeout_s=WAIT_S)

        self.prefill = PrefillService(
            model=model,
            store=HistoryStore(
                max_bytes=1 << 20, num_layers=model.spec.num_layers, turn_lease_s=WAIT_S, clock=time.monotonic
            ),
            sender=sender(),
            server_factory=lambda sink: BlockServer(ZmqListeningChannel("tcp://127.0.0.1:0"), sink),
            metrics=self.metrics,
            config=PrefillConfig(),
            clock=time.monotonic,
        )
        self.decode = DecodeService(
            DecodeConfig(arena_bytes=32 << 20, credit_bytes=CREDIT_BYTES),
            model=model,
            tokenizer=ChatTokenizer.load(folder),
            metrics=DecodeMetrics(),
            server_factory=listen,
            sender=sender(),
        )

    async def generate(self, number: int, method: str) -> tuple[list[int], TransferDone]:
        plan = plan_for(method, budget=None if method == "full" else Budget(tokens=48))
        request_id, fingerprint = f"r{method}{number}", self.model.spec.fingerprint
        stream = self.decode.generate(
            GenerateRequest(
                request_id=request_id,
                model_fingerprint=fingerprint,
                prompt_token_ids=tuple(PROMPT),
                plan=plan,
                sampling=SAMPLING,
            ),
            timeout_s=WAIT_S,
        )
        async with aclosing(stream):
            issued = await anext(stream)
            assert isinstance(issued, TicketIssued)
            request = PrefillRequest(
                request_id=request_id,
                model_fingerprint=fingerprint,
                prompt_token_ids=tuple(PROMPT),
                sampling=SAMPLING,
                ticket=issued.ticket,
            )
            first, done = [event async for event in self.prefill.prefill(request, timeout_s=WAIT_S)]
            rest = [event.token.token_id async for event in stream if isinstance(event, TokenGenerated)]
        assert isinstance(done, TransferDone)
        return [first.token.token_id, *rest], done

    def counted(self, name: str) -> float:
        families = {family.name: family for family in self.metrics.registry.collect()}
        return sum(s.value for s in families[name].samples if s.name == f"{name}_total")


@pytest.fixture(scope="module")
def model(demo_model_dir: Path) -> LanguageModel:
    return load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=1024)


@pytest_asyncio.fixture
async def pair(model: LanguageModel, demo_model_dir: Path) -> AsyncIterator[CutPair]:
    async with AsyncExitStack() as stack:
        made = CutPair(model, demo_model_dir)
        stack.callback(made.proxy.close)
        for service in (made.prefill, made.decode):
            await service.start()
            stack.push_async_callback(service.close)
        yield made


@pytest.mark.parametrize("method", ["full", "rocketkv", "rdkv"])
async def test_a_transfer_cut_at_any_block_goes_on_with_no_token_run_twice(
    pair: CutPair, method: str
) -> None:
    plan = plan_for(method, budget=None if method == "full" else Budget(tokens=48))
    drawn = OneProcessGenerator(pair.model).generate(PROMPT, plan=plan, sampling=SAMPLING)
    expected = [token.token_id for token in drawn]
    cut = 0
    while pair.proxy.num_cuts == cut:
        run, shipped, resent = (
            pair.counted(f"kvferry_{name}")
            for name in ("prefill_tokens", "kv_transfer_bytes", "kv_resent_bytes")
        )
        pair.proxy.cuts, pair.proxy.forwarded_bytes = [cut], 0
        tokens, done = await pair.generate(cut, method)
        assert tokens == expected
        assert pair.counted("kvferry_prefill_tokens") - run == len(PROMPT)
        shipped_bytes = pair.counted("kvferry_kv_transfer_bytes") - shipped
        assert shipped_bytes == sum(done.bytes_by_kind.values())
        resent_bytes = pair.counted("kvferry_kv_resent_bytes") - resent
        assert resent_bytes <= CREDIT_BYTES
        assert pair.proxy.forwarded_bytes <= 1.2 * (shipped_bytes - resent_bytes)
        cut += 1
        assert cut < 200
    assert cut > 1 + pair.model.spec.num_layers
    assert pair.counted("kvferry_kv_resent_bytes") > 0
    pair.decode.arena.check_integrity()
    assert pair.decode.arena.free_bytes == 32 << 20
