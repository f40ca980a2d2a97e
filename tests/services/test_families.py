"""Every family that is accepted: full equals transformers' `generate`, and each method its oracle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from kvtest.families import FAMILIES, ONE_OF_EACH_KIND, WINDOW
from kvtest.lanes import some
from kvtest.pair import Pair, Turn, started_pair
from kvtest.transformers_model import Reference, greedy, plan_of, prompt_of

from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import SessionKey
from kvferry.tools.oracle import OneProcessGenerator, OracleSession

NUM_NEW, FEW = 32, 8
FULL = plan_for("full")
_TIE, _TIES = 1e-4, {"zamba2": 0.2}
"""Between two logits, where a prompt continues from states, which are computed in another order than afresh.
transformers' own two forms of Zamba 2, for prompts and for steps, differ by so much."""


@pytest.fixture(params=some(FAMILIES, *ONE_OF_EACH_KIND))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return FAMILIES[request.param].save(tmp_path)


@pytest_asyncio.fixture
async def pair(folder: Path) -> AsyncIterator[Pair]:
    async with started_pair(folder) as made:
        yield made


async def test_full_equals_generate_beyond_two_windows_alone_in_a_batch_and_over_a_session(
    pair: Pair, folder: Path
) -> None:
    reference, oracle = Reference(folder), OracleSession()
    has_states = bool(pair.model.spec.state_layers)
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    tie = _TIES.get(model_type, _TIE) if has_states else -1.0
    first = prompt_of(2 * WINDOW + 5, seed=1)
    prompts = [first, prompt_of(7, seed=2), prompt_of(3 * WINDOW, seed=3), prompt_of(WINDOW, seed=4)]
    expected = [reference.tokens(prompt, NUM_NEW) for prompt in prompts]
    assert len(set(expected[0])) > 3, "the model repeats itself"

    async def turn(prompt: list[int], num_new: int = NUM_NEW) -> Turn:
        """The next turn of one session, in one process and over the services."""
        return await pair.checked_turn(prompt, FULL, oracle, sampling=greedy(num_new))

    ended = await turn(first)
    assert ended.tokens == expected[0]

    async def in_batch(number: int, prompt: list[int], method: str) -> list[int]:
        session = SessionKey(owner="o", session_id=f"batch {number}")
        done = await pair.turn(prompt, plan_of(method), session=session, sampling=greedy(NUM_NEW))
        return done.tokens

    batch = [in_batch(i, prompt, "full") for i, prompt in enumerate(prompts)]
    other = "snapkv" if pair.model.spec.row_layers else "full"
    *batched, _ = await asyncio.gather(*batch, in_batch(9, prompts[2], other))
    assert batched == expected

    ends = [[*first, *ended.tokens]]
    for seed in (5, 6):
        prompt = [*ends[-1], *prompt_of(9, seed=seed)]
        ended = await turn(prompt, FEW)
        assert reference.answers(prompt, ended.tokens, tie=tie)
        assert ended.reused == len(ends[-1]) - 1
        ends.append([*prompt, *ended.tokens])
    # another third turn; a state is that of the turn's end, before its last token
    branch = [*ends[1], *prompt_of(5, seed=7)]
    ended = await turn(branch, FEW)
    assert reference.answers(branch, ended.tokens, tie=tie)
    assert ended.reused == len(ends[1]) - has_states
    # another second turn, from the middle of the first answer; with states from the end of the first prompt
    branch = [*ends[0][: len(first) + NUM_NEW // 2], *prompt_of(5, seed=8)]
    ended = await turn(branch, FEW)
    assert reference.answers(branch, ended.tokens, tie=tie)
    assert ended.reused == len(first) + (0 if has_states else NUM_NEW // 2)


@pytest.mark.parametrize(
    "folder", some(FAMILIES, "llama", "gpt_oss", "gemma3n_text", "deepseek_v3", "qwen3_next"), indirect=True
)
async def test_every_method_that_applies_equals_its_oracle(pair: Pair, folder: Path) -> None:
    generator, prompt = OneProcessGenerator(pair.model), prompt_of(4 * WINDOW, seed=1)
    methods, sampling = applicable_methods(pair.model.spec.layers), greedy(FEW)

    async def run(method: str) -> list[int]:
        session = SessionKey(owner="o", session_id=method)
        return (await pair.turn(prompt, plan_of(method), session=session, sampling=sampling)).tokens

    answers = await asyncio.gather(*map(run, methods))
    for method, tokens in zip(methods, answers, strict=True):
        expected = generator.generate(prompt, plan=plan_of(method), sampling=sampling)
        assert tokens == [token.token_id for token in expected], method


@pytest.mark.parametrize(
    "folder",
    some(["gemma3_text", "gpt_oss", "llama4_text", "kimi_linear"], "gpt_oss", "kimi_linear"),
    indirect=True,
)
async def test_sessions_of_lossy_methods_equal_their_oracles_beside_windows_sinks_and_states(
    pair: Pair,
) -> None:
    first = prompt_of(3 * WINDOW, seed=1)

    async def two_turns(method: str) -> None:
        session, oracle = SessionKey(owner=method, session_id="s"), OracleSession()
        prompt, sampling = first, greedy(FEW)
        for seed in (2, 3):
            plan = plan_of(method)
            done = await pair.checked_turn(prompt, plan, oracle, session=session, sampling=sampling)
            assert done.reused == (0 if prompt is first else len(first) + FEW - 1), method
            prompt = [*prompt, *done.tokens, *prompt_of(9, seed=seed)]

    for method in applicable_methods(pair.model.spec.layers):
        await two_turns(method)


@pytest.mark.parametrize("folder", ["gemma3_text", "llama4_text"], indirect=True)
async def test_layers_with_windows_ship_their_last_rows_only(pair: Pair) -> None:
    spec, num_tokens = pair.model.spec, 2 * WINDOW + 5
    turn = await pair.turn(prompt_of(num_tokens, seed=1), FULL, sampling=greedy(4))
    shipped = [
        num_tokens if not layer.window else num_tokens % WINDOW if layer.is_chunked else WINDOW - 1
        for layer in spec.layers
    ]
    assert 0 < sum(layer.window > 0 for layer in spec.layers) < spec.num_layers
    assert turn.done.bytes_by_kind["rows"] == 2 * spec.num_kv_heads * spec.row_bytes(0) * sum(shipped)
