"""Prefill and decode workers of several ranks each, real processes: each rank of prefill ships its heads'
blocks straight to the ranks of decode that have them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kvtest.pair import Pair, Turn
from kvtest.parallel import in_ranks, same_or_tied, workers_in_ranks
from kvtest.processes import Process
from kvtest.tiny_models import make_config, save_model
from kvtest.transformers_model import plan_of, prompt_of

from kvferry.models import DEMO_MODEL
from kvferry.services.decode.config import DecodeConfig
from kvferry.shared.control.client import GrpcPrefillClient
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with four KV heads."""
    config = make_config("llama", num_key_value_heads=4, num_hidden_layers=3)
    return save_model(config, tmp_path_factory.mktemp("four-kv-heads"))


@pytest.fixture(scope="module")
def one(folder: Path) -> LanguageModel:
    return load_model(folder, name="m", device="cpu")


@pytest.fixture(scope="module")
def prefill_worker(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], Process]]:
    """`prefill_worker(number)`: the one of so many ranks."""
    logs = tmp_path_factory.mktemp("workers")
    with workers_in_ranks("prefill", logs, "--history-bytes", str(64 << 20)) as worker:
        yield functools.partial(worker, folder)


@pytest.fixture(scope="module")
def decode_model(request: pytest.FixtureRequest, folder: Path) -> Iterator[LanguageModel]:
    with in_ranks(folder, request.param) as several:
        yield several


@asynccontextmanager
async def a_pair(worker: Process, decode_model: LanguageModel) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        pair = Pair(model=decode_model, tokenizer=ChatTokenizer.load(DEMO_MODEL), stack=stack)
        config = DecodeConfig(tensor_parallel=decode_model.num_ranks)
        pair.hub = ProcessTransport(config, "decode")
        pair.rank_transport = RankTransport.of(config, "decode")
        client: Any = GrpcPrefillClient(worker.addresses["address"])
        stack.push_async_callback(client.close)
        pair.prefill = client
        await pair.start_decode()
        yield pair


@pytest.mark.parametrize(
    ("decode_model", "num_ranks"),
    [
        pytest.param(2, 2, id="2 to 2", marks=pytest.mark.full),
        pytest.param(4, 2, id="2 to 4"),
        pytest.param(4, 4, id="4 to 4", marks=pytest.mark.full),
    ],
    indirect=["decode_model"],
    scope="module",
)
async def test_tokens_are_those_of_one_process_over_a_session(
    prefill_worker: Callable[[int], Process], decode_model: LanguageModel, one: LanguageModel, num_ranks: int
) -> None:
    async with a_pair(prefill_worker(num_ranks), decode_model) as pair:

        async def two_turns(method: str) -> list[Turn]:
            session = SessionKey(owner="o", session_id=f"{method}-{decode_model.num_ranks}")
            first = await pair.turn(FIRST, plan_of(method), session=session, sampling=SAMPLING)
            second = [*FIRST, *first.tokens, *prompt_of(30, seed=2)]
            return [first, await pair.turn(second, plan_of(method), session=session, sampling=SAMPLING)]

        turns = dict(zip(METHODS, await asyncio.gather(*map(two_turns, METHODS)), strict=True))
    num_same = 0
    for method, (first, second) in turns.items():
        oracle = OneProcessGenerator(one).generate(FIRST, plan=plan_of(method), sampling=SAMPLING)
        num_same += same_or_tied(first.tokens, oracle)
        assert second.reused == len(FIRST) + NUM_NEW - 1
        if method == "full":
            assert first.done.bytes_by_kind["rows"] == len(FIRST) * one.spec.kv_token_bytes
            # what decode retains is not sent again: all but the last new token's and the message's rows
            assert second.done.delta_bytes == (30 + 1) * one.spec.kv_token_bytes
    assert num_same > len(METHODS) * NUM_NEW * 0.8, "more ties than chance explains"
