"""Workers that resolved the same plan agree on its digest, however their mappings are ordered."""

from __future__ import annotations

from dataclasses import replace

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
