"""Workers that resolved the same plan agree on its digest, however their mappings are ordered."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.shared.compression.leverage import leverage_scores, solver_on
from kvferry.shared.compression.plan import Part, plan_digest
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan


def test_the_order_of_parameters_changes_no_digest() -> None:
    """A protobuf map has no order, so prefill may get the parameters in another one than decode."""
    resolved = resolve_plan(
        plan_for("rocketkv"), num_prompt_tokens=2000, max_new_tokens=8, num_layers=2, head_dim=64
    )
    scorer = resolved.plan.scorer
    assert scorer is not None
    turned = Part(name=scorer.name, params=dict(reversed(scorer.params.items())))
    assert list(turned.params) != list(scorer.params)
    other = replace(resolved, plan=replace(resolved.plan, scorer=turned))
    assert plan_digest(other) == plan_digest(resolved)
    fewer = replace(resolved, max_new_tokens=9)
    assert plan_digest(fewer) != plan_digest(resolved)


def test_a_plan_names_no_device() -> None:
    """Decode resolves the plan and prefill compresses by it, perhaps on a device of another type."""
    resolved = resolve_plan(
        plan_for("compactor"), num_prompt_tokens=2000, max_new_tokens=8, num_layers=2, head_dim=64
    )
    assert resolved.plan.scorer is not None
    assert resolved.plan.scorer.params["solver"] == "auto"
    keys = torch.randn(1, 200, 64)
    taken = {solver_on(torch.device(name), "auto") for name in ("cpu", "cuda")}
    assert taken == {"svd", "gram"}
    options = {"sketch": "gaussian", "num_columns": 48, "centered": False, "seed": 0}
    scores = [leverage_scores(keys, solver=solver, **options) for solver in taken]
    torch.testing.assert_close(*scores, atol=1e-3, rtol=1e-3)
