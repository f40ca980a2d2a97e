"""A small real model, the prefill side of a transfer, and decode services over an in-process hub."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time
from pathlib import Path

import pytest
import torch

import kvferry.models
from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.server import ArenaRegistry
from kvferry.services.decode.service import DecodeService
from kvferry.services.prefill.opening import Opening
from kvferry.services.prefill.parts import PromptTransfer
from kvferry.shared.compression.compress import compress_prompt
from kvferry.shared.compression.draft import greedy, run_draft
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.drafted import with_draft
from kvferry.shared.compression.formats.interface import Encoded
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, Part, is_measured, num_draft_tokens, plan_digest
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.reconstruct import reconstruct
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.control.messages import GenerateRequest, TicketIssued, TokenGenerated
from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.model.ending import Ending
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.shared.telemetry.metrics import DecodeMetrics
from kvferry.shared.wire.in_process import InProcessHub
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor, TransferKey
from kvferry.shared.wire.sender import BlockSender
from kvferry.tools.oracle import OneProcessGenerator

torch.set_num_threads(1)

SPEC = ModelSpec(
    name="small",
    fingerprint="f00d",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    max_model_len=600,
    dtype="float32",
    eos_token_ids=(3,),
)
CREDIT_BYTES = 1 << 20


class SmallModel:
    """A two-layer attention model with random weights: K depends on token and position, logits on all of the
    cache. Rows of a batch are computed one by one, so that its results are exact whatever the batch."""

    def __init__(self, spec=SPEC):
        self.spec = spec
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.before_step = lambda token_ids: None
        self.edit_logits = lambda positions, logits: logits
        generator = torch.Generator().manual_seed(0)
        hidden = spec.num_heads * spec.head_dim
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self._embedding = draw(spec.vocab_size, hidden)
        self._positions = draw(spec.max_model_len, hidden)
        self._head = draw(hidden, spec.vocab_size) * 0.4
        kv = spec.num_kv_heads * spec.head_dim
        self._layers = [
            [draw(hidden, n) / hidden**0.5 for n in (hidden, kv, kv)] for _ in range(spec.num_layers)
        ]

    def _project(self, layer, hidden):
        q, k, v = (hidden @ w for w in self._layers[layer])
        heads, group, dim = self.spec.num_kv_heads, self.spec.group_size, self.spec.head_dim
        return q.view(-1, heads, group, dim), k.view(-1, heads, dim), v.view(-1, heads, dim)

    def _logits(self, hidden):
        return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:]) @ self._head

    def prefill(self, token_ids, *, start, observer, states=None, num_queries=None):
        """Args: num_queries: at least all."""
        hidden = self._embedding[token_ids] + self._positions[start : start + len(token_ids)]
        for layer in range(self.spec.num_layers):
            q, k, v = self._project(layer, hidden)
            q, k, v = q.permute(1, 2, 0, 3), k.transpose(0, 1), v.transpose(0, 1)
            if start:
                k, v = (torch.cat(parts, 1) for parts in zip(observer.history(layer), (k, v), strict=True))
            seen = None
            if start and len(token_ids) > 1:
                seen = torch.ones(len(token_ids), k.shape[1], dtype=torch.bool).tril(start)
            output = torch.nn.functional.scaled_dot_product_attention(
                q, k[:, None], v[:, None], attn_mask=seen, is_causal=not start, scale=0.4
            )
            observer.layer_done(layer, q, k, v, 0.4)
            hidden = hidden + output.permute(2, 0, 1, 3).reshape(len(token_ids), -1)
        return self._logits(hidden[-1])

    def decode(self, token_ids, positions, *, attention, states=None):
        self.before_step(token_ids)
        hidden = [self._embedding[t] + self._positions[p] for t, p in zip(token_ids, positions, strict=True)]
        for layer in range(self.spec.num_layers):
            rows = [self._project(layer, h[None]) for h in hidden]
            output = attention(layer, *(torch.cat([r[i] for r in rows]) for i in range(3)), 0.4)
            hidden = [h + o.reshape(-1) for h, o in zip(hidden, output, strict=True)]
        return self.edit_logits(positions, torch.stack([self._logits(h) for h in hidden]))

    num_ranks = 1

    def pre_rope_keys(self, layer, keys):
        """Its keys have no positions."""
        return keys.float()


@functools.cache
def demo_tokenizer():
    return ChatTokenizer.load(Path(kvferry.models.__path__[0]) / "demo")


class PromptCache:
    """What prefill makes of one request: the tokens that it draws, and each layer's format and tensors."""

    def __init__(self, model, request):
        self.request = request
        self.resolved = resolve(model.spec, request)
        self.full = []
        self._inputs = []
        with torch.inference_mode():
            self._model = model
            logits = model.prefill(torch.tensor(request.prompt_token_ids), start=0, observer=self)
            opening = self._opening(model, request)
            self._inputs = reconstruct(model, self.resolved, self._inputs, token_ids=request.prompt_token_ids)
            if num_draft := num_draft_tokens(self.resolved):
                draw = greedy(model.spec, num_draft) if request.num_siblings else opening.draw
                self._inputs = run_draft(model, self._inputs, logits=logits, draw=draw).layers
            self.measured, layers = compress_prompt(model.spec, self.resolved, self._inputs)
            if not opening.tokens:
                opening.draw(logits)
        *draft, self.first_token = self.drawn = opening.tokens
        self.draft = tuple(token.token_id for token in draft)
        self.formats = make_formats(model.spec, self.measured)
        self.layers = [dict(tensors) for tensors in layers]
        for inputs, fmt in zip(self._inputs, self.formats, strict=True) if draft else ():
            encoded = Encoded(tensors=tuple(layers[inputs.layer].values()), names=tuple(layers[inputs.layer]))
            encoded = with_draft(fmt, encoded, inputs.ahead)
            self.layers[inputs.layer] = dict(encoded.finish(encoded.tensors))

    def _opening(self, model, request):
        prompt, spec = request.prompt_token_ids, model.spec
        sampler = SequenceSampler(request.sampling, prompt, spec.vocab_size)
        most = 0 if request.num_siblings else num_draft_tokens(self.resolved)
        ending = Ending(request.sampling, prompt, spec, demo_tokenizer)
        return Opening(sampler, ending, most=min(most, self.resolved.max_new_tokens - 1))

    def history(self, layer):
        return None

    def layer_done(self, layer, queries, keys, values, scaling):
        self._inputs.append(
            LayerInputs(
                layer=layer,
                queries=queries,
                keys=keys,
                values=values,
                scaling=scaling,
                unrotate=lambda rows: self._model.pre_rope_keys(layer, rows),
            )
        )
        self.full.append((keys.clone(), values.clone()))


