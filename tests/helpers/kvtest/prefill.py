"""A running prefill service over the demo model, with a recording decode side on the same in-process hub."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.parts import PrefillRanks
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.drafted import with_draft
from kvferry.shared.compression.formats.interface import Encoded
from kvferry.shared.compression.plan import CompressionPlan, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.control.messages import (
    CommitTurnRequest,
    FirstToken,
    HistoryInfo,
    PrefillEvent,
    PrefillRequest,
    SessionKey,
    Ticket,
    TokenGenerated,
    TransferDone,
)
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.model.interface import (
    DecodeAttention,
    DividingObserver,
    Division,
    LanguageModel,
    LayerStates,
    PrefillObserver,
)
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.spec import TORCH_DTYPES
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.telemetry.metrics import PrefillMetrics
from kvferry.shared.wire.frames import tensor_starts
from kvferry.shared.wire.in_process import InProcessHub
from kvferry.shared.wire.messages import BlockHeader, EndRecord, LayerHeader, Manifest, TransferKey
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender
from kvferry.tools.oracle import CapturedPrompt, Continuation, OneProcessGenerator
from kvtest.clock import Clock

WAIT_S = 60.0
DTYPES = {**TORCH_DTYPES, "int32": torch.int32, "int16": torch.int16, "uint8": torch.uint8}


class RecordingSink:
    """A decode worker's sink that keeps every byte. `refuse` is raised on open, whose times `num_refused`
    counts; `gate` holds up commits, of which `is_committing` tells."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.layers: dict[TransferKey, list[LayerHeader]] = {}
        self.ends: dict[TransferKey, EndRecord] = {}
        self.aborted: list[TransferKey] = []
        self.refuse: Exception | None = None
        self.num_refused = 0
        self.is_committing = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._bytes: dict[tuple[TransferKey, int, str], bytearray] = {}

    def open(self, manifest: Manifest) -> None:
        if self.refuse is not None:
            self.num_refused += 1
            raise self.refuse
        self.manifests.append(manifest)
        self.layers[manifest.key] = []

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        assert header.layer == len(self.layers[key])
        self.layers[key].append(header)
        for tensor in header.tensors:
            self._bytes[key, header.layer, tensor.name] = bytearray()

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        layer = self.layers[header.key][header.layer]
        announced = layer.tensors[header.tensor]
        size_bytes = tensor_starts(layer)[header.tensor + 1] - tensor_starts(layer)[header.tensor]
        buffer = self._bytes[header.key, header.layer, announced.name]
        assert len(buffer) == header.offset
        buffer.extend(payload)
        assert len(buffer) <= size_bytes

    def commit(self, end: EndRecord) -> None:
        self.is_committing.set()
        assert self.gate.wait(WAIT_S)
        self.ends[end.key] = end

    def abort(self, key: TransferKey, reason: str) -> None:
        self.aborted.append(key)

    def tensors(self, key: TransferKey, layer: int) -> dict[str, Tensor]:
        """A layer's tensors as they were announced."""
        return {tensor.name: self.rows(key, layer, tensor.name) for tensor in self.layers[key][layer].tensors}

    def rows(self, key: TransferKey, layer: int, name: str) -> Tensor:
        """One tensor: `[H_kv, n, D]`, or `[H_kv, n]` of positions."""
        (header,) = (announced for announced in self.layers[key][layer].tensors if announced.name == name)
        dtype, buffer = DTYPES[header.dtype], self._bytes[key, layer, name]
        flat = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
        return flat.view(header.shape)

    def has(self, key: TransferKey, layer: int, name: str) -> bool:
        return (key, layer, name) in self._bytes


