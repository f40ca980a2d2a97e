"""Layer budgets that only a prompt's own attention can tell, from measuring it to rows per layer.

    admission  every side: resolved plan with mean rows; the total and the bounds are known
    prefill    layer by layer: measure_layer ──all──► allocate_rows ──► rows per layer ──► compress, ship
    decode     the manifest's rows ──► with_layer_rows: total and bounds checked ──► layout

These plans alone hold K and V of every layer until the pass over the prompt ends; others hold one or two
layers. Queries are not held: what a scorer wants of them it computes when the layer passes. Compresses and
ships nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvferry.shared.compression.allocation import MEASURED_ALLOCATIONS
from kvferry.shared.compression.allocation.attention_variance import variance_normalisation
from kvferry.shared.compression.d2o.layer_budgets import attention_variance, layer_budgets
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.scorers import make_scorer


def is_measured(resolved: ResolvedPlan) -> bool:
    """Whether the plan needs statistics of every layer before the first can be compressed."""
    return resolved.plan.layer_allocation.name in MEASURED_ALLOCATIONS and any(
        resolved.layers[layer].rows < resolved.num_prompt_tokens for layer in _sharing(resolved)
    )


def with_layer_rows(resolved: ResolvedPlan, layer_rows: Sequence[int]) -> ResolvedPlan:
    """The plan with measured rows in place of their mean; its attention sizes stay those of the mean.

    Raises: ValueError: rows that `allocate_rows` does not come to: another total, or a layer out of bounds.
    """
    sharing = _sharing(resolved)
    if len(layer_rows) != len(resolved.layers):
        raise ValueError(f"rows are of {len(layer_rows)} layers; the plan has {len(resolved.layers)}")
    total = sum(resolved.layers[layer].rows for layer in sharing)
    if sum(layer_rows[layer] for layer in sharing) != total:
        raise ValueError(f"rows are {tuple(layer_rows)}; layers {sharing} must share {total}")
    low, high = least_rows(resolved), resolved.num_prompt_tokens
    for layer, rows in enumerate(layer_rows):
        bounds = (low, high) if layer in sharing else (resolved.layers[layer].rows,) * 2
        if not bounds[0] <= rows <= bounds[1]:
            raise ValueError(f"layer {layer} has {rows} rows; it must have {bounds[0]} to {bounds[1]}")
    layers = zip(resolved.layers, layer_rows, strict=True)
    return replace(resolved, layers=tuple(replace(layer, rows=rows) for layer, rows in layers))


def least_rows(resolved: ResolvedPlan) -> int:
    """What no sharing layer goes below: the rows that the scorer always keeps, or the mean where that is
    less."""
    scorer, sharing = resolved.plan.scorer, _sharing(resolved)
    assert scorer is not None, f"method {resolved.method} shares rows between layers without a scorer"
    assert sharing, "no layer shares"
    window, sinks, recents = (scorer.params.get(name, 0) for name in ("window", "sinks", "recents"))
    assert isinstance(window, int)
    assert isinstance(sinks, int)
    assert isinstance(recents, int)
    return min(resolved.layers[sharing[0]].rows, max(window, sinks + recents, 1))


@dataclass(frozen=True, kw_only=True)
class WaitingLayer:
    """A layer that waits for its rows.

    Attributes:
        inputs: K and V, accumulated attention, no queries.
        variance: F_l of D2O's equation 4.
        scores: float32 `[H_kv, T]`; None where the scorer waits for the number of rows.
    """

    inputs: LayerInputs
    variance: float
    scores: Tensor | None


def measure_layer(resolved: ResolvedPlan, inputs: LayerInputs) -> WaitingLayer:
    """Measure a layer, score it where that takes queries, and let the queries go."""
    scorer = resolved.plan.scorer
    assert scorer is not None, f"method {resolved.method} shares rows between layers without a scorer"
    inputs = inputs.with_sums()
    assert inputs.sums is not None
    normalisation = variance_normalisation(resolved.plan.layer_allocation.params)
    scores, made = None, make_scorer(scorer, rows=least_rows(resolved))
    if not made.depends_on_rows and resolved.layers[inputs.layer].rows < resolved.num_prompt_tokens:
        scores = made(inputs)
    # a clone: a view of nothing would keep all queries alive
    no_queries = inputs.queries[:, :, :0].clone()
    return WaitingLayer(
        inputs=replace(inputs, queries=no_queries, unrotate=None),
        variance=attention_variance(inputs.sums.variances, normalisation=normalisation),
        scores=scores,
    )


def allocate_rows(resolved: ResolvedPlan, variances: Sequence[float]) -> ResolvedPlan:
    """Rows of each layer, from F of all of them.

    Raises: KvferryError: a variance is not finite.
    """
    rows = layer_budgets(
        variances,
        num_tokens=resolved.num_prompt_tokens,
        rows=resolved.layers[_sharing(resolved)[0]].rows,
        normalisation=variance_normalisation(resolved.plan.layer_allocation.params),
        exempt_layers=resolved.plan.skip_layers,
        least_rows=least_rows(resolved),
    )
    return with_layer_rows(resolved, rows)


def _sharing(resolved: ResolvedPlan) -> tuple[int, ...]:
    return tuple(layer for layer in range(len(resolved.layers)) if layer not in resolved.plan.skip_layers)
