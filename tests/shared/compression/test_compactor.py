"""Compactor's scores and selections against the paper's equations, one number at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import compress_layer
from torch import Tensor

from kvferry.shared.compression.formats.interface import select_rows
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.leverage import gaussian_sketch
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import CompactorScorer
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.loading import load_model
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator
from kvferry.tools.recall.tasks import TASKS

D = 8
SINKS, RECENTS = 8, 4
DEFAULTS: dict[str, int | float | bool | str] = {
    "sketch": "gaussian",
    "sketch_columns": 6,
    "solver": "svd",
    "centered": False,
    "seed": 0,
    "chunk_tokens": 16,
    "scaled": True,
    "leverage_weight": 0.3,
    "sinks": SINKS,
    "recents": RECENTS,
}


def make_inputs(num_tokens: int, new_tokens: int = 0, group: int = 2, num_kv_heads: int = 2) -> LayerInputs:
    """`new_tokens` of 0: all of them. Pre-RoPE keys are made up: any other tensor of that shape will do."""
    new_tokens = new_tokens or num_tokens
    generator = torch.Generator().manual_seed(num_tokens * 1009 + group)
    queries = torch.randn(num_kv_heads, group, num_tokens, D, generator=generator) * 2
    keys = torch.randn(num_kv_heads, num_tokens, D, generator=generator)
    values = torch.randn(num_kv_heads, num_tokens, D, generator=generator)
    return LayerInputs(
        layer=0,
        queries=queries[:, :, num_tokens - new_tokens :],
        keys=keys,
        values=values,
        scaling=1 / math.sqrt(D),
        unrotate=lambda rows: rows.roll(1, dims=2).float(),
    )


def scorer(rows: int, **changes: int | float | bool | str) -> CompactorScorer:
    return CompactorScorer.from_params({**DEFAULTS, **changes}, rows)


def plain_z(scores: list[float]) -> list[float]:
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((s - mean) ** 2 for s in scores) / len(scores))
    return [(s - mean) / max(std, 1e-6) for s in scores]


def plain_attention(inputs: LayerInputs, head: int, chunk_tokens: int, scaling: float) -> list[float]:
    """Equation 5 over the tokens between sinks and recents; with history, chunks that lack a query are scored
    by the turn's last `chunk_tokens` queries."""
    num_tokens, new_tokens = inputs.keys.shape[1], inputs.queries.shape[2]
    end = num_tokens - RECENTS
    sums = torch.zeros(num_tokens, dtype=torch.float64)
    for begin in range(SINKS, end, chunk_tokens):
        chunk = list(range(begin, min(begin + chunk_tokens, end)))
        positions = chunk
        if begin < num_tokens - new_tokens:
            positions = list(range(num_tokens - min(new_tokens, chunk_tokens), num_tokens))
        for group in range(inputs.queries.shape[1]):
            for position in positions:
                query = inputs.queries[head, group, position - (num_tokens - new_tokens)].double()
                row = torch.softmax(inputs.keys[head, chunk].double() @ query * scaling, dim=0)
                share = len(chunk) / len(positions) / inputs.queries.shape[1]
                for column, t in enumerate(chunk):
                    sums[t] += row[column] * share
    weighted = (sums * inputs.values[head].double().norm(dim=1))[SINKS:end].tolist()
    padded = [0.0, *weighted, 0.0]
    return [sum(padded[i : i + 3]) / 3 for i in range(len(weighted))]


def plain_leverage(inputs: LayerInputs, head: int, columns: int, seed: int) -> list[float]:
    """Equation 1 with Algorithm 1's sketch, over the same tokens."""
    keys = inputs.pre_rope_keys()[head, SINKS : inputs.keys.shape[1] - RECENTS].double()
    if keys.shape[0] <= min(columns, D):
        return [1.0] * keys.shape[0]
    x = keys @ gaussian_sketch(D, columns, seed).double() if columns < D else keys
    u, _, _ = torch.linalg.svd(x, full_matrices=False)
    return u.square().sum(dim=1).tolist()


def plain_scores(inputs: LayerInputs, chunk_tokens: int = 16, weight: float = 0.3) -> Tensor:
    """Equation 6."""
    heads = []
    for head in range(inputs.keys.shape[0]):
        a = plain_z(plain_attention(inputs, head, chunk_tokens, inputs.scaling))
        o = plain_z(plain_leverage(inputs, head, 6, 0))
        heads.append([x + weight * y for x, y in zip(a, o, strict=True)])
    return torch.tensor(heads, dtype=torch.float32)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("num_tokens", [13, 14, 18, 19, 28, 29, 60, 61, 97])
