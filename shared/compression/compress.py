"""Compression of prompts whose layers are all there before the first is compressed.

Prefill works this way where attention decides how many rows each layer retains (a measured allocation):

    prefill    measure_layer, layer by layer ──all──► allocate_rows ──► compress_layer, ship
    decode     the manifest's rows ──► with_layer_rows: total and bounds checked ──► layout

The oracle and a worker's warm-up work this way with every plan (`compress_prompt`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from kvferry.shared.compression.d2o.layer_budgets import Normalisation, attention_variance, layer_budgets
from kvferry.shared.compression.formats import compress_layer, make_formats
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, sharing_layers
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.model.spec import ModelSpec


def with_layer_rows(resolved: ResolvedPlan, layer_rows: Sequence[int]) -> ResolvedPlan:
    """Return the plan with measured rows in place of their mean. Attention sizes stay those of the mean.

    Raises: ValueError: rows that `allocate_rows` cannot return: another total, or a layer out of bounds.
    """
    sharing = sharing_layers(resolved)
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
    """Return the fewest rows that a sharing layer may get: those that its scores protect, at least 1.

    Scores that depend on the number of rows protect no more rows than a layer has.
    """
    scorer, sharing = resolved.plan.scorer, sharing_layers(resolved)
    assert scorer is not None, f"method {resolved.method} shares rows between layers without a scorer"
    assert sharing, "no layer shares"
    mean = resolved.layers[sharing[0]].rows
    made = make_scorer(scorer, rows=mean)
    return 1 if made.depends_on_rows else min(mean, max(made.protected_rows, 1))


@dataclass(frozen=True, kw_only=True)
class WaitingLayer:
    """A layer to be compressed. If its number of rows is measured, only that is not known yet.

    Attributes:
        inputs: of a measured layer, K, V and accumulated attention, without queries.
        variance: F_l of D2O's equation 4, `[]`; None where the layer shares no rows.
        scores: float32 `[H_kv, T]`; None if they are to be computed when it is compressed.
    """

    inputs: LayerInputs
    variance: Tensor | None = None
    scores: Tensor | None = None


def measure_layer(resolved: ResolvedPlan, inputs: LayerInputs) -> WaitingLayer:
    """Measure a layer, score it if the scorer does not need the number of rows, and release its queries."""
    scorer = resolved.plan.scorer
    assert scorer is not None, f"method {resolved.method} shares rows between layers without a scorer"
    if inputs.layer not in sharing_layers(resolved):
        return WaitingLayer(inputs=_without_queries(inputs))
    inputs = inputs.with_sums()
    assert inputs.sums is not None
    scores, made = None, make_scorer(scorer, rows=resolved.layers[inputs.layer].rows)
    if not made.depends_on_rows and resolved.layers[inputs.layer].rows < resolved.num_prompt_tokens:
        scores = made(inputs)
    return WaitingLayer(
        inputs=_without_queries(inputs),
        variance=attention_variance(inputs.sums.variances, normalisation=_normalisation(resolved)),
        scores=scores,
    )


def allocate_waiting(resolved: ResolvedPlan, waiting: Iterable[WaitingLayer]) -> ResolvedPlan:
    """Allocate rows as `allocate_rows` does. Args: waiting: all layers that attend."""
    variances = {entry.inputs.layer: float(entry.variance) for entry in waiting if entry.variance is not None}
    return allocate_rows(resolved, [variances.get(layer, 0.0) for layer in range(len(resolved.layers))])


def _without_queries(inputs: LayerInputs) -> LayerInputs:
    # a clone, because an empty view would keep the memory of all queries
    return replace(inputs, queries=inputs.queries[:, :, :0].clone(), unrotate=None)


def allocate_rows(resolved: ResolvedPlan, variances: Sequence[float]) -> ResolvedPlan:
    """Return the plan with each layer's own rows, from F of all layers; layers that share none need no F.

    Raises: KvferryError: a variance is not finite.
    """
    sharing = sharing_layers(resolved)
    rows = layer_budgets(
        variances,
        num_tokens=resolved.num_prompt_tokens,
        rows=resolved.layers[sharing[0]].rows,
        normalisation=_normalisation(resolved),
        exempt_layers=set(range(len(variances))).difference(sharing),
        least_rows=least_rows(resolved),
    )
    others = {layer: plan.rows for layer, plan in enumerate(resolved.layers) if layer not in sharing}
    return with_layer_rows(resolved, [others.get(layer, share) for layer, share in enumerate(rows)])


def _normalisation(resolved: ResolvedPlan) -> Normalisation:
    return cast(Normalisation, resolved.plan.layer_allocation.params["normalisation"])


def compress_prompt(
    spec: ModelSpec,
    resolved: ResolvedPlan,
    layers: Iterable[LayerInputs],
    states: Mapping[int, Tensors] | None = None,
) -> tuple[ResolvedPlan, tuple[Tensors, ...]]:
    """Compress every layer of a prompt, given all of its layers.

    Args: states: of the layers that have one.
    Returns: the plan with each layer's own rows, and each layer's tensors.
    """
    if is_measured(resolved):
        waiting = [measure_layer(resolved, inputs) for inputs in layers]
        return compress_waiting(spec, resolved, waiting, states)
    formats = make_formats(spec, resolved)
    compressed = {each.layer: compress_layer(resolved, formats[each.layer], each) for each in layers}
    return resolved, in_layer_order(spec, compressed, states)


def compress_waiting(
    spec: ModelSpec,
    resolved: ResolvedPlan,
    waiting: Sequence[WaitingLayer],
    states: Mapping[int, Tensors] | None = None,
) -> tuple[ResolvedPlan, tuple[Tensors, ...]]:
    """Compress measured layers as `compress_prompt` does."""
    measured = allocate_waiting(resolved, waiting)
    formats = make_formats(spec, measured)
    compressed = {
        entry.inputs.layer: compress_layer(
            measured, formats[entry.inputs.layer], entry.inputs, scores=entry.scores
        )
        for entry in waiting
    }
    return measured, in_layer_order(spec, compressed, states)


def in_layer_order(
    spec: ModelSpec, compressed: dict[int, Tensors], states: Mapping[int, Tensors] | None
) -> tuple[Tensors, ...]:
    """Return each layer's tensors; none for a layer with neither rows nor a state."""
    by_layer = {**compressed, **(states or {})}
    return tuple(by_layer.get(layer, {}) for layer in range(spec.num_layers))
