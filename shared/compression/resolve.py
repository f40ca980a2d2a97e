"""Resolves a plan for one prompt: rows per layer and the sizes of decode's attention.

Decode resolves a request's plan once, and the ticket carries it to prefill. All functions are pure and use
integer or decimal arithmetic, so budgets are the same on every platform.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction

from kvferry.shared.compression.allocation import allocate_layers
from kvferry.shared.compression.attention import check_attention, chooses_rows
from kvferry.shared.compression.formats import format_class
from kvferry.shared.compression.formats.interface import Sizing
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, ResolvedPlan
from kvferry.shared.compression.presets import preset
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest

_DECIMAL = Context(prec=40)
_FLOOR_GUARD = Decimal("1e-20")
"""Added before a floor, so that an exact quotient (c a power of two, r 0.8) is not rounded down by one."""


def resolve_plan(
    plan: CompressionPlan, *, num_prompt_tokens: int, max_new_tokens: int, num_layers: int, head_dim: int
) -> ResolvedPlan:
    """Exact sizes of a plan for one prompt.

    Args:
        num_prompt_tokens: history included, at least 1.
        max_new_tokens: N, at least 1.
        head_dim: d.

    Returns: the plan with one `LayerPlan` per layer. Its method is "full" if no layer is compressed.

    Raises:
        InvalidRequest: an unknown method, scorer, attention, allocation or format, parts that cannot be
            combined, or a skipped layer that does not exist.
    """
    if num_prompt_tokens < 1 or max_new_tokens < 1:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_new_tokens}; both must be at "
            "least 1"
        )
    _check(plan, num_layers)
    whole = LayerPlan(rows=num_prompt_tokens)
    fmt = format_class(plan.representation)
    uncut = fmt.plan_whole(plan, num_prompt_tokens)
    layers = [whole if layer in plan.skip_layers else uncut for layer in range(num_layers)]
    budget = _budget_tokens(plan, num_prompt_tokens) if plan.takes_budget else num_prompt_tokens
    if budget < num_prompt_tokens:
        # A budget that covers the prompt needs no compression, however long the completion is.
        total = num_prompt_tokens + max_new_tokens
        rows, cap = _rows_and_cap(plan, budget, total, max_new_tokens)
        # with dense attention to packed bits, the whole budget is bits, spread over more tokens than rows
        packed_budget = budget if plan.attention.name == "dense" else rows
        sharing = [layer for layer in range(num_layers) if layer not in plan.skip_layers]
        shares = allocate_layers(
            plan.layer_allocation, rows=rows, num_layers=len(sharing), num_tokens=num_prompt_tokens
        )
        for layer, share in zip(sharing, shares, strict=True):
            layers[layer] = fmt.plan_layer(
                plan,
                Sizing(
                    layer=layer,
                    rows=share,
                    cap=cap + share - rows,
                    budget=budget,
                    packed_budget=packed_budget,
                    num_prompt_tokens=num_prompt_tokens,
                    max_new_tokens=max_new_tokens,
                    head_dim=head_dim,
                ),
            )
    return ResolvedPlan(
        plan=plan,
        method="full" if all(layer == whole for layer in layers) else plan.method,
        num_prompt_tokens=num_prompt_tokens,
        max_new_tokens=max_new_tokens,
        layers=tuple(layers),
    )


def check_resolved(
    resolved: ResolvedPlan, *, num_prompt_tokens: int, max_new_tokens: int, num_layers: int
) -> None:
    """Check that a plan that another worker resolved belongs to this request.

    Raises: InvalidRequest: it belongs to another prompt or model, or its rows are out of range.
    """
    expected = {
        "num_prompt_tokens": (resolved.num_prompt_tokens, num_prompt_tokens),
        "max_new_tokens": (resolved.max_new_tokens, max_new_tokens),
        "number of layers": (len(resolved.layers), num_layers),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise InvalidRequest(
                f"the ticket's plan has {name} {given}; the request has {wanted}", param="ticket.plan"
            )
    for layer, its in enumerate(resolved.layers):
        if not 1 <= its.rows <= num_prompt_tokens:
            raise InvalidRequest(
                f"the ticket's plan has {its.rows} rows in layer {layer}; 1 to {num_prompt_tokens} are "
                "allowed",
                param="ticket.plan",
            )
    _check(resolved.plan, num_layers)


def why_full(plan: CompressionPlan, *, num_prompt_tokens: int) -> str:
    """For a client: why a plan whose method in effect is "full" does not compress a prompt."""
    if plan.method == "full":
        return "method full keeps every token"
    if plan.takes_budget and (budget := _budget_tokens(plan, num_prompt_tokens)) >= num_prompt_tokens:
        if plan.budget.retention is not None:
            return f"a retention of {plan.budget.retention:g} keeps every token"
        return f"the budget of {budget} tokens covers the prompt"
    return f"method {plan.method} finds nothing to compress in this prompt and model"


def _check(plan: CompressionPlan, num_layers: int) -> None:
    """Check that the plan's parts exist and can be combined."""
    preset(plan.method)
    check_attention(plan.attention, scorer=plan.scorer)
    format_class(plan.representation).check(plan)
    outside = [layer for layer in plan.skip_layers if not 0 <= layer < num_layers]
    if outside:
        raise InvalidRequest(
            f"skip_layers names {outside}; layers are 0 to {num_layers - 1}", param="kv_compression"
        )
    allocate_layers(plan.layer_allocation, rows=1, num_layers=1, num_tokens=1)
    if plan.scorer is not None:
        make_scorer(plan.scorer, rows=1)
    elif plan.layer_allocation.name != "uniform":
        raise InvalidRequest(
            f"layer_allocation {plan.layer_allocation.name!r} shares kept rows between layers; a plan "
            "without a scorer keeps them all",
            param="kv_compression",
        )


