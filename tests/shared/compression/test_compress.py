"""compress_layer against plain references written beside the papers' equations."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import compress_layer, make_spec
from torch import Tensor

from kvferry.shared.compression.compress import compress_prompt
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, LayerPlan, ResolvedPlan
from kvferry.shared.compression.presets import method_names, plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import make_scorer

POOLINGS = [("snapkv", "avg", 9), ("snapkv", "avg", 7), ("rocketkv", "avg", 9), ("rocketkv", "max", 63)]
"""The presets' pooling, and the papers'."""
W = 32
RECENTS = 8
D = 8


def make_inputs(num_tokens: int, new_tokens: int, group: int, num_kv_heads: int = 2) -> LayerInputs:
    generator = torch.Generator().manual_seed(num_tokens * 1009 + new_tokens * 13 + group)
    return LayerInputs(
        layer=0,
        queries=torch.randn(num_kv_heads, group, new_tokens, D, generator=generator),
        keys=torch.randn(num_kv_heads, num_tokens, D, generator=generator),
        values=torch.randn(num_kv_heads, num_tokens, D, generator=generator),
        scaling=1 / math.sqrt(D),
    )


def exact_plan(method: str, num_tokens: int, rows: int, **overrides: int | str) -> ResolvedPlan:
    """A resolved plan of exactly `rows` rows, as resolve_plan would give for some budget."""
    return ResolvedPlan(
        plan=plan_for(method, overrides=overrides),
        method=method,
        num_prompt_tokens=num_tokens,
        max_new_tokens=1,
        layers=(LayerPlan(rows=rows),),
    )


def plain_scores(
    inputs: LayerInputs, window: int, protected: int, pooling: str, kernel: int
) -> list[list[float]]:
    """Per head: sum over the window's queries and the group of causal softmaxes, protected columns dropped,
    then pooled, one number at a time."""
    num_tokens = inputs.keys.shape[1]
    first, before = num_tokens - window, num_tokens - protected
    heads = []
    for head in range(inputs.keys.shape[0]):
        sums = torch.zeros(before, dtype=torch.float64)
        for group in range(inputs.queries.shape[1]):
            for i in range(window):
                query = inputs.queries[head, group, inputs.queries.shape[2] - window + i].double()
                visible = first + i + 1
                logits = inputs.keys[head, :visible].double() @ query * inputs.scaling
                seen = min(visible, before)
                sums[:seen] += torch.softmax(logits, dim=0)[:seen]
        pad = kernel // 2
        pooled = []
        for t in range(before):
            neighbours = sums[max(0, t - pad) : t + pad + 1].tolist()
            pooled.append(max(neighbours) if pooling == "max" else sum(neighbours) / kernel)
        heads.append(pooled)
    return heads


def assert_selection_is_best(positions: Tensor, scores: list[list[float]], protected: int, rows: int) -> None:
    """Protected tokens are kept; no dropped one scores higher than a kept one (beyond float32's noise)."""
    for head, kept in enumerate(positions.tolist()):
        before = len(scores[head])
        assert len(kept) == rows
        assert kept == sorted(set(kept))
        assert kept[rows - protected :] == list(range(before, before + protected))
        chosen = set(kept[: rows - protected])
        dropped = [scores[head][t] for t in range(before) if t not in chosen]
        worst_kept = min((scores[head][t] for t in chosen), default=math.inf)
        assert max(dropped, default=-math.inf) <= worst_kept + 1e-5


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("num_tokens", [W + 1, W + 2, 97, 211])
@pytest.mark.parametrize(("method", "pooling", "kernel"), POOLINGS)
def test_selection_is_that_of_the_papers_equations(
    method: str, pooling: str, kernel: int, num_tokens: int, group: int
) -> None:
    inputs = make_inputs(num_tokens, num_tokens, group)
    rows = max(W, num_tokens // 2)
    plan = exact_plan(method, num_tokens, rows, pooling=pooling, kernel_size=kernel)
    layer = compress_layer(plan, inputs)
    protected = min(RECENTS, rows // 4)
    scores = plain_scores(inputs, W, protected, pooling, kernel)
    assert_selection_is_best(layer["index"], scores, protected, rows)
    assert torch.equal(
        layer["keys"], torch.stack([inputs.keys[h, layer["index"][h].long()] for h in range(2)])
    )
    assert torch.equal(
        layer["values"], torch.stack([inputs.values[h, layer["index"][h].long()] for h in range(2)])
    )
    assert layer["keys"].is_contiguous()
    assert layer["values"].is_contiguous()


@pytest.mark.parametrize(("method", "pooling", "kernel"), POOLINGS)
def test_scores_equal_the_plain_reference(method: str, pooling: str, kernel: int) -> None:
    inputs = make_inputs(131, 131, 4)
    scorer = plan_for(method, overrides={"pooling": pooling, "kernel_size": kernel}).scorer
    assert scorer is not None
    scores = make_scorer(scorer, rows=100)(inputs)
    expected = torch.tensor(plain_scores(inputs, W, RECENTS, pooling, kernel), dtype=torch.float32)
    torch.testing.assert_close(scores[:, : 131 - RECENTS], expected, atol=1e-5, rtol=1e-4)
    assert torch.isinf(scores[:, 131 - RECENTS :]).all()


def test_snapkv_pools_by_five_where_asked() -> None:
    inputs = make_inputs(97, 97, 2)
    layer = compress_layer(exact_plan("snapkv", 97, 50, kernel_size=5), inputs)
    assert_selection_is_best(layer["index"], plain_scores(inputs, W, RECENTS, "avg", 5), RECENTS, 50)


@pytest.mark.parametrize("new_tokens", [1, 19, W, W + 1, 128])
def test_a_window_of_128_selects_other_rows_only_in_turns_of_more_than_32_new_tokens(new_tokens: int) -> None:
    inputs = make_inputs(300, new_tokens, 4)
    selected = [
        compress_layer(exact_plan("rocketkv", 300, 60, window=window), inputs)["index"] for window in (W, 128)
    ]
    assert torch.equal(*selected) == (new_tokens <= W)


@pytest.mark.parametrize("new_tokens", [1, 2, W - 1, W, W + 1])
def test_the_window_is_no_longer_than_the_new_tokens(new_tokens: int) -> None:
    inputs = make_inputs(101, new_tokens, 4)
    layer = compress_layer(exact_plan("rocketkv", 101, 60), inputs)
    window = min(W, new_tokens)
    scores = plain_scores(inputs, window, RECENTS, "avg", 9)
    assert_selection_is_best(layer["index"], scores, RECENTS, 60)


@pytest.mark.parametrize(("rows", "protected"), [(1, 1), (2, 1), (8, 2), (31, 7), (32, 8), (33, 8)])
def test_the_whole_window_observes_and_at_most_a_quarter_of_the_rows_is_protected(
    rows: int, protected: int
) -> None:
    """Deviation: with the window's 32 rows forced, as in SnapKV, 32 rows and fewer held nothing else."""
    inputs = make_inputs(89, 89, 2)
    layer = compress_layer(exact_plan("snapkv", 89, rows), inputs)
    assert_selection_is_best(layer["index"], plain_scores(inputs, W, protected, "avg", 9), protected, rows)


@pytest.mark.parametrize("method", ["full", "snapkv", "rocketkv"])
@pytest.mark.parametrize("num_tokens", [1, W - 1, W])
def test_a_prompt_within_the_budget_is_kept_whole_without_positions(method: str, num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, num_tokens, 2)
    resolved = resolve_plan(
        plan_for(method), num_prompt_tokens=num_tokens, max_new_tokens=5, num_layers=1, head_dim=D
    )
    layer = compress_layer(resolved, inputs)
    assert "index" not in layer
    assert torch.equal(layer["keys"], inputs.keys)
    assert torch.equal(layer["values"], inputs.values)


def test_a_skipped_layer_is_kept_whole_and_contiguous() -> None:
    inputs = make_inputs(97, 97, 1)
    strided = inputs.keys.transpose(0, 1).contiguous().transpose(0, 1)
    inputs = LayerInputs(
        layer=0, queries=inputs.queries, keys=strided, values=inputs.values, scaling=inputs.scaling
    )
    plan = plan_for("snapkv", budget=Budget(tokens=40), skip_layers=(0,))
    resolved = resolve_plan(plan, num_prompt_tokens=97, max_new_tokens=5, num_layers=2, head_dim=D)
    layer = compress_layer(resolved, inputs)
    assert "index" not in layer
    assert layer["keys"].is_contiguous()
    assert torch.equal(layer["keys"], strided)


@given(
    method=st.sampled_from(["snapkv", "rocketkv"]),
    num_tokens=st.integers(1, 150),
    new_share=st.floats(0, 1),
    budget=st.integers(1, 160),
    max_new_tokens=st.integers(1, 40),
    group=st.sampled_from([1, 4]),
)
def test_selection_is_on_budget_unique_ascending_and_in_range(
    method: str, num_tokens: int, new_share: float, budget: int, max_new_tokens: int, group: int
) -> None:
    new_tokens = max(1, round(num_tokens * new_share))
    inputs = make_inputs(num_tokens, new_tokens, group)
    plan = plan_for(method, budget=Budget(tokens=budget))
    resolved = resolve_plan(
        plan, num_prompt_tokens=num_tokens, max_new_tokens=max_new_tokens, num_layers=1, head_dim=D
    )
    rows = resolved.layers[0].rows
    layer = compress_layer(resolved, inputs)
    assert layer["keys"].shape == layer["values"].shape == (2, rows, D)
    if rows == num_tokens:
        assert "index" not in layer
        return
    for kept in layer["index"].tolist():
        assert kept == sorted(set(kept))
        assert len(kept) == rows
        assert kept[0] >= 0
        assert kept[-1] == num_tokens - 1


@pytest.mark.parametrize("budget", [Budget(tokens=24), Budget(retention=0.3)])
@pytest.mark.parametrize("method", method_names())
def test_shipped_bytes_do_not_depend_on_max_tokens(method: str, budget: Budget) -> None:
    """A server does not know how long an answer will be; clients send 4,096 for a word."""
    inputs = dataclasses.replace(
        make_inputs(300, 300, 2), unrotate=lambda keys: keys, repeated=torch.rand(2, 300)
    )
    plan = plan_for(method, budget=budget if plan_for(method).takes_budget else None)
    spec = make_spec(num_layers=1, num_kv_heads=2, head_dim=D)
    shipped = []
    for max_new_tokens in (1, 128, 4096, 32_768):
        resolved = resolve_plan(
            plan, num_prompt_tokens=300, max_new_tokens=max_new_tokens, num_layers=1, head_dim=D
        )
        _, (tensors,) = compress_prompt(spec, resolved, [inputs])
        shipped.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
    assert shipped == shipped[:1] * 4
