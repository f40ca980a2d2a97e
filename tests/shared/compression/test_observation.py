"""How many queries decide a selection: dropping the others must not change what is kept."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from kvferry.shared.compression.compress import compress_layer
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.observation import num_observed_queries
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import PRESETS, plan_for
from kvferry.shared.compression.resolve import resolve_plan

NUM_TOKENS, DIM = 203, 16
NEED_ALL = ("h2o", "d2o", "rocketkv-d2o", "compactor", "compactor-hsa")


def resolved_for(method: str, budget: Budget | None):
    return resolve_plan(
        plan_for(method, budget=budget),
        num_prompt_tokens=NUM_TOKENS,
        max_new_tokens=9,
        num_layers=3,
        head_dim=DIM,
    )


def tensors(kept: object) -> list[Tensor]:
    """Every tensor in what was kept, in order."""
    if isinstance(kept, Tensor):
        return [kept]
    if isinstance(kept, dict):
        return [found for name in sorted(kept) for found in tensors(kept[name])]
    if isinstance(kept, list | tuple):
        return [found for item in kept for found in tensors(item)]
    if is_dataclass(kept):
        return [found for field in fields(kept) for found in tensors(getattr(kept, field.name))]
    return []


@pytest.mark.parametrize("method", PRESETS)
def test_a_selection_needs_no_more_queries_than_it_says(method: str) -> None:
    resolved = resolved_for(method, Budget(tokens=64) if PRESETS[method].takes_budget else None)
    observed = num_observed_queries(resolved)
    assert (observed is None) == (method in NEED_ALL)
    if observed is None:
        return
    generator = torch.Generator().manual_seed(5)
    inputs = LayerInputs(
        layer=0,
        queries=torch.randn(2, 2, NUM_TOKENS, DIM, generator=generator),
        keys=torch.randn(2, NUM_TOKENS, DIM, generator=generator),
        values=torch.randn(2, NUM_TOKENS, DIM, generator=generator),
        scaling=DIM**-0.5,
    )
    whole = compress_layer(resolved, inputs)
    short = compress_layer(resolved, replace(inputs, queries=inputs.queries[:, :, -observed:]))
    for kept, other in zip(tensors(whole), tensors(short), strict=True):
        assert torch.equal(kept, other)
    assert tensors(whole)


def test_what_keeps_everything_observes_the_last_query_alone() -> None:
    for method in ("h2o", "compactor", "rocketkv"):
        assert num_observed_queries(resolved_for(method, Budget(tokens=NUM_TOKENS))) == 1