class ControlledModel:
    """The real model; `hold` stops it before a prompt's pass, `on_layer` sees each layer before the observer
    does. The engine's own one-token probes pass through untouched."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.spec = model.spec
        self.device = model.device
        self.dtype = model.dtype
        self.num_ranks = model.num_ranks
        self.pre_rope_keys = model.pre_rope_keys
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Event()
        self.on_layer: Callable[[int, Tensor], None] | None = None

    def prefill(
        self,
        token_ids: Tensor,
        *,
        start: int,
        observer: PrefillObserver,
        states: LayerStates | None = None,
        num_queries: int | None = None,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        if token_ids.numel() == 1 and start == 0:
            return self.model.prefill(token_ids, start=start, observer=observer)
        self.entered.set()
        assert self.hold.wait(WAIT_S)
        watched = _Watched(observer, self)
        return self.model.prefill(
            token_ids,
            start=start,
            observer=watched,
            states=states,
            num_queries=num_queries,
            on_logits=on_logits,
        )

    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        attention: DecodeAttention,
        states: LayerStates | None = None,
    ) -> Tensor:
        """A draft's token. `on_layer` is given keys of the right length."""

        def watched(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
            attended = attention(layer, queries, keys, values, scaling)
            if self.on_layer is not None:
                self.on_layer(layer, keys.transpose(0, 1).expand(-1, int(positions) + 1, -1))
            return attended

        return self.model.decode(token_ids, positions, attention=watched, states=states)


class _Watched:
    def __init__(self, observer: PrefillObserver, model: ControlledModel) -> None:
        self._observer = observer
        self._model = model

    def history(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self._observer.history(layer)

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        if self._model.on_layer is not None:
            self._model.on_layer(layer, keys)
        self._observer.layer_done(layer, queries, keys, values, scaling)

    @property
    def division(self) -> Division | None:
        return getattr(self._observer, "division", None)

    def compressing(self, layer: int) -> AbstractContextManager[None]:
        assert isinstance(self._observer, DividingObserver)
        return self._observer.compressing(layer)

    def layer_compressed(self, layer: int, part: Encoded, rows: tuple[Tensor, Tensor] | None) -> None:
        assert isinstance(self._observer, DividingObserver)
        if self._model.on_layer is not None:
            self._model.on_layer(layer, torch.empty(0) if rows is None else rows[0])
        self._observer.layer_compressed(layer, part, rows)


@dataclass(kw_only=True)
class Harness:
    """One service and its surroundings."""

    service: PrefillService
    model: ControlledModel
    store: HistoryStore
    metrics: PrefillMetrics
    sink: RecordingSink
    decode: BlockServer
    hub: InProcessHub
    drawn: dict[str, list[SampledToken]] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def request(
        self,
        prompt: tuple[int, ...],
        *,
        plan: CompressionPlan | None = None,
        session: SessionKey | None = None,
        sampling: SamplingParams | None = None,
        probe: bool = False,
        **changes: object,
    ) -> PrefillRequest:
        """A request whose ticket has the plan as decode resolves it, unless `changes` make another."""
        number = next(self._ids)
        sampling = sampling or SamplingParams(max_tokens=8, temperature=0.0)
        fields: dict[str, object] = {
            "request_id": f"r{number}",
            "model_fingerprint": self.model.spec.fingerprint,
            "prompt_token_ids": prompt,
            "sampling": sampling,
            "ticket": Ticket(
                endpoint=self.decode.endpoint,
                transfer_id=1000 + number,
                generation=1,
                credit_bytes=1 << 20,
                lease_s=60,
                reserved_bytes=0,
                plan=self.resolve(plan or plan_for("full"), prompt, sampling),
            ),
            "session": session,
            "probe": probe,
        }
        return PrefillRequest(**(fields | changes))  # type: ignore[arg-type]

    def resolve(
        self, plan: CompressionPlan, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> ResolvedPlan:
        """As decode resolves a plan for this prompt."""
        return resolve_plan(
            plan,
            num_prompt_tokens=len(prompt),
            max_new_tokens=sampling.max_tokens,
            num_layers=self.model.spec.num_layers,
            head_dim=self.model.spec.head_dim,
            layers=self.model.spec.layers,
        )

    async def run(self, request: PrefillRequest) -> tuple[FirstToken, TransferDone]:
        """A whole prefill; `drawn` has its tokens."""
        events: list[PrefillEvent] = [
            event async for event in self.service.prefill(request, timeout_s=WAIT_S)
        ]
        first, *others, done = events
        later = [event.token for event in others if isinstance(event, TokenGenerated)]
        assert len(later) == len(others)
        assert isinstance(first, FirstToken)
        assert isinstance(done, TransferDone)
        self.drawn[request.request_id] = [first.token, *later]
        return first, done

    async def commit(self, request: PrefillRequest, token_ids: tuple[int, ...] | None = None) -> HistoryInfo:
        """End a request's turn. Args: token_ids: all that were said, by default the prompt alone."""
        assert request.session is not None
        said = request.prompt_token_ids if token_ids is None else token_ids
        turn = CommitTurnRequest(request_id=request.request_id, session=request.session, token_ids=said)
        return await self.service.commit_turn(turn, timeout_s=10)

    async def second_turn(
        self, prompt: tuple[int, ...], plan: CompressionPlan, *, num_new: int
    ) -> tuple[PrefillRequest, TransferDone]:
        """Run the turn of `num_new` more tokens in a session that had one of the prompt."""
        session = SessionKey(owner="alice", session_id="a")
        request = self.request(prompt, plan=plan, session=session)
        await self.run(request)
        await self.commit(request)
        second = self.request(prompt + make_prompt(num_new, seed=1), plan=plan, session=session)
        first, done = await self.run(second)
        assert first.reused_tokens == len(prompt)
        return second, done

    def sent(self, request: PrefillRequest) -> list[dict[str, Tensor]]:
        """Return each layer's tensors as they came for a request."""
        return [self.sink.tensors(key_of(request), layer) for layer in range(self.model.spec.num_layers)]

    def oracle(
        self, request: PrefillRequest, earlier: tuple[int, ...] | None = None
    ) -> tuple[CapturedPrompt, Continuation]:
        """Return what one process makes of a request's prompt. Args: earlier: the prompt of its history."""
        generator = OneProcessGenerator(self.model.model)
        before = None if earlier is None else generator.capture(list(earlier))
        captured = generator.capture(
            list(request.prompt_token_ids), earlier=before, question=request.question
        )
        plan, max_new_tokens = plan_of(request).plan, request.sampling.max_tokens
        return captured, generator.compress(captured, plan=plan, max_new_tokens=max_new_tokens)

    def assert_sent(self, request: PrefillRequest, expected: Continuation) -> None:
        """Check every tensor on the wire, bit for bit."""
        for layer, (sent, kept) in enumerate(zip(self.sent(request), as_sent(expected), strict=True)):
            assert list(sent) == list(kept)
            assert all(torch.equal(sent[name], tensor) for name, tensor in kept.items()), layer

    def assert_same_rows(self, request: PrefillRequest, other: PrefillRequest) -> None:
        """Check that the K and V of two requests came as nearly the same."""
        for ours, expected in zip(self.sent(request), self.sent(other), strict=True):
            for name in ("keys", "values"):
                torch.testing.assert_close(ours[name], expected[name], atol=1e-3, rtol=1e-3)

    def count_live(self) -> list[int]:
        """Return a list that gets, at each layer, of how many layers so far the keys live."""
        seen: list[weakref.ref[Tensor]] = []
        live: list[int] = []

        def count(layer: int, keys: Tensor) -> None:
            seen.append(weakref.ref(keys))
            live.append(sum(ref() is not None for ref in seen))

        self.model.on_layer = count
        return live

    def metric(self, name: str, **labels: str) -> float:
        """Sum over a sample's label sets that include these labels."""
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"kvferry_{name}" and labels.items() <= sample.labels.items()
        )


def as_sent(expected: Continuation) -> list[dict[str, Tensor]]:
    """A compressed prompt's tensors, and those of its draft."""
    layers = [dict(tensors) for tensors in expected.compressed]
    formats = make_formats(expected.spec, expected.resolved)
    for drafted in expected.drafted.layers if expected.drafted is not None else ():
        if drafted.ahead is not None:
            kept = layers[drafted.layer]
            encoded = Encoded(tensors=tuple(kept.values()), names=tuple(kept))
            encoded = with_draft(formats[drafted.layer], encoded, drafted.ahead)
            layers[drafted.layer] = dict(encoded.finish(encoded.tensors))
    return layers


def make_prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Return random words of the demo model."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 700, (num_tokens,), generator=generator).tolist())


def key_of(request: PrefillRequest) -> TransferKey:
    """Return the key of the transfer that a request's ticket is for."""
    return TransferKey(transfer_id=request.ticket.transfer_id, generation=request.ticket.generation)


def plan_of(request: PrefillRequest) -> ResolvedPlan:
    """The plan in a request's ticket."""
    assert request.ticket.plan is not None
    return request.ticket.plan


@pytest.fixture(scope="session")
def demo_model(demo_model_dir: Path) -> LanguageModel:
    return load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=2048)


@pytest.fixture
def prefill_options() -> dict[str, object]:
    """Overridden by tests that need other options than the defaults."""
    return {}


@pytest.fixture
def prefill_clock() -> Clock:
    """The service's clock, which also runs by itself; overridden by tests that need one that does not."""
    return Clock(time.monotonic)


@pytest_asyncio.fixture
async def harness(
    demo_model: LanguageModel, prefill_options: dict[str, object], prefill_clock: Clock
) -> AsyncIterator[Harness]:
    config = PrefillConfig(**prefill_options)  # type: ignore[arg-type]
    model = ControlledModel(demo_model)
    store = HistoryStore(
        max_bytes=config.history_bytes or 1 << 30,
        num_layers=len(model.spec.row_layers),
        turn_lease_s=config.turn_lease_s,
        clock=prefill_clock,
    )
    metrics = PrefillMetrics()
    hub = InProcessHub()
    sink = RecordingSink()
    decode = hub.server(sink)
    sender = BlockSender(
        hub.connecting(lambda transport: metrics.block_connections.labels(transport).inc()),
        buffer_bytes=config.buffer_bytes,
        timeout_s=config.transfer_timeout_s,
    )
    service = PrefillService(
        model=model,
        store=store,
        ranks=PrefillRanks(model, sender),
        server_factory=hub.server,
        metrics=metrics,
        config=config,
        clock=prefill_clock,
    )
    await service.start()
    try:
        yield Harness(
            service=service, model=model, store=store, metrics=metrics, sink=sink, decode=decode, hub=hub
        )
    finally:
        model.hold.set()
        sink.gate.set()
        await service.close()
        decode.close()
