"""RDKV's format: what a plan of it resolves to, what it is refused with, and the bound on bytes."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import compress_layer, formats_for, packed_tensors

from kvferry.kernels.packed.packing import pack_layer
from kvferry.models import DEMO_MODEL
from kvferry.shared.compression.formats.rdkv import Rdkv, rdkv_settings
from kvferry.shared.compression.formats.rows import Rows
from kvferry.shared.compression.interface import LayerInputs, LayerShape
from kvferry.shared.compression.plan import Budget, LayerPlan, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.compression.rdkv.allocation import allocate
from kvferry.shared.compression.rdkv.compress import (
    allocate_layer,
    channel_weights,
    compress_layer_rdkv,
    joint_weights,
    score_weights,
    token_weights,
)
from kvferry.shared.compression.rdkv.epsilon import find_table
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.shared.model.checkpoint import model_fingerprint

KIVI = Part(name="kivi", params={"bits": 4})
THINK = Part(name="think", params={"channel_retention": 0.5, "window": 32})
RAGGED = Part(name="ragged", params={"floor": 0.2})
RANDOM = Part(name="random", params={"seed": 0})


def resolve(budget: Budget, prompt: int, *, head_dim: int = 8, **changes: Any) -> ResolvedPlan:
    return resolve_plan(
        plan_for("rdkv", budget=budget, **changes),
        num_prompt_tokens=prompt,
        max_new_tokens=5,
        num_layers=2,
        head_dim=head_dim,
    )


def make_inputs(num_tokens: int, num_new: int, head_dim: int, seed: int) -> LayerInputs:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, num_tokens, head_dim, generator=generator)
    return LayerInputs(
        layer=0,
        queries=4 * torch.randn(2, 3, num_new, head_dim, generator=generator),
        keys=keys,
        values=torch.randn(2, num_tokens, head_dim, generator=generator),
        scaling=head_dim**-0.5,
    )


@pytest.mark.parametrize(
    ("budget", "prompt", "budget_tokens", "rows"),
    [
        (Budget(tokens=256), 9000, 256, 2048),
        (Budget(tokens=256), 257, 256, 257),
        (Budget(retention=0.1), 1001, 101, 808),
        (Budget(retention=1e-9), 1001, 1, 8),
    ],
)
def test_a_layer_has_its_budget_in_tokens_and_the_most_tokens_that_it_can_keep(
    budget: Budget, prompt: int, budget_tokens: int, rows: int
) -> None:
    resolved = resolve(budget, prompt)
    packed = LayerPlan(rows=rows, representation=Part(name="rdkv", params={"budget_tokens": budget_tokens}))
    assert (resolved.method, resolved.layers) == ("rdkv", (packed, packed))


def test_a_budget_that_covers_the_prompt_is_full_and_has_no_packed_layer() -> None:
    resolved = resolve(Budget(tokens=100), 100)
    assert (resolved.method, resolved.layers) == ("full", (LayerPlan(rows=100),) * 2)
    assert not any(isinstance(fmt, Rdkv) for fmt in formats_for(resolved, make_inputs(9, 9, 8, seed=0)))


def test_skipped_layers_stay_rows() -> None:
    resolved = resolve(Budget(tokens=10), 100, skip_layers=(1,))
    assert resolved.layers[1] == LayerPlan(rows=100)
    first, second = formats_for(resolved, make_inputs(9, 9, 8, seed=0))
    assert isinstance(first, Rdkv)
    assert first.limit_bytes > 0
    assert isinstance(second, Rows)
    assert second.is_plain


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"attention": Part(name="hsa")}, "rebudget_tokens 256.*attention 'hsa'"),
        ({"attention": Part(name="quest")}, "attention 'quest'.*'dense' or 'hsa'"),
        ({"scorer": Part(name="random", params={"seed": 0})}, "scorer 'random'"),
        (
            {"layer_allocation": Part(name="pyramid", params={"window": 32, "beta": 20})},
            "layer_allocation 'pyramid'",
        ),
        ({"representation": Part(name="nosuch")}, "nosuch.*rows, rdkv"),
        ({"representation": Part(name="rows", params={"window": 1})}, "wire_bits"),
        ({"representation": Part(name="rdkv")}, "epsilon_table"),
        ({"representation": Part(name="rows", params={"wire_bits": 3})}, "wire_bits is 3.*2, 4, 8, 16"),
        ({"representation": Part(name="kivi", params={"bits": 3})}, "bits is 3.*2, 4, 8"),
        ({"representation": Part(name="kivi", params={"bits": 8.0})}, "bits \\(int\\)"),
        ({"representation": KIVI}, "takes no budget"),
        ({"representation": KIVI, "attention": Part(name="hsa")}, "'kivi' does not go with attention 'hsa'"),
        ({"representation": THINK, "attention": Part(name="quest")}, "'think' does not go with .*'quest'"),
        (
            {"representation": Part(name="think", params={"channel_retention": 0.0, "window": 3})},
            "0.001 to 1",
        ),
        (
            {"representation": Part(name="think", params={"channel_retention": 0.5, "window": 0})},
            "window is 0",
        ),
        ({"representation": RAGGED}, "'ragged' does not go without a scorer"),
        (
            {
                "representation": RAGGED,
                "scorer": RANDOM,
                "layer_allocation": preset("d2o").layer_allocation,
            },
            "'ragged' does not go with layer_allocation 'attention_variance'",
        ),
        (
            {"representation": RAGGED, "scorer": RANDOM, "attention": Part(name="sparq")},
            "'ragged' does not go with attention 'sparq'",
        ),
        ({"representation": Part(name="ragged", params={"floor": 1.5}), "scorer": RANDOM}, "floor is 1.5"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(part: dict[str, Part], named: str) -> None:
    plan = dataclasses.replace(plan_for("rdkv"), **part)
    with pytest.raises(InvalidRequest, match=named):
        resolve_plan(plan, num_prompt_tokens=9, max_new_tokens=1, num_layers=2, head_dim=8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon_table", "nosuch"),
        ("window", 0),
        ("window", 1025),
        ("kernel_size", 4),
        ("kernel_size", 257),
        ("channel_weights", "nosuch"),
        ("window", "32"),
        ("widths", "0"),
        ("widths", ""),
        ("widths", "0,3"),
        ("widths", "0,4,4"),
        ("rebudget_tokens", -1),
        ("rebudget_tokens", 2**20 + 1),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: int | str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        resolve(Budget(tokens=4), 9, overrides={name: value})


@pytest.mark.parametrize(
    ("widths", "head_dim", "least"),
    [
        # V's headers are 32 / 8 bits a value
        *(("2,4,8,16", 8, 38), ("4,16", 8, 50), ("16", 8, 100), ("8", 8, 75)),
        # V's a quarter of a bit, K's half a bit
        ("2,4,8,16", 128, 16),
    ],
)
def test_a_budget_below_the_least_width_of_every_token_is_refused(
    widths: str, head_dim: int, least: int
) -> None:
    with pytest.raises(InvalidRequest, match=f"a budget of {least} tokens.*not {least - 1}"):
        resolve(Budget(tokens=least - 1), 100, head_dim=head_dim, overrides={"widths": widths})
    if least < 100:
        resolved = resolve(Budget(tokens=least), 100, head_dim=head_dim, overrides={"widths": widths})
        assert resolved.method == "rdkv"


def coded(widths: torch.Tensor) -> torch.Tensor:
    """Whether units of these widths have headers."""
    return (widths > 0) & (widths < 16)


@pytest.mark.parametrize("widths", ["2,4,8,16", "0,16", "0,4,16", "0,2,4,8,16", "16, 0"])
def test_a_layer_has_the_widths_that_it_may_have_and_keeps_its_budget(widths: str) -> None:
    inputs = make_inputs(90, 90, 8, seed=3)
    part = plan_for("rdkv", overrides={"widths": widths}).representation
    budget = 40
    chosen = rdkv_settings(part, budget_tokens=budget)
    allocation = allocate_layer(chosen, inputs)
    allowed = {int(width) for width in widths.split(",")}
    values, keys = allocation.values.long(), allocation.keys.long()
    num_kept = (values > 0).sum(dim=1)
    assert set(values.flatten().tolist()) <= allowed
    assert set(keys.flatten().tolist()) <= allowed
    # a header of 32 bits for 8 values of V, and for 64 of K
    assert ((values * 8 + 32 * coded(values)).sum(dim=1) <= 16 * budget * 8).all()
    assert (((keys + coded(keys) / 2) * num_kept[:, None]).sum(dim=1) <= 16 * budget * 8).all()
    assert (num_kept == 90).all() or not widths.startswith("2")
    solution = resolve(Budget(tokens=budget), 90, overrides={"widths": widths})
    fmt = formats_for(solution, inputs)[0]
    assert isinstance(fmt, Rdkv)
    assert compress_layer_rdkv(chosen, inputs).layout.size_bytes <= fmt.limit_bytes


def test_parameters_can_be_chosen() -> None:
    plan = plan_for(
        "rdkv", overrides={"window": 8, "channel_weights": "mean_squares", "epsilon_table": "Qwen3-4B"}
    )
    chosen = rdkv_settings(plan.representation, budget_tokens=3)
    assert (chosen.window, chosen.channel_weights, chosen.budget_tokens) == (8, "mean_squares", 3)
    assert chosen.table.keys == (0.347, 0.0147, 1.5e-4)


@given(
    num_tokens=st.integers(2, 180),
    share=st.floats(0.001, 0.99),
    new=st.floats(0.001, 1.0),
    head_dim=st.integers(1, 17),
    seed=st.integers(0, 1000),
)
def test_a_packed_layer_never_exceeds_what_was_admitted(
    num_tokens: int, share: float, new: float, head_dim: int, seed: int
) -> None:
    resolved = resolve(Budget(retention=share), num_tokens, head_dim=head_dim)
    if resolved.method == "full":
        return
    inputs = make_inputs(num_tokens, max(1, int(new * num_tokens)), head_dim, seed)
    fmt = formats_for(resolved, inputs)[0]
    assert isinstance(fmt, Rdkv)
    tensors = compress_layer(resolved, inputs)
    assert fmt.prompt_bytes(tensors) <= fmt.limit_bytes
    kept = fmt.positions_by_head(tensors)
    assert max(len(positions) for positions in kept if positions is not None) <= resolved.layers[0].rows


def test_a_layer_is_packed_with_the_plans_parameters() -> None:
    inputs = make_inputs(90, 90, 8, seed=1)
    layer = compress_layer(resolve(Budget(tokens=9), 90, overrides={"window": 4}), inputs)
    assert list(layer) == ["layout", "codes", "scales", "rows", "index"]
    part = plan_for("rdkv", overrides={"window": 4}).representation
    expected = compress_layer_rdkv(rdkv_settings(part, budget_tokens=9), inputs)
    sent = {name: tensor for name, tensor in layer.items() if name != "layout"}
    assert torch.equal(torch.cat(list(sent.values())), expected.buffer)
    assert all(torch.equal(tensor, layer[name]) for name, tensor in packed_tensors(expected).items())


def test_values_that_cannot_be_packed_fail_by_name() -> None:
    inputs = make_inputs(40, 40, 8, seed=2)
    inputs.values[1] = torch.nan
    with pytest.raises(KvferryError, match="finite") as caught:
        compress_layer(resolve(Budget(tokens=9), 40), inputs)
    assert caught.value.reason == "packing"


def test_selecting_from_packed_tokens_splits_the_budget_as_rocketkv_and_reads_as_much() -> None:
    sizes: dict[str, Any] = {
        "num_prompt_tokens": 16384, "max_new_tokens": 64, "num_layers": 1, "head_dim": 128,
    }  # fmt: skip
    (packed,) = resolve_plan(plan_for("rdkv-hsa", budget=Budget(tokens=256)), **sizes).layers
    (rows,) = resolve_plan(plan_for("rocketkv", budget=Budget(tokens=256)), **sizes).layers
    # as many bits as RocketKV keeps rows, over up to eight times as many tokens
    assert packed.representation.params == {"budget_tokens": rows.rows}
    assert packed.rows == 8 * rows.rows
    assert rows.attention.params["num_tokens"] == 128
    # t/2 rows of 16 bits are as many bytes as four times as many tokens of 4
    assert packed.attention.params["num_tokens"] == 512
    page_size, num_channels = (int(packed.attention.params[n]) for n in ("page_size", "num_channels"))
    # ceil(sqrt(12760 / 256)); floor(128 * 8 * 256 / 12760) of 16 bits, twice as many of 8
    assert (page_size, num_channels) == (8, 40)
    assert packed.rows // page_size * num_channels <= 2 * 128 * 256  # t/2 rows of K and V, in bytes


@pytest.mark.parametrize("budget", [16, 32, 64, 100])
@pytest.mark.parametrize("num_tokens", [1024, 4096])
def test_pages_of_packed_tokens_are_smaller_than_what_is_attended(budget: int, num_tokens: int) -> None:
    """Pages spread over packed tokens as if these were rows once had 18 tokens where 16 were attended."""
    plan = plan_for("rdkv-hsa", budget=Budget(tokens=budget))
    resolved = resolve_plan(plan, num_prompt_tokens=num_tokens, max_new_tokens=64, num_layers=1, head_dim=64)
    sizes = resolved.layers[0].attention.params
    assert 2 * int(sizes["page_size"]) <= int(sizes["num_tokens"])
    assert int(sizes["num_channels"]) >= 2
    if (budget, num_tokens) == (32, 1024):
        assert sizes == {"page_size": 6, "num_channels": 24, "num_tokens": 64}


@pytest.mark.parametrize("budget", [1, 50, 90, 99])
def test_selecting_from_packed_tokens_packs_whatever_the_budget_does_not_cover(budget: int) -> None:
    plan = plan_for("rdkv-hsa", budget=Budget(tokens=budget))
    resolved = resolve_plan(plan, num_prompt_tokens=100, max_new_tokens=100, num_layers=1, head_dim=8)
    assert resolved.method == "rdkv-hsa"
    (layer,) = resolved.layers
    assert layer.representation.name == "rdkv"
    assert layer.attention.name == "hsa"
    assert budget <= int(layer.representation.params["budget_tokens"]) < 100


def test_bits_are_weighed_by_the_served_models_own_table() -> None:
    shape = LayerShape(
        num_prompt_tokens=90,
        max_new_tokens=1,
        num_kv_heads=2,
        group_size=2,
        head_dim=8,
        dtype=torch.float32,
        fingerprint=model_fingerprint(DEMO_MODEL, dtype="float32"),
    )
    resolved = resolve(Budget(tokens=20), 90)
    for fingerprint, own in ((shape.fingerprint, True), ("another model", False)):
        fmt = Rdkv.of(resolved.plan, resolved.layers[0], replace(shape, fingerprint=fingerprint))
        assert (fingerprint in fmt.settings.table.fingerprints) == own
        assert (fmt.settings.table == find_table("LLaMA-3.1-8B")) != own


@pytest.mark.parametrize("method", ["compactor-rdkv", "rdkv-union", "kvzip-rdkv", "keydiff-rdkv"])
@pytest.mark.parametrize(("num_tokens", "budget"), [(97, 6), (97, 60), (11, 1), (700, 9)])
def test_a_scorers_scores_weigh_the_tokens(num_tokens: int, budget: int, method: str) -> None:
    """Also where every token may have bits, and `rows` is the whole prompt."""
    plan = plan_for(method, budget=Budget(tokens=budget), overrides={"rebudget_tokens": 0})
    resolved = resolve_plan(plan, num_prompt_tokens=num_tokens, max_new_tokens=5, num_layers=2, head_dim=8)
    inputs = replace(
        make_inputs(num_tokens, num_tokens, 8, seed=budget),
        unrotate=lambda keys: keys.float(),
        repeated=torch.rand(2, num_tokens),
    )
    (fmt, _) = formats_for(resolved, inputs)
    assert isinstance(fmt, Rdkv)
    assert plan.scorer is not None
    scores = make_scorer(plan.scorer, rows=fmt.rows)(inputs)
    queries, size = inputs.queries[:, :, -fmt.settings.window :], fmt.settings.kernel_size
    attention = token_weights(queries, inputs.keys, scaling=inputs.scaling, kernel_size=size)
    allocated = allocate(
        joint_weights(attention, scores) if method == "rdkv-union" else score_weights(scores),
        channel_weights(queries, inputs.keys),
        budget_tokens=budget,
        table=fmt.settings.table,
    )
    expected = pack_layer(inputs.keys, inputs.values, allocated.keys, allocated.values)
    tensors = compress_layer(resolved, inputs)
    assert [sorted(positions.tolist()) for positions in fmt.positions_by_head(tensors)] == [
        bits.nonzero()[:, 0].tolist() for bits in allocated.values
    ]
    assert torch.equal(fmt.packed(tensors).buffer, expected.buffer)


def test_other_scorers_are_refused() -> None:
    plan = dataclasses.replace(plan_for("rdkv", budget=Budget(tokens=9)), scorer=RANDOM)
    with pytest.raises(InvalidRequest, match="does not go with scorer 'random'; it takes 'compactor'"):
        resolve_plan(plan, num_prompt_tokens=90, max_new_tokens=5, num_layers=2, head_dim=8)


def test_attention_beside_scores_needs_a_scorer() -> None:
    part = Part(name="rdkv", params={**plan_for("rdkv").representation.params, "with_attention": True})
    plan = dataclasses.replace(plan_for("rdkv", budget=Budget(tokens=9)), representation=part)
    with pytest.raises(InvalidRequest, match="with_attention of format 'rdkv' is True; it must be False"):
        resolve_plan(plan, num_prompt_tokens=90, max_new_tokens=5, num_layers=2, head_dim=8)


@pytest.mark.parametrize("method", ["rdkv", "rdkv-hsa", "compactor-rdkv"])
def test_plans_have_no_parameter_that_workers_of_the_release_before_refuse(method: str) -> None:
    later = {"with_attention", "draft_tokens", "draft_kernel_size"}
    assert not later & plan_for(method).representation.params.keys()