def resolve(spec, request):
    return resolve_plan(
        request.plan,
        num_prompt_tokens=len(request.prompt_token_ids),
        max_new_tokens=request.sampling.max_tokens,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
        layers=spec.layers,
    )


def manifest_for(spec, request, ticket, *, measured=None, **changes):
    """`measured`: the plan with the prompt's own rows, where they are measured."""
    resolved = resolve(spec, request)
    rows = (measured or resolved).layers if is_measured(resolved) else ()
    manifest = Manifest(
        purpose="cache",
        key=TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation),
        request_id=request.request_id,
        model_fingerprint=spec.fingerprint,
        dtype=spec.dtype,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        start=0,
        num_tokens=len(request.prompt_token_ids),
        plan_digest=plan_digest(resolved),
        layer_rows=tuple(layer.rows for layer in rows),
    )
    return dataclasses.replace(manifest, **changes)


def named(fmt, tensors):
    """A layer's tensors as a transfer takes them."""
    return [
        NamedTensor(name=name, tensor=tensor, kind=fmt.kinds.get(name, "rows"))
        for name, tensor in tensors.items()
    ]


def end_with(first_token, draft=()):
    """A transfer's end; its sender fills the rest in."""
    key = TransferKey(transfer_id=0, generation=0)
    return EndRecord(key=key, num_blocks=0, payload_bytes=0, first_token=first_token, draft=draft)