def test_scores_are_those_of_the_equations(num_tokens: int, group: int) -> None:
    inputs = make_inputs(num_tokens, group=group)
    scores = scorer(12)(inputs)
    assert scores.dtype is torch.float32
    assert scores.shape == (2, num_tokens)
    torch.testing.assert_close(
        scores[:, SINKS : num_tokens - RECENTS], plain_scores(inputs), atol=2e-4, rtol=1e-3
    )
    assert torch.isposinf(scores[:, :SINKS]).all()
    assert torch.isposinf(scores[:, num_tokens - RECENTS :]).all()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 48, 256])
def test_chunks_may_be_of_any_length_and_the_last_is_truly_short(chunk_tokens: int) -> None:
    inputs = make_inputs(61)
    scores = scorer(12, chunk_tokens=chunk_tokens)(inputs)[:, SINKS:-RECENTS]
    torch.testing.assert_close(scores, plain_scores(inputs, chunk_tokens), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("new_tokens", [1, 3, 4, 5, 15, 16, 17, 36, 37, 88, 89, 96])
def test_history_without_queries_is_scored_by_the_turns_last_ones(new_tokens: int) -> None:
    inputs = make_inputs(97, new_tokens)
    scores = scorer(12)(inputs)[:, SINKS:-RECENTS]
    torch.testing.assert_close(scores, plain_scores(inputs), atol=2e-4, rtol=1e-3)


def test_chunks_whose_tokens_are_all_new_score_as_they_would_without_history() -> None:
    # chunks begin at 8, 24, 40, ...; tokens from 30 on are new, so from 40 on nothing changes
    alone = scorer(12, leverage_weight=0.0)._attention(make_inputs(97), SINKS, 93)
    after = scorer(12, leverage_weight=0.0)._attention(make_inputs(97, 67), SINKS, 93)
    # the pooling looks one token across the border
    torch.testing.assert_close(after[:, 33:], alone[:, 33:])
    assert not torch.allclose(after[:, :32], alone[:, :32], atol=1e-2)


def test_leverage_alone_and_attention_alone_are_the_blends_ends() -> None:
    inputs = make_inputs(80)
    attention = torch.tensor([plain_z(plain_attention(inputs, h, 16, inputs.scaling)) for h in range(2)])
    leverage = torch.tensor([plain_z(plain_leverage(inputs, h, 6, 0)) for h in range(2)])
    only_attention = scorer(12, leverage_weight=0.0)(inputs)[:, SINKS:-RECENTS]
    torch.testing.assert_close(only_attention, attention, atol=2e-4, rtol=1e-3)
    mostly_leverage = scorer(12, leverage_weight=1000.0)(inputs)[:, SINKS:-RECENTS] / 1000
    torch.testing.assert_close(mostly_leverage, leverage, atol=1e-2, rtol=1e-2)


def test_a_scorer_without_leverage_asks_for_no_pre_rope_keys() -> None:
    inputs = make_inputs(40)
    bare = LayerInputs(
        layer=0, queries=inputs.queries, keys=inputs.keys, values=inputs.values, scaling=inputs.scaling
    )
    scorer(12, leverage_weight=0.0)(bare)
    with pytest.raises(AssertionError, match="pre-RoPE"):
        scorer(12)(bare)


def test_no_more_tokens_than_sketch_columns_leave_attention_alone() -> None:
    inputs = make_inputs(SINKS + RECENTS + 6)
    torch.testing.assert_close(scorer(12)(inputs), scorer(12, leverage_weight=0.0)(inputs))


def test_unscaled_logits_are_an_option() -> None:
    inputs = make_inputs(50)
    scores = scorer(12, scaled=False, leverage_weight=0.0)(inputs)[:, SINKS:-RECENTS]
    expected = torch.tensor([plain_z(plain_attention(inputs, h, 16, 1.0)) for h in range(2)])
    torch.testing.assert_close(scores, expected, atol=2e-4, rtol=1e-3)
    scaled = scorer(12, leverage_weight=0.0)(inputs)[:, SINKS:-RECENTS]
    assert not torch.allclose(scores, scaled, atol=1e-2)


@pytest.mark.parametrize("change", [{"solver": "qr"}, {"solver": "gram"}])
def test_solvers_rank_alike(change: dict[str, str]) -> None:
    inputs = make_inputs(150)
    torch.testing.assert_close(scorer(12, **change)(inputs), scorer(12)(inputs), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("change", [{"sketch": "srht"}, {"sketch": "none"}, {"centered": True}, {"seed": 1}])
def test_leverage_options_reach_the_scores(change: dict[str, str | bool | int]) -> None:
    inputs = make_inputs(150)
    scores, default = scorer(12, **change)(inputs), scorer(12)(inputs)
    assert scores[:, SINKS:-RECENTS].isfinite().all()
    assert not torch.allclose(scores, default, atol=1e-2)


def test_equal_tokens_score_zero() -> None:
    inputs = LayerInputs(
        layer=0,
        queries=torch.ones(1, 1, 44, D),
        keys=torch.ones(1, 44, D),
        values=torch.ones(1, 44, D),
        scaling=0.5,
        unrotate=lambda rows: rows,
    )
    scores = scorer(12)(inputs)[:, SINKS:-RECENTS]
    # but for the ends, where the pooling counts a zero
    assert scores[0, 1:-1].std() < 1e-2
    assert (scores[0, [0, -1]] < scores[0, 1]).all()


@pytest.mark.parametrize(("rows", "kept"), [(1, [39]), (4, [36, 37, 38, 39]), (6, [0, 1, 36, 37, 38, 39])])
def test_fewer_rows_than_protected_tokens_keep_recents_first(rows: int, kept: list[int]) -> None:
    inputs = make_inputs(40)
    assert select_rows(scorer(rows)(inputs), rows).tolist() == [kept, kept]


@given(
    num_tokens=st.integers(1, 90),
    new_share=st.floats(0, 1),
    rows_share=st.floats(0, 1),
    group=st.sampled_from([1, 3]),
    chunk_tokens=st.integers(1, 40),
    sinks=st.integers(0, 10),
    recents=st.integers(0, 10),
)
def test_scores_are_finite_where_not_protected_and_selections_are_on_budget(
    num_tokens: int,
    new_share: float,
    rows_share: float,
    group: int,
    chunk_tokens: int,
    sinks: int,
    recents: int,
) -> None:
    inputs = make_inputs(num_tokens, max(1, round(num_tokens * new_share)), group)
    rows = max(1, round(num_tokens * rows_share))
    scores = scorer(rows, chunk_tokens=chunk_tokens, sinks=sinks, recents=recents)(inputs)
    protected = torch.isposinf(scores)
    assert (protected | scores.isfinite()).all()
    assert (protected.sum(dim=1) == min(sinks + recents, rows, num_tokens)).all() or num_tokens <= rows
    for kept in select_rows(scores, rows).tolist():
        assert len(set(kept)) == rows
        assert set(range(num_tokens - min(recents, rows), num_tokens)) <= set(kept)


def test_a_heads_scores_do_not_depend_on_its_neighbours() -> None:
    inputs = make_inputs(70, num_kv_heads=3)
    together = scorer(12)(inputs)
    for head in range(3):
        alone = LayerInputs(
            layer=0,
            queries=inputs.queries[head : head + 1],
            keys=inputs.keys[head : head + 1],
            values=inputs.values[head : head + 1],
            scaling=inputs.scaling,
            unrotate=inputs.unrotate,
        )
        torch.testing.assert_close(scorer(12)(alone)[0], together[head], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"sketch": "nosuch"},
        {"solver": "nosuch"},
        {"sketch_columns": 0},
        {"sketch_columns": 10**6},
        {"chunk_tokens": 0},
        {"chunk_tokens": 10**6},
        {"leverage_weight": -0.1},
        {"leverage_weight": float("nan")},
        {"leverage_weight": 1},
        {"sinks": -1},
        {"recents": 10**6},
        {"seed": -1},
        {"scaled": 1},
        {"nosuch": 1},
    ],
)
def test_bad_parameters_are_refused_by_name(changes: dict[str, int | float | bool | str]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(changes))):
        scorer(12, **changes)


