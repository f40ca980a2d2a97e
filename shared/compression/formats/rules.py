"""What a plan asks of a format: its parameters, what it goes with, and a layer's sizes under a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvferry.shared.compression.interface import Sizing
from kvferry.shared.compression.plan import (
    MEASURED_ALLOCATIONS,
    Allowed,
    CompressionPlan,
    LayerPlan,
    ParamValue,
    Part,
    read_params,
)
from kvferry.shared.errors import InvalidRequest


class FormatRules:
    """The part of a format that plans are checked and resolved by; routers need no more of it.

    Attributes:
        allowed: the parameters of the part that names the format; see `read_params`.
        defaults: of the parameters that plans may lack. A parameter that is added to a format must have one:
            routers and workers of earlier releases do not know it, so `presets.plan_for` leaves it out where
            it has its default. A default never changes, or releases would take one plan for two.
        attentions, allocations: the decode attentions and layer allocations that it goes with; None: all.
        takes_measured: whether its rows may be known only after the prompt has been run.
        takes_any_softmax: whether it attends to layers with soft-capping or sinks, too.
        takes_latent_rows: whether it stores latent rows (MLA), too.
        scored: whether the plan must have a scorer; None: it may.
        heads_apart: whether groups of heads, compressed separately, make up the layer compressed as a whole.
            Ranks of prefill then compress their heads themselves.
        divides: whether a layer can be divided by its heads (`parts`); decode workers of several ranks need
            that.
        compacts: whether rows of new tokens may be dropped (`compacting.py`); they are then the `new_rows` of
            its `LayerCache` and of its `NaiveLayer`.
    """

    name: ClassVar[str]
    allowed: ClassVar[Allowed] = {}
    defaults: ClassVar[Mapping[str, ParamValue]] = {}
    attentions: ClassVar[tuple[str, ...] | None] = None
    allocations: ClassVar[tuple[str, ...] | None] = None
    takes_measured: ClassVar[bool] = True
    takes_any_softmax: ClassVar[bool] = False
    takes_latent_rows: ClassVar[bool] = False
    scored: ClassVar[bool | None] = None
    divides: ClassVar[bool] = True
    heads_apart: ClassVar[bool] = False
    compacts: ClassVar[bool] = False

    @classmethod
    def params(cls, part: Part) -> dict[str, Any]:
        """Read the parameters of a part that names the format.

        Raises: InvalidRequest: they are not `allowed`.
        """
        return read_params(f"format {part.name!r}", {**cls.defaults, **part.params}, cls.allowed)

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        """Check that the plan's parts can be combined. Raises: InvalidRequest: they cannot."""
        cls.params(plan.representation)
        scorer = "none" if plan.scorer is None else plan.scorer.name
        for what, given, taken in (
            ("attention", plan.attention.name, cls.attentions),
            ("layer_allocation", plan.layer_allocation.name, cls.allocations),
            ("scorer", scorer, ("none",) if cls.scored is False else None),
        ):
            if taken is not None and given not in taken:
                raise InvalidRequest(
                    f"format {plan.representation.name!r} does not go with {what} {given!r}; it takes "
                    f"{' or '.join(map(repr, taken))} only",
                    param="kv_compression",
                )
        if plan.layer_allocation.name in MEASURED_ALLOCATIONS and not cls.takes_measured:
            raise InvalidRequest(
                f"format {plan.representation.name!r} does not go with layer_allocation "
                f"{plan.layer_allocation.name!r}: its rows must be known before the prompt is run",
                param="kv_compression",
            )
        if cls.scored and plan.scorer is None:
            raise InvalidRequest(
                f"format {plan.representation.name!r} does not go without a scorer", param="kv_compression"
            )

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        """Compute a layer's exact sizes under a budget. Raises: InvalidRequest: the budget is too small."""
        return LayerPlan(rows=sizing.rows, representation=plan.representation)

    @classmethod
    def plan_whole(cls, plan: CompressionPlan, num_prompt_tokens: int) -> LayerPlan:
        """Return the plan of a layer that retains every token."""
        return LayerPlan(rows=num_prompt_tokens)
