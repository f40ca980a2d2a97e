"""Measured layer budgets: exact totals, bounds, and the selections that each layer makes by itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest import d2o_reference as reference
from kvtest.compression import compress_layer, make_spec
from kvtest.reference.scores import column_sums_reference

from kvferry.shared.cache.arena import measured_limit_bytes, sequence_layout
from kvferry.shared.compression.compress import (
    allocate_rows,
    compress_prompt,
    least_rows,
    measure_layer,
    with_layer_rows,
)
from kvferry.shared.compression.d2o.layer_budgets import layer_budgets
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import (
    MEASURED_ALLOCATIONS,
    Budget,
    CompressionPlan,
    Part,
    ResolvedPlan,
    is_measured,
)
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import ALLOCATIONS, resolve_plan
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest, KvferryError

W, D, HEADS, LAYERS = 32, 8, 2, 5
VARIANCE = Part(name="attention_variance", params={"normalisation": "mean"})
SPEC = make_spec(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=D)


def resolve(plan: CompressionPlan, num_tokens: int, max_new_tokens: int = 5) -> ResolvedPlan:
    return resolve_plan(
        plan, num_prompt_tokens=num_tokens, max_new_tokens=max_new_tokens, num_layers=LAYERS, head_dim=D
    )


def shared_by_variance(method: str, **budget: float) -> CompressionPlan:
    return dataclasses.replace(plan_for(method, budget=Budget(**budget)), layer_allocation=VARIANCE)  # type: ignore[arg-type]


def make_layers(num_tokens: int, group: int, new_tokens: int | None = None) -> list[LayerInputs]:
    generator = torch.Generator().manual_seed(num_tokens * 10 + group)
    return [
        LayerInputs(
            layer=layer,
            # later layers attend more sharply, so that their sums vary more
            queries=torch.randn(HEADS, group, new_tokens or num_tokens, D, generator=generator) * (1 + layer),
            keys=torch.randn(HEADS, num_tokens, D, generator=generator),
            values=torch.randn(HEADS, num_tokens, D, generator=generator),
            scaling=1 / math.sqrt(D),
            unrotate=lambda keys: keys.float(),
        )
        for layer in range(LAYERS)
    ]


def test_measured_allocations_are_allocations() -> None:
    assert set(MEASURED_ALLOCATIONS) < set(ALLOCATIONS)


@pytest.mark.covering(2)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, W - 1, W, W + 1, 97])
@pytest.mark.parametrize("normalisation", ["minmax", "mean"])
def test_d2o_equals_the_paper_layer_by_layer(
    normalisation: Literal["minmax", "mean"], num_tokens: int, group: int
) -> None:
    layers = make_layers(num_tokens, group)
    plan = (
        shared_by_variance("d2o", tokens=11)
        if normalisation == "mean"
        else plan_for("d2o", budget=Budget(tokens=11))
    )
    resolved = resolve(plan, num_tokens)
    measured_plan, kept = compress_prompt(SPEC, resolved, layers)
    if num_tokens <= 11:
        assert (resolved.method, measured_plan) == ("full", resolved)
        assert all(list(layer) == ["keys", "values"] for layer in kept)
        return
    measured = [column_sums_reference(i.queries, i.keys, i.scaling) for i in layers]
    per_head = [v.double() for _, v in measured]
    if normalisation == "minmax":  # the authors' code
        per_head = [(v - v.min()) / (v.max() - v.min()) for v in per_head]
    variances = [float(v.mean()) for v in per_head]
    budgets = layer_budgets(variances, num_tokens=num_tokens, rows=11, normalisation=normalisation)
    rows = [layer.rows for layer in measured_plan.layers]
    assert sum(rows) == LAYERS * 11
    # float32 sums may move a share across a rounding
    assert all(abs(mine - theirs) <= 1 for mine, theirs in zip(rows, budgets, strict=True))
    by_evenness = [rows[layer] for layer in sorted(range(LAYERS), key=lambda layer: variances[layer])]
    assert by_evenness == sorted(rows, reverse=True)
    if (normalisation, group) != ("minmax", 1):  # two heads are 0 and 1 in every layer
        assert max(rows) > min(rows)
    for inputs, (sums, _), layer, size in zip(layers, measured, kept, rows, strict=True):
        assert layer["state"].shape == (HEADS * (size + 1),)
        for h in range(HEADS):
            tokens = reference.kept_tokens(sums[h].tolist(), size)
            if "index" in layer:
                assert layer["index"][h].tolist() == tokens
            keys, values, tau = reference.merge_prompt_head(
                list(inputs.keys[h].double()), list(inputs.values[h].double()), tokens
            )
            torch.testing.assert_close(layer["keys"][h].double(), torch.stack(keys), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(layer["values"][h].double(), torch.stack(values), atol=1e-5, rtol=1e-5)
            scores = layer["state"][h * size : (h + 1) * size]
            torch.testing.assert_close(scores, sums[h, tokens], atol=1e-4, rtol=1e-4)
            assert float(layer["state"][HEADS * size + h]) == pytest.approx(tau, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("new_tokens", [None, 7])
@pytest.mark.parametrize(
    "method", ["d2o", "h2o", "snapkv", "rocketkv", "compactor", "streamingllm", "random"]
)
def test_layers_that_waited_keep_what_they_keep_alone_with_the_same_rows(
    method: str, new_tokens: int | None
) -> None:
    layers = make_layers(151, 2, new_tokens)
    resolved = resolve(shared_by_variance(method, tokens=45), 151)
    measured_plan, kept = compress_prompt(SPEC, resolved, layers)
    assert len({layer.rows for layer in measured_plan.layers}) > 1
    scorer = resolved.plan.scorer
    assert scorer is not None
    mean = make_scorer(scorer, rows=resolved.layers[0].rows)
    for inputs, layer in zip(layers, kept, strict=True):
        # what is protected follows from the mean, which is known when a waiting layer is scored
        scores = None if mean.depends_on_rows else mean(inputs)
        alone = compress_layer(measured_plan, inputs, scores=scores)
        assert list(layer) == list(alone)
        assert layer.keys() - {"index", "state"} == {"keys", "values"}
        for name, mine in layer.items():
            assert torch.equal(mine, alone[name]), name


def test_a_waiting_layer_holds_no_queries() -> None:
    inputs = make_layers(61, 4)[0]
    for method in ("d2o", "snapkv"):
        waiting = measure_layer(resolve(shared_by_variance(method, tokens=20), 61), inputs)
        assert waiting.inputs.queries.untyped_storage().nbytes() == 0
        assert waiting.inputs.unrotate is None
        assert (waiting.scores is None) == (method == "d2o")


@given(
    variances=st.lists(st.floats(0, 1e6), min_size=LAYERS, max_size=LAYERS),
    num_tokens=st.integers(2, 3000),
    budget=st.integers(1, 2999),
    max_new_tokens=st.integers(1, 90),
    method=st.sampled_from(["d2o", "rocketkv-d2o"]),
    skip_layers=st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS - 1),
    returns_generated=st.booleans(),
)
def test_rows_and_bytes_are_never_over_budget(
    variances: list[float],
    num_tokens: int,
    budget: int,
    max_new_tokens: int,
    method: str,
    skip_layers: set[int],
    returns_generated: bool,
) -> None:
    plan = plan_for(method, budget=Budget(tokens=budget), skip_layers=tuple(skip_layers))
    resolved = resolve(plan, num_tokens, max_new_tokens)
    if not is_measured(resolved):
        assert all(layer.rows == num_tokens for layer in resolved.layers)
        return
    measured_plan = allocate_rows(resolved, variances)
    low = least_rows(resolved)
    for layer, (mean, own) in enumerate(zip(resolved.layers, measured_plan.layers, strict=True)):
        if layer in skip_layers:
            assert own == mean
        else:
            assert low <= own.rows <= num_tokens
            assert own.attention == mean.attention
    assert sum(layer.rows for layer in measured_plan.layers) == sum(layer.rows for layer in resolved.layers)
    assert with_layer_rows(resolved, [layer.rows for layer in measured_plan.layers]) == measured_plan
    asked, used = (
        sequence_layout(make_formats(SPEC, plan, returns_generated=returns_generated))
        for plan in (resolved, measured_plan)
    )
    reserved = measured_limit_bytes(asked)
    assert used.size_bytes <= reserved
    # nothing is reserved that no distribution needs, but for alignment, a row and 16 bytes a channel a layer
    assert reserved - asked.size_bytes <= LAYERS * (4 * 2 * 64 + 2 * HEADS * D * (4 + 16))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((20, 20, 20, 20), "4 layers"),
        ((21, 20, 20, 20, 20), "must share 100"),
        ((0, 40, 20, 20, 20), "layer 0 has 0"),
        ((62, 1, 1, 1, 35), "layer 0 has 62 rows; it must have 1 to 61"),
    ],
)
def test_rows_of_another_total_or_out_of_bounds_are_refused(rows: tuple[int, ...], message: str) -> None:
    resolved = resolve(plan_for("d2o", budget=Budget(tokens=20)), 61)
    with pytest.raises(ValueError, match=message):
        with_layer_rows(resolved, rows)


def test_a_skipped_layers_rows_are_not_shared() -> None:
    resolved = resolve(plan_for("d2o", budget=Budget(tokens=20), skip_layers=(0,)), 61)
    measured_plan = allocate_rows(resolved, [5.0, 1.0, 2.0, 3.0, 4.0])
    assert measured_plan.layers[0].rows == 61
    assert sum(layer.rows for layer in measured_plan.layers[1:]) == 4 * 20
    with pytest.raises(ValueError, match="layer 0 has 60 rows; it must have 61 to 61"):
        with_layer_rows(resolved, (60, 20, 20, 20, 20))


def test_attention_that_is_not_finite_is_an_error_by_layer() -> None:
    with pytest.raises(KvferryError, match="layer 1"):
        allocate_rows(resolve(plan_for("d2o", budget=Budget(tokens=20)), 61), [1.0, math.nan, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (shared_by_variance("rdkv", tokens=8), "uniform"),
        (shared_by_variance("quest", tokens=8), "without a scorer|without"),
        (dataclasses.replace(shared_by_variance("snapkv", tokens=8), scorer=Part(name="own")), "'own'"),
        (dataclasses.replace(plan_for("snapkv"), attention=Part(name="merge")), "'accumulated_attention'"),
        (dataclasses.replace(plan_for("d2o"), attention=Part(name="evict")), "'heavy_hitters'"),
        (dataclasses.replace(plan_for("full"), attention=Part(name="evict")), "none"),
        (
            dataclasses.replace(
                plan_for("d2o"),
                layer_allocation=Part(name="attention_variance", params={"normalisation": "most"}),
            ),
            "mean, raw, minmax",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused_by_name(plan: CompressionPlan, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        resolve(plan, 200)
