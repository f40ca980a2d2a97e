"""One layer's compression: score, then whatever the layer's format makes of it.

Called by prefill between two layers of a prompt: full K and V in, named tensors out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerFormat, Tensors
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.measured import WaitingLayer, allocate_rows, is_measured, measure_layer
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.spec import ModelSpec


def compress_prompt(
    spec: ModelSpec, resolved: ResolvedPlan, layers: Iterable[LayerInputs]
) -> tuple[ResolvedPlan, tuple[Tensors, ...]]:
    """Compress every layer of a prompt whose layers are all at hand.

    Returns: the plan with each layer's own rows, and each layer's tensors.
    """
    if is_measured(resolved):
        return compress_waiting(spec, resolved, [measure_layer(resolved, inputs) for inputs in layers])
    formats = make_formats(spec, resolved)
    return resolved, tuple(compress_layer(resolved, formats[its.layer], its) for its in layers)


def compress_waiting(
    spec: ModelSpec, resolved: ResolvedPlan, waiting: Sequence[WaitingLayer]
) -> tuple[ResolvedPlan, tuple[Tensors, ...]]:
    """The same, of layers that have waited for one another."""
    measured = allocate_rows(resolved, [layer.variance for layer in waiting])
    formats = make_formats(spec, measured)
    return measured, tuple(
        compress_layer(measured, formats[its.inputs.layer], its.inputs, scores=its.scores) for its in waiting
    )


def compress_layer(
    resolved: ResolvedPlan, fmt: LayerFormat, inputs: LayerInputs, *, scores: Tensor | None = None
) -> Tensors:
    """Compress one layer as the resolved plan says.

    Args:
        fmt: the layer's.
        inputs: K and V of the whole prompt (`T == resolved.num_prompt_tokens`), queries of its new tokens.
        scores: of the plan's scorer, float32 `[H_kv, T]`, where they are known already.

    Raises: KvferryError: K or V of a layer to pack or quantise are not finite, or beyond what it holds.
    """
    num_tokens = inputs.keys.shape[1]
    assert num_tokens == resolved.num_prompt_tokens, (num_tokens, resolved.num_prompt_tokens)
    scorer = resolved.plan.scorer
    if fmt.rows == num_tokens:
        scores = None
    elif scores is None and scorer is not None:
        scores = make_scorer(scorer, rows=fmt.rows)(inputs)
    try:
        return fmt.compress(inputs, scores)
    except ValueError as error:
        raise KvferryError(f"layer {inputs.layer} cannot be packed: {error}", reason="packing") from error
