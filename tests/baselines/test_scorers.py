"""streamingllm, random, h2o and pyramidkv select what plain references say, exactly on budget."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import compress_layer

from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, Part
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest

W, D, LAYERS = 32, 8, 3
LENGTHS = [1, 2, W - 1, W, W + 1, 97, 211]
BASELINES = ["streamingllm", "random", "h2o", "pyramidkv"]


def make_inputs(num_tokens: int, group: int, *, layer: int = 0, new_tokens: int | None = None) -> LayerInputs:
    generator = torch.Generator().manual_seed(num_tokens * 1009 + group + layer)
    return LayerInputs(
        layer=layer,
        queries=torch.randn(2, group, new_tokens or num_tokens, D, generator=generator),
        keys=torch.randn(2, num_tokens, D, generator=generator),
        values=torch.randn(2, num_tokens, D, generator=generator),
        scaling=1 / math.sqrt(D),
    )


def keep(method: str, inputs: LayerInputs, budget: int) -> list[list[int]]:
    """Positions that a method keeps of one layer, per head."""
    num_tokens = inputs.keys.shape[1]
    resolved = resolve_plan(
        plan_for(method, budget=Budget(tokens=budget)),
        num_prompt_tokens=num_tokens,
        max_new_tokens=5,
        num_layers=LAYERS,
        head_dim=D,
    )
    layer = compress_layer(resolved, inputs)
    if "index" not in layer:
        assert resolved.layers[inputs.layer].rows == num_tokens
        return [list(range(num_tokens))] * 2
    kept = layer["index"].tolist()
    for head, positions in enumerate(kept):
        assert torch.equal(layer["keys"][head], inputs.keys[head, positions])
        assert torch.equal(layer["values"][head], inputs.values[head, positions])
    return kept


def column_sums(inputs: LayerInputs) -> list[list[float]]:
    """Attention that each token receives from all queries of the prompt, one softmax at a time."""
    num_tokens, new = inputs.keys.shape[1], inputs.queries.shape[2]
    sums = torch.zeros(2, num_tokens, dtype=torch.float64)
    for head in range(2):
        for queries in inputs.queries[head].double():
            for i, query in enumerate(queries):
                visible = num_tokens - new + i + 1
                logits = inputs.keys[head, :visible].double() @ query * inputs.scaling
                sums[head, :visible] += torch.softmax(logits, 0)
    return sums.tolist()


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("budget", [1, 2, 4, 5, 6, 20, 96])
def test_streamingllm_keeps_four_sinks_and_the_latest(num_tokens: int, budget: int) -> None:
    rows = min(budget, num_tokens)
    sinks = min(4, rows - 1)
    expected = list(range(sinks)) + list(range(num_tokens - (rows - sinks), num_tokens))
    assert keep("streamingllm", make_inputs(num_tokens, 1), budget) == [expected] * 2


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("budget", [1, 2, 15, 30])
def test_h2o_keeps_half_recent_and_half_most_attended(num_tokens: int, budget: int, group: int) -> None:
    inputs = make_inputs(num_tokens, group)
    rows = min(budget, num_tokens)
    recents = rows - rows // 2
    sums = column_sums(inputs)
    for head, kept in enumerate(keep("h2o", inputs, budget)):
        assert len(kept) == rows
        assert kept[rows - recents :] == list(range(num_tokens - recents, num_tokens))
        older = range(num_tokens - recents)
        heavy = kept[: rows - recents]
        dropped = [sums[head][t] for t in older if t not in set(heavy)]
        assert max(dropped, default=-math.inf) <= min((sums[head][t] for t in heavy), default=math.inf) + 1e-5


def test_h2o_counts_the_new_tokens_queries_where_there_is_history() -> None:
    inputs = make_inputs(61, 2, new_tokens=7)
    scores = make_scorer(Part(name="heavy_hitters"), rows=10)(inputs)
    expected = torch.tensor(column_sums(inputs), dtype=torch.float32)
    torch.testing.assert_close(scores[:, :56], expected[:, :56], atol=1e-5, rtol=1e-4)
    assert torch.isinf(scores[:, 56:]).all()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_random_depends_on_seed_layer_head_and_position_alone(num_tokens: int, seed: int) -> None:
    scorer = make_scorer(Part(name="random", params={"seed": seed}), rows=1)
    scores, longer = (scorer(make_inputs(length, 1, layer=2)) for length in (num_tokens, 500))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, longer[:, :num_tokens])
    assert 0 <= float(scores.min()) <= float(scores.max()) < 1


def test_random_is_the_same_everywhere() -> None:
    scores = make_scorer(Part(name="random", params={"seed": 7}), rows=1)(make_inputs(3, 1, layer=1))
    assert (scores * 2**24).tolist() == [[12920821, 1877827, 3172533], [12495643, 10468402, 1893989]]


def test_random_differs_by_layer_head_and_seed_and_looks_uniform() -> None:
    def draw(layer: int, seed: int = 0) -> torch.Tensor:
        scorer = make_scorer(Part(name="random", params={"seed": seed}), rows=1)
        return scorer(make_inputs(4001, 1, layer=layer))

    streams = [*draw(0), *draw(1), *draw(0, seed=1)]
    for i, one in enumerate(streams):
        assert abs(float(one.mean()) - 0.5) < 0.03
        assert all(
            abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.08 for other in streams[:i]
        )
        assert abs(float(torch.corrcoef(torch.stack([one[1:], one[:-1]]))[0, 1])) < 0.08


@pytest.mark.parametrize("num_tokens", [W + 2, 97, 211])
def test_pyramidkv_is_snapkv_with_the_layers_own_rows(num_tokens: int) -> None:
    budget = num_tokens // 2
    kept = []
    for layer in range(LAYERS):
        inputs = make_inputs(num_tokens, 4, layer=layer)
        kept.append(keep("pyramidkv", inputs, budget))
        assert kept[-1] == keep("snapkv", inputs, len(kept[-1][0]))
    assert sum(len(layer[0]) for layer in kept) == budget * LAYERS
    if budget > W:
        assert len(kept[0][0]) > len(kept[1][0]) > len(kept[2][0])


@given(
    method=st.sampled_from(BASELINES),
    num_tokens=st.integers(1, 120),
    budget=st.integers(1, 130),
    group=st.sampled_from([1, 4]),
)
def test_totals_over_layers_are_the_budget(method: str, num_tokens: int, budget: int, group: int) -> None:
    kept = [keep(method, make_inputs(num_tokens, group, layer=layer), budget) for layer in range(LAYERS)]
    for head in range(2):
        assert sum(len(layer[head]) for layer in kept) == min(budget, num_tokens) * LAYERS
        for layer in kept:
            assert layer[head] == sorted(set(layer[head]))
            assert layer[head][0] >= 0
            assert layer[head][-1] < num_tokens


@pytest.mark.parametrize(
    "part",
    [
        Part(name="streaming"),
        Part(name="streaming", params={"sinks": -1}),
        Part(name="streaming", params={"sinks": 4.0}),
        Part(name="random", params={"seed": "0"}),
        Part(name="heavy_hitters", params={"recents": 3}),
    ],
    ids=str,
)
def test_parameters_that_a_scorer_does_not_take_are_refused(part: Part) -> None:
    with pytest.raises(InvalidRequest):
        make_scorer(part, rows=10)
