"""Decode in several ranks, before one of prefill and as many, real gloo processes: the tokens of one rank."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kvtest.families import FAMILIES
from kvtest.pair import Pair, Turn
from kvtest.parallel import in_ranks, same_or_tied, workers_in_ranks
from kvtest.prefill import ControlledModel
from kvtest.processes import Process
from kvtest.tiny_models import make_config, save_model
from kvtest.transformers_model import plan_of, prompt_of
from torch import Tensor

from kvferry.models import DEMO_MODEL
from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.parts import DECODE_RANK
from kvferry.services.prefill.parts import PREFILL_RANK
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.worker import ProcessTransport, RankTransport
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

METHODS = ("full", "rocketkv", "rdkv", "compactor")
NUM_NEW = 24
FIRST = prompt_of(90, seed=1)
SAMPLING = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=2)
Models = tuple[LanguageModel, LanguageModel, Path]
WorkerOf = Callable[[Path, int], Process]


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Models]:
    """A model in one rank, in several of a role, and its folder: the demo model, a random one with four KV
    heads, or one with attention sinks."""
    name, follower_class = request.param
    folder = DEMO_MODEL
    if name == "four heads":
        config = make_config("llama", num_key_value_heads=4, num_hidden_layers=3)
        folder = save_model(config, tmp_path_factory.mktemp("four-kv-heads"))
    elif name == "sinks":
        folder = FAMILIES["granite_swa"].save(tmp_path_factory.mktemp("sinks"))
    with in_ranks(folder, 4 if name == "four heads" else 2, follower_class) as several:
        yield load_model(folder, name="m", device="cpu"), several, folder


@pytest.fixture(scope="module")
def worker_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerOf]:
    """`worker_of(folder, number)`: a decode worker of so many ranks of the model there."""
    with workers_in_ranks("decode", tmp_path_factory.mktemp("workers"), "--retain-s", "600") as worker:
        yield worker


def of_role(follower_class: str, *names: str) -> pytest.MarkDecorator:
    params = [(name, follower_class) for name in names]
    return pytest.mark.parametrize("models", params, indirect=True, ids=names, scope="module")


@asynccontextmanager
async def a_pair(prefill: LanguageModel, decode: LanguageModel | Process) -> AsyncIterator[Pair]:
    """Args: decode: the model of a service here, or a worker."""
    async with AsyncExitStack() as stack:
        pair = Pair(model=prefill, tokenizer=ChatTokenizer.load(DEMO_MODEL), stack=stack)
        if isinstance(decode, Process):
            pair.hub = ProcessTransport(DecodeConfig(), "decode")
            client: Any = GrpcDecodeClient(decode.addresses["address"])
            stack.push_async_callback(client.close)
            pair.decode = client
            await pair.start_prefill()
        else:
            config = DecodeConfig(tensor_parallel=decode.num_ranks)
            pair.hub = ProcessTransport(config, "decode")
            pair.rank_transport = RankTransport.of(config, "decode")
            await pair.start_prefill()
            pair.model = decode
            await pair.start_decode()
        yield pair


async def turns_of(
    prefill: LanguageModel, decode: LanguageModel | Process, methods: Sequence[str]
) -> dict[str, list[Turn]]:
    """Two turns of a session for each method, all in one batch: a step has sequences of all formats."""
    async with a_pair(prefill, decode) as pair:

        async def two_turns(method: str) -> list[Turn]:
            session = SessionKey(owner="o", session_id=method)
            first = await pair.turn(FIRST, plan_of(method), session=session, sampling=SAMPLING)
            second = [*FIRST, *first.tokens, *prompt_of(30, seed=2)]
            return [first, await pair.turn(second, plan_of(method), session=session, sampling=SAMPLING)]

        return dict(zip(methods, await asyncio.gather(*map(two_turns, methods)), strict=True))


@pytest.mark.covering(1)
@of_role(DECODE_RANK, "demo", "four heads", "sinks")
async def test_the_tokens_of_decode_are_those_of_one_rank_over_a_session(models: Models) -> None:
    one, decode, _ = models
    await check_tokens(one, one, decode, num_parts=decode.num_ranks)


@of_role(PREFILL_RANK, "demo", "sinks")
async def test_the_tokens_of_prefill_are_those_of_one_rank_over_a_session(
    models: Models, worker_of: WorkerOf
) -> None:
    one, prefill, folder = models
    await check_tokens(one, prefill, worker_of(folder, 2), num_parts=2)


async def check_tokens(
    one: LanguageModel, prefill: LanguageModel, decode: LanguageModel | Process, *, num_parts: int
) -> None:
    methods = [name for name in METHODS if name in applicable_methods(one.spec.layers)]
    turns = await turns_of(prefill, decode, methods)
    expected = await turns_of(one, one, methods)
    num_same = 0
    for method, (first, second) in turns.items():
        expected_first, expected_second = expected[method]
        oracle = OneProcessGenerator(one).generate(FIRST, plan=plan_of(method), sampling=SAMPLING)
        assert [token.token_id for token in oracle] == expected_first.tokens
        sent, expected_sent = dict(first.done.bytes_by_kind), dict(expected_first.done.bytes_by_kind)
        # each part has a manifest, and headers
        assert 2 * expected_sent.pop("manifest") > sent.pop("manifest") / num_parts
        assert sent == expected_sent
        num_same += same_or_tied(first.tokens, expected_first.sampled)
        if first.tokens == expected_first.tokens:
            assert second.reused == len(FIRST) + NUM_NEW - 1
            if expected_second.done.delta_bytes is not None:
                assert second.done.delta_bytes == expected_second.done.delta_bytes
            num_same += same_or_tied(second.tokens, expected_second.sampled)
    assert num_same > len(methods) * 2 * NUM_NEW * 0.8, "more ties than chance explains"


@of_role(PREFILL_RANK, "demo")
async def test_prompts_of_every_other_method_are_compressed_as_in_one_rank(
    models: Models, worker_of: WorkerOf
) -> None:
    """Of most methods each rank compresses its heads; of some, all heads are compressed together."""
    one, parallel, folder = models
    methods = [name for name in applicable_methods(one.spec.layers) if name not in (*METHODS, "adakv")]
    turns = await turns_of(parallel, worker_of(folder, 2), methods)
    expected = await turns_of(one, one, methods)
    num_same = 0
    for method, conversation in turns.items():
        for turn, of_one in zip(conversation, expected[method], strict=True):
            sent, expected_sent = dict(turn.done.bytes_by_kind), dict(of_one.done.bytes_by_kind)
            manifests = expected_sent.pop("manifest"), sent.pop("manifest")
            assert 1 <= manifests[1] / manifests[0] < 2.2, method  # of two parts
            assert sent == pytest.approx(expected_sent, rel=0.1), method
            num_same += (same := same_or_tied(turn.tokens, of_one.sampled))
            if same < NUM_NEW:
                break
    assert num_same > len(methods) * 2 * NUM_NEW * 0.8, "more ties than chance explains"


@of_role(PREFILL_RANK, "demo")
@pytest.mark.parametrize("method", ["full", "rdkv"])
async def test_a_short_prompt_overtakes_a_long_one_in_every_rank(
    models: Models, worker_of: WorkerOf, method: str
) -> None:
    one, parallel, folder = models
    prompts = {700: prompt_of(700, seed=3), 40: prompt_of(40, seed=4)}
    layers: list[tuple[int, int]] = []
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[Turn]]()
    controlled = ControlledModel(parallel)
    async with a_pair(controlled, worker_of(folder, 2)) as pair:

        async def turn(num_tokens: int) -> Turn:
            session = SessionKey(owner="o", session_id=str(num_tokens))
            return await pair.turn(prompts[num_tokens], plan_of(method), session=session, sampling=SAMPLING)

        def on_layer(layer: int, keys: Tensor) -> None:
            layers.append((keys.shape[1], layer))
            if layers == [(700, 0), (700, 1)]:
                loop.call_soon_threadsafe(lambda: tasks.append(asyncio.create_task(turn(40))))
                while pair.prefill._engine.num_waiting == 0:
                    threading.Event().wait(0.01)

        controlled.on_layer = on_layer
        turns = {700: await turn(700), 40: await tasks[0]}
    between = [(40, layer) for layer in range(4)]
    assert layers == [(700, 0), (700, 1), *between, (700, 2), (700, 3)]
    for num_tokens, finished in turns.items():
        expected = OneProcessGenerator(one).generate(
            prompts[num_tokens], plan=plan_of(method), sampling=SAMPLING
        )
        assert same_or_tied(finished.tokens, expected) > 0
