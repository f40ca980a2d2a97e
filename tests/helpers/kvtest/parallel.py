"""A model in several ranks, decode services over it, and its tokens beside those of one: equal, or different
at a tie in rounding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.models import DEMO_MODEL
from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.parts import DECODE_RANK
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.parallel import lead
from kvferry.shared.model.parallel.model import ParallelModel, load_parallel_model
from kvferry.shared.process.worker import ProcessTransport, RankTransport
from kvferry.shared.sampling.params import SampledToken
from kvtest.decode import Harness, serialise_prefill
from kvtest.forked import forking
from kvtest.processes import Process
from kvtest.processes import started as started_process

SETTINGS = DecodeConfig(tensor_parallel=2)
TIE = 1e-3
"""Two tokens whose log probabilities differ by less are a tie: float32 sums of a few hundred terms, in
another order, through some layers."""


@contextmanager
def in_ranks(folder: Path, num_ranks: int, follower_class: str = DECODE_RANK) -> Iterator[ParallelModel]:
    """A model in so many ranks of decode or prefill, one thread each; no rank may be lost meanwhile."""
    lost: list[Exception] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lead, "subprocess", forking())
        model = load_parallel_model(
            folder,
            name="m",
            num_ranks=num_ranks,
            on_lost=lost.append,
            device="cpu",
            num_threads=num_ranks,
            follower_class=follower_class,
        )
    try:
        yield model
    finally:
        model.close()
    assert not lost


@contextmanager
def workers_in_ranks(role: str, logs: Path, *options: str) -> Iterator[Callable[[Path, int], Process]]:
    """`worker(folder, number)`: a process of this role with the model in so many ranks, started once."""
    numbers = itertools.count()
    with ExitStack() as stack:

        @functools.cache
        def worker(folder: Path, number: int) -> Process:
            wait = stack.enter_context(
                started_process(
                    logs,
                    f"{role}-{next(numbers)}",
                    *("--model", str(folder), "--device", "cpu", "--tensor-parallel", str(number)),
                    *("--listen", "127.0.0.1:0", "--block-listen", "tcp://127.0.0.1:0"),
                    *("--metrics-listen", "127.0.0.1:0", "--threads", str(number), "--no-warm-up"),
                    *options,
                )
            )
            return wait()

        yield worker


@pytest.fixture(scope="module")
def one() -> LanguageModel:
    return load_model(DEMO_MODEL, name="m", device="cpu")


@pytest.fixture(scope="module")
def several() -> Iterator[ParallelModel]:
    """The same model in two ranks of decode."""
    with in_ranks(DEMO_MODEL, 2) as model:
        yield model


@asynccontextmanager
async def started(
    model: LanguageModel,
    one: LanguageModel,
    *,
    hub: ProcessTransport | None = None,
    **config: Any,
) -> AsyncIterator[Harness]:
    """A decode service, before one rank of prefill, whose arena is free at the end.

    Args: hub: of the first rank; each rank of several takes its heads' blocks through a socket of its own.
    """
    options: dict[str, Any] = {"arena_bytes": 1 << 24}
    if model.num_ranks > 1:
        options["hub"] = hub or ProcessTransport(SETTINGS, "decode")
        options["rank_transport"] = RankTransport.of(SETTINGS, "decode")
    made = Harness(model=model, prefill_model=one, **(options | config))
    serialise_prefill(made)
    await made.service.start()
    try:
        yield made
        assert await made.arena_is_free()
    finally:
        await made.close()


def same_or_tied(tokens: Sequence[int], expected: Sequence[SampledToken]) -> int:
    """Check greedy tokens against those of one rank, which have `top_logprobs`.

    Returns: how many are equal; after a tie the two go different ways and are not compared.
    """
    assert len(tokens) == len(expected)
    for number, (token, of_one) in enumerate(zip(tokens, expected, strict=True)):
        if token == of_one.token_id:
            continue
        best = dict(of_one.top_logprobs)
        assert token in best, (number, token, of_one)
        assert best[of_one.token_id] - best[token] < TIE, (number, token, of_one)
        return number
    return len(tokens)
