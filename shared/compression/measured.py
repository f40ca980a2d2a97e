"""Layer budgets that only a prompt's own attention can tell, from measuring it to rows per layer.

    admission  every side: resolved plan with mean rows; the total and the bounds are known
    prefill    layer by layer: hold_layer ──all layers──► settle ──► rows per layer ──► compress_layer, ship
    decode     the manifest's rows ──► with_layer_rows: total and bounds checked ──► layout

These plans alone hold K and V of every layer until the pass over the prompt ends; others hold one or two
layers. Queries are not held: what a scorer wants of them it computes when the layer passes. Compresses and
ships nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvferry.shared.compression.allocation.attention_variance import variance_normalisation
from kvferry.shared.compression.d2o.layer_budgets import attention_variance, layer_budgets
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import CompressionPlan, ResolvedPlan
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import InvalidRequest

MEASURED_ALLOCATIONS = ("attention_variance",)
_READ_QUERIES = ("window_attention", "compactor")
"""Scorers that look at queries. Their scores are the same for any rows of `least_rows` or more."""
_READ_NO_QUERIES = ("accumulated_attention", "heavy_hitters", "streaming", "random")
"""Scorers that need the number of rows, and no more of the queries than their accumulated attention."""


def check_measured(plan: CompressionPlan) -> None:
    """Whether a plan's scorer can wait for its layer's rows, where it has to.

    Raises: InvalidRequest.
    """
    if plan.layer_allocation.name not in MEASURED_ALLOCATIONS or plan.scorer is None:
        return
    known = (*_READ_QUERIES, *_READ_NO_QUERIES)
    if plan.scorer.name not in known:
        raise InvalidRequest(
            f"layer_allocation {plan.layer_allocation.name!r} goes with scorers {', '.join(known)}; the "
            f"plan's scorer is {plan.scorer.name!r}",
            param="kv_compression",
        )


def is_measured(resolved: ResolvedPlan) -> bool:
    """Whether the plan needs statistics of every layer before the first can be compressed."""
    return resolved.plan.layer_allocation.name in MEASURED_ALLOCATIONS and any(
        resolved.layers[layer].rows < resolved.num_prompt_tokens for layer in _sharing(resolved)
    )


def with_layer_rows(resolved: ResolvedPlan, layer_rows: Sequence[int]) -> ResolvedPlan:
    """The plan with measured rows in place of their mean; its attention sizes stay those of the mean.

    Raises: ValueError: rows that `settle` does not come to: another total, or a layer out of bounds.
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
class HeldLayer:
    """A layer that waits for its rows.

    Attributes:
        inputs: K and V, accumulated attention, no queries.
        variance: F_l of D2O's equation 4.
        scores: float32 `[H_kv, T]`; None where the scorer waits for the number of rows.
    """

    inputs: LayerInputs
    variance: float
    scores: Tensor | None


def hold_layer(resolved: ResolvedPlan, inputs: LayerInputs) -> HeldLayer:
    """Measure a layer, score it where that takes queries, and let the queries go."""
    scorer = resolved.plan.scorer
    assert scorer is not None, f"method {resolved.method} shares rows between layers without a scorer"
    inputs = inputs.with_sums()
    assert inputs.sums is not None
    normalisation = variance_normalisation(resolved.plan.layer_allocation.params)
    scores = None
    if scorer.name in _READ_QUERIES and resolved.layers[inputs.layer].rows < resolved.num_prompt_tokens:
        scores = make_scorer(scorer, rows=least_rows(resolved))(inputs)
    # a clone: a view of nothing would keep all queries alive
    no_queries = inputs.queries[:, :, :0].clone()
    return HeldLayer(
        inputs=replace(inputs, queries=no_queries, unrotate=None),
        variance=attention_variance(inputs.sums.variances, normalisation=normalisation),
        scores=scores,
    )


def settle(resolved: ResolvedPlan, variances: Sequence[float]) -> ResolvedPlan:
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
