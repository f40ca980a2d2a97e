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

    Returns: `rows` rows per KV head; positions are None where every token is kept. Of a packed layer, no
        rows and the bytes.

    Raises:
        KvferryError: K or V of a layer to pack are not finite, or beyond what a packed layer holds.
    """
    num_tokens = inputs.keys.shape[1]
    assert num_tokens == resolved.num_prompt_tokens, (num_tokens, resolved.num_prompt_tokens)
    plan = resolved.layers[inputs.layer]
    if plan.representation.name == "rdkv":
        return _pack(resolved, inputs)
    kind = make_attention(plan.attention)
    if kind.evicts:
        inputs = inputs.with_sums()
    positions = _kept_positions(resolved, inputs, scores) if plan.rows < num_tokens else None
    if kind.evicts:
        assert inputs.sums is not None
        every = torch.arange(num_tokens, device=inputs.keys.device).expand(inputs.keys.shape[0], -1)
        kept = positions if positions is not None else every
        keys, values, state = kind.keep(inputs.keys, inputs.values, inputs.sums.sums, kept)
        return CompressedLayer(keys=keys, values=values, positions=positions, state=state)
    if positions is None:
        return CompressedLayer(keys=inputs.keys.contiguous(), values=inputs.values.contiguous())
    return CompressedLayer(
        keys=_gather(inputs.keys, positions), values=_gather(inputs.values, positions), positions=positions
    )


def _kept_positions(resolved: ResolvedPlan, inputs: LayerInputs, scores: Tensor | None) -> Tensor:
    """int32 `[H_kv, rows]` of the resolved layer, ascending."""
    assert resolved.plan.scorer is not None, f"method {resolved.method} drops rows without a scorer"
    rows = resolved.layers[inputs.layer].rows
    if scores is None:
        scores = make_scorer(resolved.plan.scorer, rows=rows)(inputs)
    return select_rows(scores, rows)


def _pack(resolved: ResolvedPlan, inputs: LayerInputs) -> CompressedLayer:
    settings = rdkv_settings(
        resolved.plan.representation, budget_tokens=budget_tokens(resolved.layers[inputs.layer])
    )
    try:
        packed = compress_layer_rdkv(settings, inputs).packed
    except ValueError as error:
        raise KvferryError(f"layer {inputs.layer} cannot be packed: {error}", reason="packing") from error
    none = inputs.keys[:, :0].contiguous()
    return CompressedLayer(keys=none, values=none, packed=packed)


def _gather(rows: Tensor, positions: Tensor) -> Tensor:
    """`[H_kv, T, D]` at `[H_kv, n]` -> `[H_kv, n, D]`, contiguous."""
    index = positions.to(torch.int64)[:, :, None].expand(-1, -1, rows.shape[2])
    return rows.gather(1, index)
