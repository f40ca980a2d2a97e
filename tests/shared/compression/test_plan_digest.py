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


def test_releases_agree_on_a_plans_digest() -> None:
    """A field that is added must be left out of it at its default: the release before lacks the field."""
    plan = plan_for("rdkv")
    resolved = resolve_plan(plan, num_prompt_tokens=2000, max_new_tokens=8, num_layers=2, head_dim=64)
    assert plan_digest(resolved) == "b560feac3b9d4ec5de9beb17bce4a390"