def test_missing_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="leverage_weight"):
        CompactorScorer.from_params({"sinks": 8}, 12)


@pytest.mark.parametrize(
    ("budget", "prompt", "rows"),
    [
        (None, 1000, 250),
        (None, 1001, 251),
        (Budget(retention=0.1), 1001, 101),
        (Budget(retention=0.01), 1000, 12),
        (Budget(tokens=1), 13, 12),
        (Budget(tokens=100), 1000, 100),
    ],
)
def test_the_preset_keeps_its_share_rounded_up_and_no_less_than_sinks_and_recents(
    budget: Budget | None, prompt: int, rows: int
) -> None:
    resolved = resolve(plan_for("compactor", budget=budget), prompt)
    assert resolved.method == "compactor"
    assert {layer.rows for layer in resolved.layers} == {rows}


@pytest.mark.parametrize("prompt", [1, 2, 11, 12])
def test_short_prompts_are_left_whole(prompt: int) -> None:
    resolved = resolve(plan_for("compactor", budget=Budget(tokens=1)), prompt)
    assert resolved.method == "full"
    assert {layer.rows for layer in resolved.layers} == {prompt}


def test_compactor_goes_with_hybrid_sparse_attention() -> None:
    plan = replace(plan_for("compactor", budget=Budget(tokens=64)), attention=Part(name="hsa"))
    rocketkv = resolve(plan_for("rocketkv", budget=Budget(tokens=64)), 5000)
    assert resolve(plan, 5000).layers == rocketkv.layers
    least = resolve(replace(plan, budget=Budget(tokens=1)), 40).layers[0]
    assert least.rows >= SINKS + RECENTS