def _rows_and_cap(plan: CompressionPlan, budget: int, total: int, max_new_tokens: int) -> tuple[int, int]:
    """The prompt's retained rows, as a mean over layers, and cap: the most rows that decode chooses from.

    If attention reads every row, the rows are the budget t, or the rows that the scorer always selects if
    those are more. A sparse attention without a scorer reads t rows' worth of traffic out of all
    S = prompt + N rows. With a scorer and a sparse attention, RocketKV's split divides S/t between the two
    stages, for any scorer and attention. The same split holds for a packed format in place of a scorer; its
    rows are then a number of bits.
    """
    num_prompt_tokens = total - max_new_tokens
    if plan.scorer is None and plan.representation.name == "rows":
        return num_prompt_tokens, total
    always = _always_kept(plan.scorer) if plan.scorer is not None else 1
    if not chooses_rows(plan.attention):
        rows = min(max(budget, always), num_prompt_tokens)
        return rows, rows + max_new_tokens
    cap = _first_stage_cap(total, budget, max_new_tokens)
    window = plan.scorer.params.get("window") if plan.scorer is not None else None
    least = max(window if isinstance(window, int) else 1, always)
    return min(max(cap - max_new_tokens, least), num_prompt_tokens), cap


def _always_kept(scorer: Part) -> int:
    """Rows that a scorer selects under any budget: sinks and recents, if it has both."""
    sinks, recents = scorer.params.get("sinks"), scorer.params.get("recents")
    return sinks + recents if isinstance(sinks, int) and isinstance(recents, int) else 0


def _budget_tokens(plan: CompressionPlan, num_prompt_tokens: int) -> int:
    """t: the plan's budget, else its preset's. A retention is a fraction of the prompt, rounded up."""
    budget = plan.budget
    if budget.retention is not None:
        # The shortest decimal that gives this float is what the client wrote: 0.1 means 1/10.
        return max(1, math.ceil(Fraction(repr(budget.retention)) * num_prompt_tokens))
    tokens = budget.tokens if budget.tokens is not None else preset(plan.method).budget.tokens
    if tokens is None:
        raise InvalidRequest(
            f"method {plan.method!r} needs a token_budget or a retention", param="kv_compression"
        )
    return tokens


def _first_stage_cap(total: int, budget: int, max_new_tokens: int) -> int:
    """RocketKV section 3.6: `cap = max(floor(S / c^r), min(2N, S))`, `c = S/t`,
    `r = min(0.2 + 0.06 log2 c, 0.8)`.

    Args: total: S = prompt + N, above `budget`, which is t.

    Deviation: the paper reserves nothing for the N new tokens. As in the authors' code, cap covers them and
    is at least min(2N, S), so the prompt retains cap - N rows.
    """
    log_c = _DECIMAL.ln(_DECIMAL.divide(Decimal(total), Decimal(budget)))
    log2_c = _DECIMAL.divide(log_c, _DECIMAL.ln(Decimal(2)))
    ratio = min(_DECIMAL.fma(Decimal("0.06"), log2_c, Decimal("0.2")), Decimal("0.8"))
    kept = _DECIMAL.divide(Decimal(total), _DECIMAL.exp(_DECIMAL.multiply(ratio, log_c)))
    return max(int(_DECIMAL.add(kept, _FLOOR_GUARD)), min(2 * max_new_tokens, total))