class Shipper:
    """The prefill side: ships a prompt's cache to a ticket."""

    def __init__(self, model, sender):
        self.model = model
        self.sender = sender

    def open(self, request, ticket, **changes):
        manifest = manifest_for(self.model.spec, request, ticket, **changes)
        if ticket.part_endpoints:
            plan = changes.get("measured") or resolve(self.model.spec, request)
            formats = make_formats(self.model.spec, plan)
            return PromptTransfer(self.sender, ticket, manifest, formats, timeout_s=10)
        return self.sender.open(ticket, manifest, timeout_s=10)

    def send(self, transfer, cache, *, first=0, last=None):
        """Send layers from `first` on, up to but not including `last`."""
        layers = list(zip(cache.formats, cache.layers, strict=True))
        for layer, (fmt, tensors) in list(enumerate(layers))[first:last]:
            of_ranks = isinstance(transfer, PromptTransfer)
            transfer.send_layer(layer, tensors if of_ranks else named(fmt, tensors))

    def offer(self, transfer, cache, **span):
        """Send what will be refused; the refusal may come before the last layer is queued."""
        with contextlib.suppress(TransferFailed, ProtocolMismatch):
            self.send(transfer, cache, **span)

    def ship(self, request, ticket, **changes):
        """Blocking; returns the token that decode goes on from."""
        return self.ship_cache(request, ticket, **changes).first_token

    def ship_cache(self, request, ticket, **changes):
        """Blocking; returns what was shipped."""
        if ticket.plan is not None:  # which may be for a shorter answer than the request's limit
            limit = ticket.plan.max_new_tokens
            sampling = dataclasses.replace(request.sampling, max_tokens=limit)
            request = dataclasses.replace(request, sampling=sampling)
        cache = PromptCache(self.model, request)
        transfer = self.open(request, ticket, measured=cache.measured, **changes)
        self.send(transfer, cache)
        transfer.finish(end_with(cache.first_token, cache.draft))
        transfer.wait(20)
        return cache


def make_request(
    prompt=range(5, 45),
    *,
    method="full",
    tokens=None,
    overrides=None,
    attention=None,
    skip_layers=(),
    request_id="r",
    store_history=False,
    probe=False,
    model_fingerprint=SPEC.fingerprint,
    **sampling,
):
    """A request; `attention` replaces the method's own decode attention by name."""
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
    budget = Budget(tokens=tokens) if tokens else None
    plan = plan_for(method, budget=budget, overrides=overrides, skip_layers=skip_layers)
    if attention is not None:
        plan = dataclasses.replace(plan, attention=Part(name=attention))
    return GenerateRequest(
        request_id=request_id,
        model_fingerprint=model_fingerprint,
        prompt_token_ids=tuple(prompt),
        plan=plan,
        sampling=SamplingParams(**sampling),
        store_history=store_history,
        probe=probe,
    )


