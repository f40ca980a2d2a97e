"""Quantised weights over the services: full equals the library's own `generate`, methods their oracle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from kvtest.families import FAMILIES
from kvtest.lanes import some
from kvtest.pair import Pair, started_pair
from kvtest.quantised_models import WEIGHT_ONLY, save_quantised
from kvtest.transformers_model import Reference, greedy, plan_of, prompt_of

from kvferry.shared.control.messages import SessionKey

for name in ("accelerate", "bitsandbytes", "compressed_tensors", "torchao"):
    pytest.importorskip(name, reason="needs kvferry[quant]")

NUM_NEW = 48
METHODS = ("rocketkv", "rdkv", "snapkv", "compactor")


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, kind = request.param
    return save_quantised(kind, tmp_path, FAMILIES[family].config() if family else None)


@pytest_asyncio.fixture
async def pair(folder: Path) -> AsyncIterator[Pair]:
    async with started_pair(folder) as made:
        yield made


_EQUAL = [("", kind) for kind in WEIGHT_ONLY]
_EQUAL += [
    ("gemma3_text", "torchao int8 weight only"),
    ("qwen3_next", "torchao float8 weight only"),
    ("gpt_oss", "compressed-tensors int4"),
    ("deepseek_v3", "torchao intx weight only"),
    ("deepseek_v3", "compressed-tensors float8"),
]


@pytest.mark.parametrize(
    "folder",
    some(_EQUAL, ("", "bitsandbytes nf4"), ("gpt_oss", "compressed-tensors int4")),
    indirect=True,
    ids=" ".join,
)
async def test_full_equals_generate_alone_in_a_batch_and_in_a_second_turn(pair: Pair, folder: Path) -> None:
    reference = Reference(folder)
    prompts = [prompt_of(60, seed=1), prompt_of(7, seed=2), prompt_of(90, seed=3)]
    expected = [reference.tokens(prompt, NUM_NEW) for prompt in prompts]

    async def run(number: int) -> list[int]:
        session = SessionKey(owner="o", session_id=f"batch {number}")
        return (
            await pair.turn(prompts[number], plan_of("full"), session=session, sampling=greedy(NUM_NEW))
        ).tokens

    assert await run(0) == expected[0]
    assert await asyncio.gather(*map(run, range(3))) == expected
    second = [*prompts[0], *expected[0], *prompt_of(9, seed=5)]
    session = SessionKey(owner="o", session_id="batch 0")
    turn = await pair.turn(second, plan_of("full"), session=session, sampling=greedy(NUM_NEW // 2))
    assert turn.tokens == reference.tokens(second, NUM_NEW // 2)
    assert turn.reused > 0


@pytest.mark.parametrize(
    "folder",
    some(
        [
            ("", kind)
            for kind in ("bitsandbytes nf4", "torchao float8 weight only", "compressed-tensors int4")
        ],
        ("", "torchao float8 weight only"),
    ),
    indirect=True,
    ids=" ".join,
)
async def test_every_method_equals_its_oracle(pair: Pair) -> None:
    prompt = prompt_of(96, seed=1)
    for method in METHODS:
        session = SessionKey(owner="o", session_id=method)
        await pair.checked_turn(prompt, plan_of(method), session=session, sampling=greedy(12))