@pytest.fixture(scope="module")
def captured(demo_model_dir: Path) -> CapturedPrompt:
    generator = OneProcessGenerator(load_model(demo_model_dir, name="demo", device="cpu"))
    return generator.capture(TASKS["multi_key_8"].example(num_tokens=600, seed=1).prompt_token_ids)


def test_the_presets_selection_on_a_real_model_is_that_of_the_equations(captured: CapturedPrompt) -> None:
    num_tokens = len(captured.token_ids)
    resolved = resolve(plan_for("compactor"), num_tokens)
    inputs = captured.layers[1]
    kept = compress_layer(resolved, inputs)["index"]
    scores = preset_scores(inputs)
    for head, positions in enumerate(kept.long()):
        assert positions.shape == (-(-num_tokens // 4),)
        assert positions[:SINKS].tolist() == list(range(SINKS))
        assert positions[-RECENTS:].tolist() == list(range(num_tokens - RECENTS, num_tokens))
        chosen = torch.zeros(num_tokens, dtype=torch.bool)
        chosen[positions] = True
        between = torch.arange(SINKS, num_tokens - RECENTS)
        worst = scores[head][chosen[between]].min()
        assert scores[head][~chosen[between]].max() <= worst + 1e-3


def preset_scores(inputs: LayerInputs) -> Tensor:
    """Equations 1, 5 and 6 for whole heads at once, with the preset's numbers, in float64."""
    between = slice(SINKS, inputs.keys.shape[1] - RECENTS)
    keys, queries = inputs.keys[:, between].double(), inputs.queries[:, :, between].double()
    chunks = []
    for q, k in zip(queries.split(256, dim=2), keys.split(256, dim=1), strict=True):
        logits = q @ k.mT[:, None] * inputs.scaling
        chunks.append(logits.softmax(dim=-1).sum(dim=2).mean(dim=1))
    a = torch.cat(chunks, dim=1) * inputs.values[:, between].double().norm(dim=2)
    a = torch.nn.functional.pad(a, (1, 1)).unfold(1, 3, 1).mean(dim=2)
    x = inputs.pre_rope_keys()[:, between].double() @ gaussian_sketch(inputs.keys.shape[2], 48, 0).double()
    o = torch.linalg.svd(x, full_matrices=False).U.square().sum(dim=2)
    z_a, z_o = ((s - s.mean(1, keepdim=True)) / s.std(1, correction=0, keepdim=True) for s in (a, o))
    return z_a + 0.3 * z_o


def test_exact_leverage_and_all_solvers_select_nearly_the_same_on_a_real_model(
    captured: CapturedPrompt,
) -> None:
    def kept(**changes: str) -> set[tuple[int, int]]:
        plan = plan_for("compactor", overrides=changes)
        positions = compress_layer(resolve(plan, len(captured.token_ids)), captured.layers[2])["index"]
        return {(head, t) for head, row in enumerate(positions.tolist()) for t in row}

    default = kept()
    for changes in ({"solver": "qr"}, {"solver": "svd"}, {"sketch": "srht"}, {"sketch": "none"}):
        # solvers of one sketch are the same numbers; other sketches are other estimates of the same
        least = 0.98 if "solver" in changes else 0.75
        assert len(kept(**changes) & default) >= least * len(default)


def resolve(plan: CompressionPlan, num_prompt_tokens: int) -> ResolvedPlan:
    return resolve_plan(
        plan, num_prompt_tokens=num_prompt_tokens, max_new_tokens=8, num_layers=4, head_dim=64
    )