class Harness:
    """A decode service and its prefill side in one process."""

    def __init__(
        self,
        *,
        model=None,
        prefill_model=None,
        hub=None,
        rank_transport=None,
        clock=time.monotonic,
        sweep_interval_s=0.02,
        **config,
    ):
        self.hub = hub or InProcessHub()
        self.model = model or SmallModel()
        self.metrics = DecodeMetrics()
        self.sender = BlockSender(self.hub.connecting(), buffer_bytes=1 << 24, timeout_s=20)
        self.prefill_sender = BlockSender(self.hub.connecting(), buffer_bytes=1 << 24, timeout_s=20)
        self.shipper = Shipper(prefill_model or SmallModel(), self.prefill_sender)
        settings = {"arena_bytes": 1 << 20, "admission_wait_s": 0.2, "warm_up": False} | config
        self.service = DecodeService(
            DecodeConfig(**settings),
            model=self.model,
            tokenizer=demo_tokenizer(),
            metrics=self.metrics,
            server_factory=self.hub.server,
            sender=self.sender,
            clock=clock,
            sweep_interval_s=sweep_interval_s,
            rank_transport=rank_transport,
        )
        self.registry = ArenaRegistry(self.metrics, self.service.arena, self.model.num_ranks)

    async def close(self):
        await self.service.close()
        self.prefill_sender.close()

    def value(self, name, **labels):
        """Sum of a metric's samples that have these labels."""
        samples = (s for metric in self.registry.collect() for s in metric.samples)
        return sum(
            s.value for s in samples if s.name == f"kvferry_{name}" and labels.items() <= s.labels.items()
        )

    async def run(self, request, **changes):
        """The whole of a request; returns the token that decode goes on from, and later events."""
        cache, events = await self._run(request, **changes)
        return cache.first_token, events

    async def _run(self, request, *, timeout_s=200, **changes):
        events = []
        stream = self.service.generate(request, timeout_s=timeout_s)
        async with contextlib.aclosing(stream):
            ticket = (await anext(stream)).ticket
            cache = await asyncio.to_thread(self.shipper.ship_cache, request, ticket, **changes)
            events = [event async for event in stream]
        return cache, events

    async def tokens(self, request, **changes):
        """The completion's token ids."""
        cache, events = await self._run(request, **changes)
        drawn = [*cache.drawn, *(event.token for event in events if hasattr(event, "token"))]
        return [token.token_id for token in drawn]

    async def together(self, requests, *, timeout_s=600):
        """The completions' tokens of requests that are all there before the first one's prompt is."""
        async with contextlib.AsyncExitStack() as stack:
            streams, tickets = [], []
            for request in requests:
                stream = self.service.generate(request, timeout_s=timeout_s)
                streams.append(await stack.enter_async_context(contextlib.aclosing(stream)))
                tickets.append((await anext(stream)).ticket)
            caches = [
                await asyncio.to_thread(self.shipper.ship_cache, request, ticket)
                for request, ticket in zip(requests, tickets, strict=True)
            ]
            return [
                [*cache.drawn, *[event.token async for event in stream if hasattr(event, "token")]]
                for cache, stream in zip(caches, streams, strict=True)
            ]

    async def one_joins(self, first, second, *, timeout_s=600):
        """The completions' token ids of two requests, of which the second comes when the first has three."""
        joined, completions = asyncio.Event(), ([], [])

        async def run(request, token_ids):
            stream = self.service.generate(request, timeout_s=timeout_s)
            async with contextlib.aclosing(stream):
                ticket = (await anext(stream)).ticket
                cache = await asyncio.to_thread(self.shipper.ship_cache, request, ticket)
                token_ids += [token.token_id for token in cache.drawn]
                async for event in stream:
                    if isinstance(event, TokenGenerated):
                        token_ids.append(event.token.token_id)
                        if len(completions[0]) == 3:
                            joined.set()

        async def run_later():
            await joined.wait()
            await run(second, completions[1])

        await asyncio.gather(run(first, completions[0]), run_later())
        return list(completions)

    async def arena_is_free(self, *, within_s=30.0):
        """Whether every byte comes back in time."""
        arena = self.service.arena
        deadline_s = asyncio.get_running_loop().time() + within_s
        while arena.free_bytes != arena.size_bytes and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.01)
        arena.check_integrity()
        return arena.free_bytes == arena.size_bytes


def serialise_prefill(made):
    """Prefill's model is not for two threads."""
    lock, ship = threading.Lock(), made.shipper.ship_cache

    def ship_one(*args, **kwargs):
        with lock:
            return ship(*args, **kwargs)

    made.shipper.ship_cache = ship_one


