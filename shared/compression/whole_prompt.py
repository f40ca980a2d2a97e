"""Compression of a prompt whose layers are all there: of the one-process oracle and of a worker's warm-up.

Prefill does the same layer by layer (`services/prefill/prompt_pass.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvferry.shared.compression.compress import WaitingLayer, allocate_waiting, measure_layer
from kvferry.shared.compression.formats import compress_layer, make_formats
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan, is_measured
from kvferry.shared.model.spec import ModelSpec


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
    compressed = {its.layer: compress_layer(resolved, formats[its.layer], its) for its in layers}
    return resolved, in_layer_order(spec, compressed, states)


def compress_waiting(
    spec: ModelSpec,
    resolved: ResolvedPlan,
    waiting: Sequence[WaitingLayer],
    states: Mapping[int, Tensors] | None = None,
) -> tuple[ResolvedPlan, tuple[Tensors, ...]]:
    """As `compress_prompt`, for measured layers."""
    measured = allocate_waiting(resolved, waiting)
    formats = make_formats(spec, measured)
    compressed = {
        its.inputs.layer: compress_layer(measured, formats[its.inputs.layer], its.inputs, scores=its.scores)
        for its in waiting
    }
    return measured, in_layer_order(spec, compressed, states)


def in_layer_order(
    spec: ModelSpec, compressed: dict[int, Tensors], states: Mapping[int, Tensors] | None
) -> tuple[Tensors, ...]:
    """Each layer's tensors; none for a layer with neither rows nor a state."""
    by_layer = {**compressed, **(states or {})}
    return tuple(by_layer.get(layer, {}) for layer in range(spec.num_layers))
