"""KeyDiff's scores and selections against the paper's equation, one number at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from kvtest.compression import compress_layer, make_inputs

from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import KeyDiffScorer
from kvferry.shared.errors import InvalidRequest


def scorer(rows: int = 20, *, sinks: int = 8, recents: int = 4) -> KeyDiffScorer:
    return KeyDiffScorer.from_params({"sinks": sinks, "recents": recents}, rows)


def plain_scores(inputs: LayerInputs, head: int) -> list[float]:
    """`-cos(k_t, mean_i k_i / |k_i|)` of every token."""
    keys = inputs.keys[head].double().tolist()
    norms = [math.sqrt(sum(x * x for x in key)) for key in keys]
    anchor = [sum(key[c] / norm for key, norm in zip(keys, norms, strict=True)) for c in range(len(keys[0]))]
    size = math.sqrt(sum(x * x for x in anchor))
    return [
        -sum(x * y for x, y in zip(key, anchor, strict=True)) / (norm * size)
        for key, norm in zip(keys, norms, strict=True)
    ]


@pytest.mark.parametrize("num_tokens", [13, 14, 60, 97])
def test_scores_are_those_of_the_equation(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, group_size=3)
    found = scorer()(inputs)
    assert found.dtype is torch.float32
    assert found.isinf().tolist() == [[t < 8 or t >= num_tokens - 4 for t in range(num_tokens)]] * 2
    for head in range(2):
        plain = plain_scores(inputs, head)[8 : num_tokens - 4]
        mean = sum(plain) / len(plain)
        std = max(math.sqrt(sum((score - mean) ** 2 for score in plain) / len(plain)), 1e-6)
        expected = torch.tensor([(score - mean) / std for score in plain])
        torch.testing.assert_close(found[head, 8 : num_tokens - 4], expected, atol=1e-4, rtol=1e-4)


def test_the_length_of_a_key_and_the_queries_do_not_matter() -> None:
    inputs = make_inputs(50)
    longer = replace(inputs, keys=inputs.keys * torch.rand(2, 50, 1).add(0.5), queries=inputs.queries * 9)
    torch.testing.assert_close(scorer()(longer), scorer()(inputs), atol=1e-4, rtol=1e-4)


def test_the_key_that_points_elsewhere_scores_highest() -> None:
    inputs = make_inputs(40)
    inputs.keys[...] = torch.tensor([1.0, 0.5, *[0.0] * 6]) + 0.01 * inputs.keys
    inputs.keys[:, 21] *= -1
    found = scorer(sinks=0, recents=0)(inputs)
    assert found.argmax(1).tolist() == [21, 21]


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 12])
def test_short_prompts_have_finite_or_protected_scores(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens)
    inputs.keys[:, 0] = 0.0  # has no direction
    for made in (scorer(1), scorer(1, sinks=0, recents=0)):
        assert not made(inputs).isnan().any()


def test_half_precision_keys_are_scored_in_float32() -> None:
    inputs = make_inputs(60, dtype=torch.bfloat16)
    whole = replace(inputs, keys=inputs.keys.float())
    assert torch.equal(scorer()(inputs), scorer()(whole))


def test_rows_are_selected_by_the_scores_and_protected_where_the_paper_protects_none() -> None:
    """Deviation: the first 8 and the last 4 tokens always stay."""
    inputs = make_inputs(203)
    plan = plan_for("keydiff", budget=Budget(tokens=40))
    resolved = resolve_plan(plan, num_prompt_tokens=203, max_new_tokens=4, num_layers=1, head_dim=8)
    index = compress_layer(resolved, inputs)["index"]
    for head in range(2):
        best = (torch.tensor(plain_scores(inputs, head)[8:199]).topk(28).indices + 8).tolist()
        assert index[head].tolist() == sorted([*range(8), *best, *range(199, 203)])


@pytest.mark.parametrize("params", [{"sinks": 8}, {"sinks": -1, "recents": 4}, {"sinks": 8, "recents": 5000}])
def test_bad_parameters_are_refused(params: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        KeyDiffScorer.from_params(dict(params), 10)
