"""Models with latent attention (MLA) between real services: bytes shipped and stored, sessions, refusals."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from kvtest.families import FAMILIES
from kvtest.methods import PRESETS
from kvtest.pair import SAMPLING, SESSION, Pair, started_pair
from kvtest.transformers_model import prompt_of

from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.plan import Budget, CompressionPlan, ParamValue
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OracleSession

ROW_BYTES = (16 + 4) * 4
"""A latent vector and a rotary key, float32."""


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with started_pair(FAMILIES["deepseek_v3"].save(tmp_path)) as made:
        yield made


def plan_of(method: str, **overrides: ParamValue) -> CompressionPlan:
    budget = Budget(tokens=40) if PRESETS[method].takes_budget else None
    return plan_for(method, budget=budget, overrides=overrides)


async def test_latent_rows_are_shipped_returned_and_stored_once(pair: Pair) -> None:
    spec, num_tokens = pair.model.spec, 101
    layer_row_bytes = spec.num_layers * ROW_BYTES
    assert spec.kv_token_bytes == layer_row_bytes
    assert spec.full_bytes(num_tokens) == num_tokens * layer_row_bytes
    turn = await pair.turn(prompt_of(num_tokens, seed=1), plan_of("full"))
    assert turn.shipped == {"rows": num_tokens * layer_row_bytes}
    num_stored = num_tokens + len(turn.tokens) - 1  # the last token of a completion has no row
    assert pair.store.size_bytes == num_stored * layer_row_bytes
    assert pair.store.info(SESSION).num_tokens == num_stored

    prompt = [*prompt_of(num_tokens, seed=1), *turn.tokens, *prompt_of(20, seed=2)]
    turn = await pair.turn(prompt, plan_of("full"))
    assert turn.done.delta_bytes == 21 * layer_row_bytes
    saved = pair.prefill_metrics.kv_delta_saved_bytes.labels(spec.name, "full")._value.get()
    assert saved == (len(prompt) - 21) * layer_row_bytes

    other = SessionKey(owner="o", session_id="other")
    turn = await pair.turn(prompt, plan_of("snapkv"), session=other)
    assert turn.shipped == {"rows": 40 * layer_row_bytes, "index": spec.num_layers * 40 * 4}


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        *((name, {}) for name in ("rocketkv", "adakv", "kivi")),
        *(
            pytest.param(name, {}, marks=pytest.mark.full)
            for name in ("full", "compactor", "snapkv", "quest", "h2o", "d2o", "snapkv-kivi", "rocketkv-d2o")
        ),
        ("full", {"wire_bits": 8}),
        ("snapkv", {"wire_bits": 4}),
        ("snapkv", {"rebudget_tokens": 16, "window": 8}),
    ],
    ids=str,
)
async def test_a_sessions_turns_and_a_branch_equal_the_one_process_conversation(
    pair: Pair, method: str, overrides: dict[str, ParamValue]
) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    plan, oracle = plan_of(method, **overrides), OracleSession()
    prompt = prompt_of(120, seed=3)
    before_branch, branch = OracleSession(), prompt
    for number in range(3):
        turn = await pair.checked_turn(prompt, plan, oracle, sampling=sampling)
        assert turn.reused == (len(prompt) - 21 if number else 0)
        prompt = [*prompt, *turn.tokens, *prompt_of(20, seed=10 + number)]
        if number == 1:
            before_branch, branch = copy.deepcopy(oracle), [*prompt[:170], *prompt_of(30, seed=20)]
    turn = await pair.checked_turn(branch, plan, before_branch, sampling=sampling)
    assert turn.reused == 170


async def test_a_method_that_treats_keys_and_values_differently_is_refused_by_name(pair: Pair) -> None:
    applicable = applicable_methods(pair.model.spec.layers)
    refused = {name for name in PRESETS if name not in applicable}
    assert refused == {
        *("compactor-kivi", "compactor-rdkv", "rdkv-union", "rdkv-draft", "rocketkv-kivi"),
        *("kvzip-rdkv", "keydiff-rdkv"),
        *("rdkv", "rdkv-hsa", "think", "snapkv-think"),
    }
    for method in refused:
        with pytest.raises(InvalidRequest, match=r"layer 0 has latent rows \(MLA\)") as caught:
            await pair.turn(prompt_of(90, seed=4), plan_of(method), sampling=SAMPLING)
        assert f"methods that do: {', '.join(applicable)}" in caught.value.message
