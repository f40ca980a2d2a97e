"""A layer by its KV heads: its parts are what ranks compress apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kvtest.compression import compress_layer, formats_for, make_inputs
from kvtest.methods import PRESETS
from torch import Tensor

from kvferry.shared.compression.formats import compresses_heads_apart
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerFormat, Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan

NUM_HEADS, NUM_TOKENS, BUDGET = 4, 157, 41
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PRESETS},
    "rdkv, segments": ("rdkv", {"rebudget_tokens": 20, "window": 7}),
    "snapkv, segments": ("snapkv", {"rebudget_tokens": 20, "window": 7}),
    "kivi, 2 bits": ("kivi", {"bits": 2}),
    "snapkv, wire": ("snapkv", {"wire_bits": 4}),
    "full, wire": ("full", {"wire_bits": 8}),
}
TOGETHER = {"adakv", "random", "d2o", "rocketkv-d2o", "kvzip", "kvzip-rdkv"}
"""Heads share rows, are numbered, layers share what all heads measure, or the prompt is repeated."""


def resolved_for(case: str) -> ResolvedPlan:
    method, overrides = CASES[case]
    budget = Budget(tokens=BUDGET) if PRESETS[method].takes_budget else None
    return resolve_plan(
        plan_for(method, budget=budget, overrides=overrides),
        num_prompt_tokens=NUM_TOKENS,
        max_new_tokens=45,
        num_layers=1,
        head_dim=31,
    )


def of_heads(inputs: LayerInputs, heads: slice) -> LayerInputs:
    return replace(
        inputs, queries=inputs.queries[heads], keys=inputs.keys[heads], values=inputs.values[heads]
    )


def assert_equal(given: Tensors, expected: Tensors) -> None:
    assert list(given) == list(expected)
    for name, tensor in expected.items():
        assert given[name].dtype == tensor.dtype
        torch.testing.assert_close(
            given[name], tensor, rtol=0, atol=1e-5 if tensor.is_floating_point() else 0
        )


def compressed(case: str) -> tuple[LayerFormat, ResolvedPlan, LayerInputs, Tensors]:
    resolved, inputs = resolved_for(case), make_inputs(NUM_TOKENS, num_kv_heads=NUM_HEADS, head_dim=31)
    (fmt,) = formats_for(resolved, inputs)
    return fmt, resolved, inputs, compress_layer(resolved, inputs)


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_heads_compressed_apart_are_the_parts_of_the_layer(case: str, num_parts: int) -> None:
    fmt, resolved, inputs, whole = compressed(case)
    if not compresses_heads_apart(resolved, [fmt]):
        assert case in TOGETHER
        return
    size = NUM_HEADS // num_parts
    parts = [
        compress_layer(resolved, of_heads(inputs, slice(first, first + size)))
        for first in range(0, NUM_HEADS, size)
    ]
    for part, expected in zip(fmt.parts(whole, num_parts), parts, strict=True):
        assert_equal(part, expected)


def test_methods_whose_heads_belong_together_are_known() -> None:
    apart = {case for case in CASES if compresses_heads_apart(resolved_for(case), [compressed(case)[0]])}
    assert CASES.keys() - apart == TOGETHER


def test_tensors_without_heads_are_refused() -> None:
    fmt, _, _, whole = compressed("full")
    wrong: dict[str, Tensor] = {**whole, "keys": whole["keys"][:3]}
    with pytest.raises(InvalidTensors, match=r"keys \[3, 157, 31\] cannot be divided among ranks"):
        fmt.parts(wrong, 2)