@pytest.fixture
async def harness():
    """Makes started `Harness`es: `await harness(**config)`."""
    harnesses = []

    async def make(**kwargs):
        harnesses.append(Harness(**kwargs))
        await harnesses[-1].service.start()
        return harnesses[-1]

    yield make
    for made in harnesses:
        await made.close()


@pytest.fixture
def request_of():
    return make_request


@pytest.fixture
def ticket_of():
    """Starts a stream and reads its ticket."""

    async def start(service, request, timeout_s=200):
        stream = service.generate(request, timeout_s=timeout_s)
        event = await anext(stream)
        assert isinstance(event, TicketIssued)
        return stream, event.ticket

    return start


@pytest.fixture
def begin(harness, ticket_of):
    """Starts a request, to be shipped: `made, stream, transfer, cache = await begin(request, **config)`."""

    async def start(request, **config):
        made = await harness(**config)
        stream, ticket = await ticket_of(made.service, request)
        transfer = made.shipper.open(request, ticket)
        return made, stream, transfer, PromptCache(made.shipper.model, request)

    return start


@pytest.fixture
def small_model():
    """Makes a `SmallModel`; all have the same weights."""
    return SmallModel


def oracle_ids(model, request):
    tokens = OneProcessGenerator(model).generate(
        list(request.prompt_token_ids), plan=request.plan, sampling=request.sampling
    )
    return [t.token_id for t in tokens]


