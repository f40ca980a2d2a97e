"""Budgets come to the same bytes for every method, never to more, and the bytes are those really held."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvtest.methods import PRESETS

from kvferry.shared.compression.attention import EVICTIONS, Hsa, make_attention
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import Budget, CompressionPlan, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.tools.evaluation.budgets import (
    kept_bytes,
    parse_target,
    plan_for_target,
    read_bytes,
)
from kvferry.tools.oracle import OneProcessGenerator
from kvferry.tools.recall.tasks import TASKS

SPEC = ModelSpec(
    name="m",
    fingerprint="f",
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=100,
    max_model_len=8192,
    dtype="float16",
    eos_token_ids=(1,),
)
BUDGETED = [name for name, plan in PRESETS.items() if plan.takes_budget]


def resolve(plan: CompressionPlan, num_tokens: int, *, spec: ModelSpec = SPEC) -> ResolvedPlan:
    return resolve_plan(
        plan,
        num_prompt_tokens=num_tokens,
        max_new_tokens=16,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
    )


@pytest.mark.parametrize(
    ("text", "num_bytes", "label"),
    [
        ("10%", 153, "10%"),
        ("0.1", 153, "10%"),
        ("2.5%", 38, "2.5%"),
        ("1.0", 1536, "100%"),
        ("7t", 7 * 1536, "7t"),
        ("65536B", 65536, "65536B"),
        ("64KiB", 65536, "65536B"),
    ],
)
def test_budgets_read_as_shares_tokens_or_bytes(text: str, num_bytes: int, label: str) -> None:
    target = parse_target(text)
    assert (target.size_bytes(SPEC, 1), target.label) == (num_bytes, label)


@pytest.mark.parametrize("text", ["", "10", "0%", "101%", "1.5", "0t", "1.5t", "0.1B", "12kb", "-5%", "x"])
def test_other_budgets_are_refused_with_the_forms_allowed(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--budgets has '.*'; .*(tokens|whole number)"):
        parse_target(text)


@pytest.mark.parametrize("match", ["kept", "read"])
@pytest.mark.parametrize("method", BUDGETED)
@settings(max_examples=15)
@given(num_tokens=st.integers(1, 3000), share=st.floats(0.02, 1.0))
@example(num_tokens=300, share=0.296875)  # rdkv-hsa: pages of 2 read less than those of 3 before
def test_matched_plans_stay_within_the_target_and_one_more_token_does_not(
    method: str, match: str, num_tokens: int, share: float
) -> None:
    size = {"kept": kept_bytes, "read": read_bytes}[match]
    target = parse_target(f"{100 * share:.2f}%")
    size_bytes = target.size_bytes(SPEC, num_tokens)
    plan = plan_for_target(
        plan_for(method), target, match=match, spec=SPEC, num_tokens=num_tokens, max_new_tokens=16
    )
    if plan is None:
        least = replace(plan_for(method), budget=Budget(tokens=1))
        assert size(SPEC, resolve(least, num_tokens)) > size_bytes
        return
    assert size(SPEC, resolve(plan, num_tokens)) <= size_bytes
    assert plan.budget.tokens is not None
    if plan.budget.tokens < num_tokens:
        larger = resolve(replace(plan, budget=Budget(tokens=plan.budget.tokens + 1)), num_tokens)
        if page_sizes(larger) == page_sizes(resolve(plan, num_tokens)):  # pages of one token store nothing
            assert size(SPEC, larger) > size_bytes


def page_sizes(resolved: ResolvedPlan) -> list[object]:
    return [layer.attention.params.get("page_size") for layer in resolved.layers]


def test_given_budgets_are_left_as_they_are() -> None:
    plan = plan_for_target(
        plan_for("rocketkv"), parse_target("64t"), match="given", spec=SPEC, num_tokens=500, max_new_tokens=16
    )
    assert plan == plan_for("rocketkv", budget=Budget(tokens=64))
    own = plan_for_target(
        plan_for("rdkv"), parse_target("own"), match="given", spec=SPEC, num_tokens=500, max_new_tokens=16
    )
    assert own == plan_for("rdkv")


@pytest.mark.parametrize("method", PRESETS)
def test_kept_bytes_are_those_of_the_tensors_held(model: TransformersModel, method: str) -> None:
    generator = OneProcessGenerator(model)
    captured = generator.capture(TASKS["single_needle"].example(num_tokens=300, seed=1).prompt_token_ids)
    plan = plan_for(method)
    if plan.takes_budget:
        plan = replace(plan, budget=Budget(tokens=60))
    continuation = generator.compress(captured, plan=plan, max_new_tokens=16)
    held, spec = 0, model.spec
    for layer, tensors in zip(continuation.resolved.layers, continuation.compressed, strict=True):
        # a packed layer's counts are not stored; what evicts keeps its scores as they travel
        held += sum(tensor.nbytes for name, tensor in tensors.items() if name != "layout")
        if "index" in tensors:
            assert tensors["index"].dtype is (torch.uint8 if "layout" in tensors else torch.int32)
        if layer.attention.name in EVICTIONS:
            if "index" not in tensors:
                held += spec.num_kv_heads * layer.rows * 4  # positions, which eviction needs in any case
            continue
        shape = make_formats(spec, continuation.resolved)[0].shape
        packed = layer.representation.name in ("rdkv", "packed")
        specs = make_attention(layer.attention).specs(shape, layer.rows, packed=packed)
        held += sum(tensor_spec.size_bytes for tensor_spec in specs)
    kept = kept_bytes(model.spec, continuation.resolved)
    if plan.representation.name == "rows":
        assert kept == held
    else:  # what a packed layer comes to is known once it is packed; before that, its bound
        assert 0.7 * kept < held <= kept
    if method == "full":
        assert held == len(captured.token_ids) * model.spec.kv_token_bytes


def test_a_dense_method_reads_what_it_keeps_and_rocketkv_less() -> None:
    snapkv = resolve(plan_for("snapkv", budget=Budget(tokens=100)), 1000)
    assert read_bytes(SPEC, snapkv) == 100 * SPEC.kv_token_bytes
    rocketkv = resolve(plan_for("rocketkv", budget=Budget(tokens=100)), 1000)
    # section 3.6: half of t reads estimates, half reads K and V
    assert 90 * SPEC.kv_token_bytes <= read_bytes(SPEC, rocketkv) <= 101 * SPEC.kv_token_bytes


def test_sparse_attention_over_packed_rows_reads_its_estimates_and_the_chosen_share() -> None:
    resolved = resolve(plan_for("rdkv-hsa", budget=Budget(tokens=100)), 1000)
    packed = [60_000] * len(resolved.layers)
    expected = 0
    for layer in resolved.layers:
        sizes = make_attention(layer.attention)
        assert isinstance(sizes, Hsa)
        assert sizes.num_tokens < layer.rows
        pages = -(-layer.rows // sizes.page_size)
        # one byte a page, and each channel's step as a float32
        expected += SPEC.num_kv_heads * sizes.num_channels * (pages + 4)
        expected += int(Fraction(60_000 * sizes.num_tokens, layer.rows))
    assert read_bytes(SPEC, resolved, packed) == expected < sum(packed)
    rdkv = resolve(plan_for("rdkv", budget=Budget(tokens=100)), 1000)
    assert read_bytes(SPEC, rdkv, packed) == sum(packed)
