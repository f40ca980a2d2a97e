"""A connection cut between prefill and decode costs a few bytes: no token runs twice, and none is wrong."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import kvtest.wire as kit
import pytest
import pytest_asyncio
from kvtest.pair import WAIT_S, Turn, answer
from kvtest.ports import free_port
from kvtest.proxy import CuttingProxy, CuttingRingProxy

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.service import DecodeService
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.parts import PrefillRanks
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import GenerateRequest
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.telemetry.metrics import DecodeMetrics, PrefillMetrics
from kvferry.shared.wire.channel import Channel
from kvferry.shared.wire.receiver import BlockServer, BlockSink
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import SharedMemoryConnectingChannel, SharedMemoryListeningChannel
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel
from kvferry.tools.oracle import OneProcessGenerator

SAMPLING = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = [10 + (7 * n) % 300 for n in range(160)]
CREDIT_BYTES = 16_000
DEFAULT_CREDIT_BYTES: int = DecodeConfig().credit_bytes
"""More than a whole prompt here."""


class CutPair:
    """A prefill and a decode service with a proxy between them."""

    def __init__(self, model: LanguageModel, folder: Path, *, transport: str, credit_bytes: int) -> None:
        self.model = model
        self.credit_bytes = credit_bytes
        self.metrics = PrefillMetrics()
        bind, own = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        # a sender finds a receiver's socket by the address that is advertised: here the proxy's
        self.proxy = CuttingProxy(bind) if transport == "tcp" else CuttingRingProxy(own)

        def listen(sink: BlockSink) -> BlockServer:
            if transport == "tcp":
                return BlockServer(ZmqListeningChannel(bind, advertise=self.proxy.endpoint), sink)
            return BlockServer(
                Advertised(ZmqListeningChannel(bind, advertise=own), self.proxy.endpoint), sink
            )

        def sender() -> BlockSender:
            network = ZmqConnectingChannel()
            channel: Channel = network if transport == "tcp" else SharedMemoryConnectingChannel(network)
            return BlockSender(channel, buffer_bytes=1 << 24, timeout_s=WAIT_S)

        self.prefill = PrefillService(
            model=model,
            store=HistoryStore(
                max_bytes=1 << 20, num_layers=model.spec.num_layers, turn_lease_s=WAIT_S, clock=time.monotonic
            ),
            ranks=PrefillRanks(model, sender()),
            server_factory=lambda sink: BlockServer(ZmqListeningChannel("tcp://127.0.0.1:0"), sink),
            metrics=self.metrics,
            config=PrefillConfig(),
            clock=time.monotonic,
        )
        self.decode = DecodeService(
            DecodeConfig(arena_bytes=32 << 20, credit_bytes=credit_bytes),
            model=model,
            tokenizer=ChatTokenizer.load(folder),
            metrics=DecodeMetrics(),
            server_factory=listen,
            sender=sender(),
        )

    async def generate(self, number: int, method: str) -> Turn:
        plan = plan_for(method, budget=None if method == "full" else Budget(tokens=48))
        request = GenerateRequest(
            request_id=f"r{method}{number}",
            model_fingerprint=self.model.spec.fingerprint,
            prompt_token_ids=tuple(PROMPT),
            plan=plan,
            sampling=SAMPLING,
        )
        return await answer(self.prefill, self.decode, request)

    def counted(self, name: str) -> float:
        families = {family.name: family for family in self.metrics.registry.collect()}
        return sum(s.value for s in families[name].samples if s.name == f"{name}_total")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a new connection may take long."""
    kit.resume_within(monkeypatch, WAIT_S)


@pytest.fixture(scope="module")
def model(demo_model_dir: Path) -> LanguageModel:
    return load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=1024)


class Advertised(SharedMemoryListeningChannel):
    """Shared memory whose tickets name a proxy, while its socket's name follows from its own address."""

    def __init__(self, network: ZmqListeningChannel, endpoint: str) -> None:
        super().__init__(network)
        self._advertised = endpoint
        self._is_open = False

    @property
    def endpoint(self) -> str:
        return self._advertised if self._is_open else super().endpoint

    def open(self) -> None:
        super().open()
        self._is_open = True


@pytest_asyncio.fixture
async def pair(
    request: pytest.FixtureRequest, model: LanguageModel, demo_model_dir: Path
) -> AsyncIterator[CutPair]:
    transport, credit_bytes = request.param
    async with AsyncExitStack() as stack:
        made = CutPair(model, demo_model_dir, transport=transport, credit_bytes=credit_bytes)
        stack.callback(made.proxy.close)
        for service in (made.prefill, made.decode):
            await service.start()
            stack.push_async_callback(service.close)
        yield made


@pytest.mark.parametrize(
    ("pair", "method"),
    [
        *(
            pytest.param(("tcp", credit_bytes), "full", marks=pytest.mark.full)
            for credit_bytes in (CREDIT_BYTES, DEFAULT_CREDIT_BYTES)
        ),
        *((("tcp", CREDIT_BYTES), method) for method in ("rocketkv", "rdkv")),
        pytest.param(("shm", CREDIT_BYTES), "rocketkv", marks=[kit.needs_shared_memory, pytest.mark.full]),
        pytest.param(("shm", DEFAULT_CREDIT_BYTES), "full", marks=kit.needs_shared_memory),
    ],
    indirect=["pair"],
)
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
        turn = await pair.generate(cut, method)
        assert turn.tokens == expected
        assert pair.counted("kvferry_prefill_tokens") - run == len(PROMPT)
        shipped_bytes = pair.counted("kvferry_kv_transfer_bytes") - shipped
        assert shipped_bytes == sum(turn.done.bytes_by_kind.values())
        resent_bytes = pair.counted("kvferry_kv_resent_bytes") - resent
        # of what was in flight when the connection was cut; with the default credit that may be all of it
        assert resent_bytes <= min(pair.credit_bytes, shipped_bytes - resent_bytes)
        assert pair.proxy.forwarded_bytes <= 1.2 * (shipped_bytes - resent_bytes)
        cut += 1
        assert cut < 200
    # the manifest, a message or more a layer, the end
    assert cut >= 2 + pair.model.spec.num_layers
    assert pair.counted("kvferry_kv_resent_bytes") > 0
    pair.decode.arena.check_integrity()
    assert pair.decode.arena.free_bytes == 32 << 20
