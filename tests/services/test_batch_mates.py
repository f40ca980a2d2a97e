"""Log-probabilities of a sequence do not depend on its batch (float32, on a CPU), bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from kvtest.pair import SAMPLING, Pair, Turn, started_pair
from kvtest.transformers_model import plan_of, prompt_of

from kvferry.kernels.native import library
from kvferry.models import DEMO_MODEL
from kvferry.shared.control.messages import SessionKey

pytestmark = pytest.mark.skipif(
    not library.is_available(), reason="no C compiler: torch's products depend on rows"
)

NUM_MATES = 7
NUM_TOKENS, NUM_OF_MATES = 120, 40
QUESTION = [5, 9, 11, 3]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with started_pair(DEMO_MODEL, max_model_len=1024) as made:
        yield made


async def ask(pair: Pair, method: str, prompt: list[int], session_id: str, num_tokens: int) -> Turn:
    sampling = replace(SAMPLING, max_tokens=num_tokens, logprobs=5)
    # Of owners of their own, so that no prompt begins with the rows of another session's.
    session = SessionKey(owner=session_id, session_id=session_id)
    return await pair.turn(prompt, plan_of(method), session=session, sampling=sampling)


def drawn(turn: Turn) -> list[object]:
    """Tokens, their log-probabilities and those of five alternatives, as the numbers are."""
    return [(token.token_id, token.logprob, token.top_logprobs) for token in turn.sampled]


@pytest.mark.parametrize("method", ["full", "rocketkv", "snapkv", "rdkv"])
async def test_alone_and_among_seven_others_the_numbers_are_the_same(pair: Pair, method: str) -> None:
    prompt = prompt_of(90, seed=1)
    alone = await ask(pair, method, prompt, "alone", NUM_TOKENS)
    again = await ask(pair, method, [*prompt, *alone.tokens, *QUESTION], "alone", 16)
    steps = pair.decode_metrics.registry.get_sample_value
    before = steps("kvferry_decode_step_seconds_count", {"model": "demo"}) or 0.0

    mates = [prompt_of(40 + 9 * number, seed=2 + number) for number in range(NUM_MATES)]
    among, *others = await asyncio.gather(
        ask(pair, method, prompt, "among", NUM_TOKENS),
        *(ask(pair, method, mate, f"mate-{number}", NUM_OF_MATES) for number, mate in enumerate(mates)),
    )
    after = steps("kvferry_decode_step_seconds_count", {"model": "demo"}) or 0.0
    drawn_by_steps = NUM_TOKENS - 1 + NUM_MATES * (NUM_OF_MATES - 1)
    assert after - before < drawn_by_steps - NUM_TOKENS, "they ran in one batch"
    assert len({tuple(other.tokens) for other in others}) > 1
    assert drawn(among) == drawn(alone)
    again_among = await ask(pair, method, [*prompt, *among.tokens, *QUESTION], "among", 16)
    assert drawn(again_among) == drawn(again), (
        "nor does the next turn, which selects from the rows of this one"
    )