MIXED = [
    {"prompt": range(5, 45)},
    {"prompt": [7], "max_tokens": 12},
    {"prompt": [i * 7 % 50 for i in range(150)], "method": "rocketkv", "tokens": 16},
    {"prompt": [i * 3 % 50 for i in range(97)], "method": "rocketkv", "tokens": 24, "max_tokens": 3},
    {"prompt": [i * 11 % 50 for i in range(120)], "method": "snapkv", "tokens": 40},
    {"prompt": range(10, 40), "temperature": 1.0, "seed": 5, "max_tokens": 20},
    {"prompt": range(9, 49), "temperature": 0.8, "seed": 6, "frequency_penalty": 0.7, "top_p": 0.9},
    {"prompt": [i * 13 % 50 for i in range(200)], "method": "rocketkv", "tokens": 32, "temperature": 1.5},
    {"prompt": [i * 17 % 50 for i in range(113)], "method": "exact-topk", "tokens": 11},
    {
        "prompt": [i * 19 % 50 for i in range(127)],
        "method": "quest",
        "tokens": 16,
        "overrides": {"dense_layers": 1},
    },
    {"prompt": [i * 21 % 50 for i in range(131)], "method": "sparq", "tokens": 24, "max_tokens": 20},
    {"prompt": [i * 23 % 50 for i in range(89)], "method": "streamingllm", "tokens": 17},
    {"prompt": [i * 27 % 50 for i in range(97)], "method": "h2o", "tokens": 21},
    {"prompt": [i * 27 % 50 for i in range(97)], "method": "h2o", "tokens": 1, "max_tokens": 12},
    {"prompt": [i * 29 % 50 for i in range(101)], "method": "random", "tokens": 33},
    {"prompt": [i * 43 % 50 for i in range(113)], "method": "d2o", "tokens": 24, "max_tokens": 40},
    {"prompt": [i * 47 % 50 for i in range(31)], "method": "d2o", "tokens": 2, "max_tokens": 9},
    {"prompt": [i * 49 % 50 for i in range(103)], "method": "d2o", "tokens": 30, "skip_layers": (1,)},
    {"prompt": [i * 43 % 50 for i in range(181)], "method": "rocketkv-d2o", "tokens": 20},
    {"prompt": [i * 31 % 50 for i in range(149)], "method": "pyramidkv", "tokens": 60},
    {"prompt": [i * 33 % 50 for i in range(149)], "method": "pyramidkv", "tokens": 60, "attention": "sparq"},
    {"prompt": [i * 37 % 50 for i in range(160)], "method": "h2o", "tokens": 12, "attention": "quest"},
    {"prompt": [i * 39 % 50 for i in range(151)], "method": "rdkv", "tokens": 20, "max_tokens": 14},
    {"prompt": [i * 41 % 50 for i in range(133)], "method": "rdkv", "tokens": 70, "skip_layers": (0,)},
    {
        "prompt": [i * 43 % 50 for i in range(151)],
        "method": "rdkv",
        "tokens": 5,
        "max_tokens": 36,
        "overrides": {"rebudget_tokens": 32, "window": 5},
    },
    {
        "prompt": [i * 47 % 50 for i in range(120)],
        "method": "rdkv",
        "tokens": 30,
        "overrides": {"widths": "0,4,16"},
    },
    {"prompt": [(i * 49 + i % 7) % 50 for i in range(163)], "method": "rdkv-hsa", "tokens": 16},
    {"prompt": [i * 11 % 47 for i in range(140)], "method": "rdkv-hsa", "tokens": 9, "skip_layers": (1,)},
    {
        "prompt": [i * 43 % 50 for i in range(141)],
        "method": "adakv",
        "tokens": 20,
        "overrides": {"window": 8},
    },
    {"prompt": [i * 47 % 50 for i in range(99)], "method": "think", "overrides": {"channel_retention": 0.4}},
    {"prompt": [i * 43 % 50 for i in range(103)], "method": "snapkv-think", "tokens": 33, "max_tokens": 12},
    {"prompt": [i * 9 % 50 for i in range(131)], "method": "kivi", "overrides": {"bits": 2}},
    {"prompt": [i * 9 % 50 for i in range(117)], "method": "snapkv-kivi", "tokens": 35, "skip_layers": (1,)},
    {"prompt": [7, 8], "method": "kivi", "max_tokens": 12},
    {"prompt": [i * 8 % 50 for i in range(127)], "method": "compactor-kivi", "tokens": 16},
    {
        "prompt": [i * 13 % 50 for i in range(139)],
        "method": "compactor-kivi",
        "tokens": 12,
        "overrides": {"v_bits": 2},
        "skip_layers": (1,),
    },
    {"prompt": [i * 17 % 50 for i in range(149)], "method": "rocketkv-kivi", "tokens": 20},
    {"prompt": [i * 19 % 50 for i in range(113)], "method": "compactor-rdkv", "tokens": 9, "max_tokens": 12},
    {"prompt": [i * 21 % 50 for i in range(123)], "method": "rdkv-union", "tokens": 9, "max_tokens": 12},
    {"prompt": [i * 22 % 50 for i in range(119)], "method": "rdkv-draft", "tokens": 9, "max_tokens": 12},
    {"prompt": [i * 23 % 50 for i in range(121)], "method": "kvzip-rdkv", "tokens": 9, "max_tokens": 12},
    {"prompt": [i * 24 % 50 for i in range(117)], "method": "keydiff", "tokens": 20, "max_tokens": 12},
    {"prompt": [i * 12 % 50 for i in range(133)], "overrides": {"wire_bits": 8}},
    {
        "prompt": [i * 14 % 50 for i in range(171)],
        "method": "rocketkv",
        "tokens": 24,
        "overrides": {"wire_bits": 2},
        "skip_layers": (0,),
    },
    *(
        {
            "prompt": [i * 37 % 50 for i in range(149)],
            "method": method,
            "tokens": tokens,
            "max_tokens": 40,
            "overrides": {"rebudget_tokens": 16},
        }
        for method, tokens in (("snapkv", 20), ("rocketkv", 9), ("compactor", 30), ("rocketkv-kivi", 12))
    ),
    {"prompt": [3, 5], "method": "rdkv", "tokens": 1, "overrides": {"window": 1, "kernel_size": 1}},
]
