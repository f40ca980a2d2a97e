"""One layer's compression: score, select, gather; or pack. Called by prefill between two layers of a prompt.

Knows no wire and no model: full K and V in, what is kept out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvferry.shared.compression.attention import make_attention
from kvferry.shared.compression.interface import CompressedLayer, LayerInputs
from kvferry.shared.compression.measured import HeldLayer, hold_layer, is_measured, settle
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.rdkv.compress import compress_layer_rdkv
from kvferry.shared.compression.representation import budget_tokens, rdkv_settings
from kvferry.shared.compression.representations import stored_representation, wire_representation
from kvferry.shared.compression.representations.interface import gather_rows
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.compression.select import select_rows
from kvferry.shared.errors import KvferryError


def compress_prompt(
    resolved: ResolvedPlan, layers: Iterable[LayerInputs]
) -> tuple[ResolvedPlan, tuple[CompressedLayer, ...]]:
    """Compress every layer of a prompt whose layers are all at hand.

    Returns: the plan with each layer's own rows, and what is kept of each.
    """
    if not is_measured(resolved):
        return resolved, tuple(compress_layer(resolved, inputs) for inputs in layers)
    return compress_held(resolved, [hold_layer(resolved, inputs) for inputs in layers])


def compress_held(
    resolved: ResolvedPlan, held: Sequence[HeldLayer]
) -> tuple[ResolvedPlan, tuple[CompressedLayer, ...]]:
    """The same, of layers that have waited for one another."""
    settled = settle(resolved, [layer.variance for layer in held])
    return settled, tuple(compress_layer(settled, layer.inputs, scores=layer.scores) for layer in held)


def compress_layer(
    resolved: ResolvedPlan, inputs: LayerInputs, *, scores: Tensor | None = None
) -> CompressedLayer:
    """Keep what the resolved plan says of one layer.

    Args:
        inputs: K and V of the whole prompt (`T == resolved.num_prompt_tokens`), queries of its new tokens.
        scores: of the plan's scorer, float32 `[H_kv, T]`, where they are known already.

    Returns: `rows` rows per KV head; positions are None where every token is kept. Of a layer that is not
        plain rows, no rows and what it is stored as.

    Raises:
        KvferryError: K or V of a layer to pack or quantise are not finite, or beyond what it holds.
    """
    num_tokens = inputs.keys.shape[1]
    assert num_tokens == resolved.num_prompt_tokens, (num_tokens, resolved.num_prompt_tokens)
    plan = resolved.layers[inputs.layer]
    if make_attention(plan.attention).evicts:
        return _keep_evicting(resolved, inputs, scores)
    try:
        if plan.representation.name == "rdkv":
            return _pack(resolved, inputs)
        return _keep_rows(resolved, inputs, scores)
    except ValueError as error:
        raise KvferryError(f"layer {inputs.layer} cannot be packed: {error}", reason="packing") from error


def _keep_rows(resolved: ResolvedPlan, inputs: LayerInputs, scores: Tensor | None) -> CompressedLayer:
    """Rows by score, plain or in the plan's representation."""
    plan = resolved.layers[inputs.layer]
    scores = _scores(resolved, inputs, scores) if plan.rows < inputs.keys.shape[1] else None
    representation = stored_representation(plan.representation)
    if representation is not None:
        none = inputs.keys[:, :0].contiguous()
        stored = representation.store(inputs, rows=plan.rows, scores=scores)
        return CompressedLayer(keys=none, values=none, stored=stored)
    keys, values, positions = inputs.keys, inputs.values, None
    if scores is not None:
        positions = select_rows(scores, plan.rows)
        keys, values = gather_rows(keys, positions), gather_rows(values, positions)
    quantiser = wire_representation(plan)
    if quantiser is None:
        return CompressedLayer(keys=keys.contiguous(), values=values.contiguous(), positions=positions)
    wire = quantiser.quantise(keys, values, positions)
    keys, values = wire.dequantised()
    return CompressedLayer(keys=keys, values=values, positions=positions, wire=wire)


def _keep_evicting(resolved: ResolvedPlan, inputs: LayerInputs, scores: Tensor | None) -> CompressedLayer:
    """Rows by score and what eviction goes on from, dropped rows merged where the attention merges."""
    plan, num_tokens = resolved.layers[inputs.layer], inputs.keys.shape[1]
    inputs = inputs.with_sums()
    assert inputs.sums is not None
    kept = torch.arange(num_tokens, device=inputs.keys.device).expand(inputs.keys.shape[0], -1)
    positions = None
    if plan.rows < num_tokens:
        kept = positions = select_rows(_scores(resolved, inputs, scores), plan.rows)
    keys, values, state = make_attention(plan.attention).keep(
        inputs.keys, inputs.values, inputs.sums.sums, kept
    )
    return CompressedLayer(keys=keys, values=values, positions=positions, state=state)


def _scores(resolved: ResolvedPlan, inputs: LayerInputs, scores: Tensor | None) -> Tensor:
    """float32 `[H_kv, T]` by the plan's scorer, where they are not known already."""
    assert resolved.plan.scorer is not None, f"method {resolved.method} drops rows without a scorer"
    if scores is not None:
        return scores
    return make_scorer(resolved.plan.scorer, rows=resolved.layers[inputs.layer].rows)(inputs)


def _pack(resolved: ResolvedPlan, inputs: LayerInputs) -> CompressedLayer:
    settings = rdkv_settings(
        resolved.plan.representation, budget_tokens=budget_tokens(resolved.layers[inputs.layer])
    )
    none = inputs.keys[:, :0].contiguous()
    return CompressedLayer(keys=none, values=none, packed=compress_layer_rdkv(settings, inputs).packed)
