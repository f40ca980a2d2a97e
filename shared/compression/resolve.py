"""Resolves a plan for one prompt: rows per layer and the sizes of decode's attention.

Decode resolves a request's plan once, and the ticket carries it to prefill. All functions are pure and use
integer, rational or decimal arithmetic, so budgets are the same on every platform.

`ALLOCATIONS` are the package's layer allocations by name: how a plan's `layer_allocation` divides the
retained rows among layers. Allocation comes before scoring, so every scorer works with every allocation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import get_args

from kvferry.shared.compression.applicable import check_applicable
from kvferry.shared.compression.attention import check_attention, chooses_rows
from kvferry.shared.compression.d2o.layer_budgets import Normalisation
from kvferry.shared.compression.formats import format_class
from kvferry.shared.compression.formats.compacting import check_generated, with_segments
from kvferry.shared.compression.interface import LayerAllocation, Sizing, installed_parts, with_installed
from kvferry.shared.compression.plan import (
    MEASURED_ALLOCATIONS,
    MODEL_FORMATS,
    RECONSTRUCTION,
    STATE_FORMAT,
    WINDOW_FORMAT,
    CompressionPlan,
    LayerPlan,
    ParamValue,
    Part,
    ResolvedPlan,
    look_up,
    read_params,
)
from kvferry.shared.compression.presets import preset
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import LayerSpec

_DECIMAL = Context(prec=40)
_FLOOR_GUARD = Decimal("1e-20")
"""Added before a floor, so that an exact quotient (c a power of two, r 0.8) is not rounded down by one."""


def resolve_plan(
    plan: CompressionPlan,
    *,
    num_prompt_tokens: int,
    max_new_tokens: int,
    num_layers: int,
    head_dim: int,
    layers: Sequence[LayerSpec] = (),
) -> ResolvedPlan:
    """Compute the exact sizes of a plan for one prompt.

    Args:
        num_prompt_tokens: history included, at least 1.
        max_new_tokens: N, at least 1.
        head_dim: d, of the layers that have no heads of their own.
        layers: as `ModelSpec.layers`. Those with a window or a state are not compressed and share no rows.

    Returns: the plan with one `LayerPlan` per layer. Its method is "full" if no layer is compressed.

    Raises:
        InvalidRequest: an unknown method, scorer, attention, allocation or format, parts that cannot be
            combined or do not go with the layers, or a skipped layer that does not exist.
    """
    if num_prompt_tokens < 1 or max_new_tokens < 1:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_new_tokens}; both must be at "
            "least 1"
        )
    check_plan(plan, num_layers)
    if layers:
        check_applicable(plan, tuple(layers))
    whole = LayerPlan(rows=num_prompt_tokens)
    fmt = format_class(plan.representation)
    uncut = fmt.plan_whole(plan, num_prompt_tokens)
    planned = [whole if layer in plan.skip_layers else uncut for layer in range(num_layers)]
    fixed = {
        layer: _plan_of_model(spec, num_prompt_tokens)
        for layer, spec in enumerate(layers)
        if spec.window or not spec.has_rows
    }
    budget = budget_tokens(plan, num_prompt_tokens) if plan.takes_budget else num_prompt_tokens
    if budget < num_prompt_tokens:
        rows = _mean_rows(plan, budget, num_prompt_tokens)
        sharing = [layer for layer in range(num_layers) if layer not in {*plan.skip_layers, *fixed}]
        shares = allocate_layers(
            plan.layer_allocation, rows=rows, num_layers=len(sharing), num_tokens=num_prompt_tokens
        )
        for layer, share in zip(sharing, shares, strict=True):
            heads = layers[layer].heads if layers else None
            sizing = Sizing(
                layer=layer,
                rows=share,
                budget=budget,
                num_prompt_tokens=num_prompt_tokens,
                max_new_tokens=max_new_tokens,
                head_dim=head_dim if heads is None else heads.head_dim,
                latent_dim=layers[layer].latent_dim if layers else 0,
            )
            planned[layer] = fmt.plan_layer(plan, sizing)
            if plan.generated is not None:
                planned[layer] = with_segments(planned[layer], plan.generated, sizing)
    is_full = all(layer_plan == whole for layer, layer_plan in enumerate(planned) if layer not in fixed)
    return ResolvedPlan(
        plan=plan,
        method="full" if is_full else plan.method,
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=max_new_tokens,
        layers=tuple(fixed.get(layer, layer_plan) for layer, layer_plan in enumerate(planned)),
    )


def _plan_of_model(layer: LayerSpec, num_prompt_tokens: int) -> LayerPlan:
    """Return the plan of a layer with a window or a state, whatever the method."""
    if not layer.window:
        return LayerPlan(rows=1, representation=Part(name=STATE_FORMAT))
    part = Part(name=WINDOW_FORMAT, params={"window": layer.window, "is_chunked": layer.is_chunked})
    return LayerPlan(rows=layer.num_needed(num_prompt_tokens), representation=part)


def check_resolved(
    resolved: ResolvedPlan, *, num_prompt_tokens: int, max_new_tokens: int, num_layers: int
) -> None:
    """Check that a plan that another worker resolved belongs to this request.

    Raises: InvalidRequest: it belongs to another prompt or model, or its rows are out of range.
    """
    for name, given, wanted in (
        ("num_prompt_tokens", resolved.num_prompt_tokens, num_prompt_tokens),
        ("number of layers", len(resolved.layers), num_layers),
    ):
        if given != wanted:
            raise InvalidRequest(
                f"the ticket's plan has {name} {given}; the request has {wanted}", param="ticket.plan"
            )
    if not 1 <= resolved.max_new_tokens <= max_new_tokens:  # decode may have room for fewer
        raise InvalidRequest(
            f"the ticket's plan has max_new_tokens {resolved.max_new_tokens}; 1 to {max_new_tokens} are "
            "allowed",
            param="ticket.plan",
        )
    for layer, layer_plan in enumerate(resolved.layers):
        if not 1 <= layer_plan.rows <= num_prompt_tokens:
            raise InvalidRequest(
                f"the ticket's plan has {layer_plan.rows} rows in layer {layer}; 1 to {num_prompt_tokens} "
                "are allowed",
                param="ticket.plan",
            )
    check_plan(resolved.plan, num_layers)


def why_full(plan: CompressionPlan, *, num_prompt_tokens: int) -> str:
    """Tell a client why a plan whose method in effect is "full" does not compress a prompt."""
    if plan.method == "full":
        return "method full keeps every token"
    if plan.takes_budget and (budget := budget_tokens(plan, num_prompt_tokens)) >= num_prompt_tokens:
        if budget != plan.budget.tokens and plan.budget.retention is not None:
            return f"a retention of {plan.budget.retention:g} keeps every token"
        return f"the budget of {budget} tokens covers the prompt"
    return f"method {plan.method} finds nothing to compress in this prompt and model"


def check_plan(plan: CompressionPlan, num_layers: int) -> None:
    """Check a plan, whatever the prompt.

    Raises: InvalidRequest: a part does not exist, has a wrong parameter or does not go with the others.
    """
    preset(plan.method)
    check_attention(plan.attention, scorer=plan.scorer)
    fmt = format_class(plan.representation)
    if (name := plan.representation.name) in MODEL_FORMATS:
        raise InvalidRequest(
            f"format {name!r} belongs to layers in which the model has a {name}; no method can name it",
            param="kv_compression",
        )
    fmt.check(plan)
    if plan.generated is not None:
        check_generated(plan.generated, plan, fmt)
    if outside := [layer for layer in plan.skip_layers if not 0 <= layer < num_layers]:
        raise InvalidRequest(
            f"skip_layers names {outside}; layers are 0 to {num_layers - 1}", param="kv_compression"
        )
    allocate_layers(plan.layer_allocation, rows=1, num_layers=1, num_tokens=1)
    if plan.repeats_prompt and plan.layer_allocation.name in MEASURED_ALLOCATIONS:
        raise InvalidRequest(
            f"scorer {RECONSTRUCTION!r} does not go with layer_allocation {plan.layer_allocation.name!r}: it "
            "scores layers after the prompt's pass, in which they are measured",
            param="kv_compression",
        )
    if plan.scorer is not None:
        make_scorer(plan.scorer, rows=1)
    elif plan.layer_allocation.name != "uniform":
        raise InvalidRequest(
            f"layer_allocation {plan.layer_allocation.name!r} shares kept rows between layers; a plan "
            "without a scorer keeps them all",
            param="kv_compression",
        )


def _mean_rows(plan: CompressionPlan, budget: int, num_prompt_tokens: int) -> int:
    """Return the prompt's retained rows, as a mean over layers. Decode's attention chooses from them.

    They do not depend on the length of the completion, which a server does not know: new tokens are added to
    what is retained.

    If attention reads every row, the rows are the budget t, or the scorer's protected rows if those are more.
    A sparse attention without a scorer reads t rows' worth of traffic out of all S rows. With a scorer and a
    sparse attention, RocketKV's split divides S/t between the two stages, for any scorer and attention. The
    same split holds for a packed format in place of a scorer; its rows are then a number of bits.
    """
    if plan.scorer is None and plan.representation.name == "rows":
        return num_prompt_tokens
    rows = _first_stage_rows(num_prompt_tokens, budget) if chooses_rows(plan.attention) else budget
    protected = make_scorer(plan.scorer, rows=rows).protected_rows if plan.scorer is not None else 0
    return min(max(rows, protected), num_prompt_tokens)


def budget_tokens(plan: CompressionPlan, num_prompt_tokens: int) -> int:
    """Return t: the plan's budget, else its preset's. A retention is a fraction of the prompt, rounded up."""
    budget = plan.budget
    if budget.tokens is None and budget.retention is None:
        budget = preset(plan.method).budget
    tokens = budget.tokens or 0
    if budget.retention is not None:
        # The shortest decimal that gives this float is what the client wrote: 0.1 means 1/10.
        tokens = max(tokens, math.ceil(Fraction(repr(budget.retention)) * num_prompt_tokens))
    if not tokens:
        raise InvalidRequest(
            f"method {plan.method!r} needs a token_budget or a retention", param="kv_compression"
        )
    return tokens


def _first_stage_rows(num_tokens: int, budget: int) -> int:
    """Compute `floor(S / c^r)`, `c = S/t`, `r = min(0.2 + 0.06 log2 c, 0.8)` (RocketKV section 3.6).

    Args: num_tokens: S, above `budget`, which is t.

    Deviation: nothing is reserved for N new tokens, as in the paper. The authors' code retains at least
    min(2N, S) - N rows, because its benchmark knows N. The paper retains at least the window of queries; here
    the scorer says what is protected.
    """
    log_c = _DECIMAL.ln(_DECIMAL.divide(Decimal(num_tokens), Decimal(budget)))
    log2_c = _DECIMAL.divide(log_c, _DECIMAL.ln(Decimal(2)))
    ratio = min(_DECIMAL.fma(Decimal("0.06"), log2_c, Decimal("0.2")), Decimal("0.8"))
    kept = _DECIMAL.divide(Decimal(num_tokens), _DECIMAL.exp(_DECIMAL.multiply(ratio, log_c)))
    return int(_DECIMAL.add(kept, _FLOOR_GUARD))


def allocate_layers(part: Part, *, rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """Allocate rows to each of `num_layers` layers, `rows` on average.

    Args:
        rows: B, 1 to `num_tokens`.
        num_layers: the number of layers that share rows; skipped layers do not.
        num_tokens: T, the most rows that a layer can retain.

    Returns: `num_layers` numbers of 1 to T; their sum is `rows * num_layers`.

    Raises: InvalidRequest: an unknown name or bad parameters.
    """
    known: Mapping[str, LayerAllocation] = with_installed(
        "allocations", ALLOCATIONS, installed_parts("layer_allocation")
    )
    return look_up("layer_allocation", part.name, known)(part.params, rows, num_layers, num_tokens)


def _uniform(params: Mapping[str, ParamValue], rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """Give every layer the mean."""
    read_params("uniform", params, {})
    return [rows] * num_layers


def _attention_variance(
    params: Mapping[str, ParamValue], rows: int, num_layers: int, num_tokens: int
) -> list[int]:
    """Give every layer the mean, because the prompt has not been run yet; `compress.py` measures it and gives
    each layer its own. D2O (section 4.1) gives more rows to layers that attend evenly.

    Args: params: `normalisation`, see `layer_budgets`.
    """
    read_params("attention_variance", params, {"normalisation": get_args(Normalisation)})
    return [rows] * num_layers


ALLOCATIONS: Mapping[str, LayerAllocation] = {
    "uniform": _uniform,
    "attention_variance": _attention_variance,
}
