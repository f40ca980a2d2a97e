"""One layer's compression: score, select, gather; or pack. Called by prefill between two layers of a prompt.

Knows no wire and no model: full K and V in, what is kept out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.shared.compression.interface import CompressedLayer, LayerInputs
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.rdkv.compress import compress_layer_rdkv
from kvferry.shared.compression.representation import budget_tokens, rdkv_settings
from kvferry.shared.compression.scorers import make_scorer
from kvferry.shared.compression.select import select_rows
from kvferry.shared.errors import KvferryError


def compress_layer(resolved: ResolvedPlan, inputs: LayerInputs) -> CompressedLayer:
    """Keep what the resolved plan says of one layer.

    Args: inputs: K and V of the whole prompt (`T == resolved.num_prompt_tokens`), queries of its new tokens.
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
    rows = plan.rows
    if rows == num_tokens:
        return CompressedLayer(keys=inputs.keys.contiguous(), values=inputs.values.contiguous())
    assert resolved.plan.scorer is not None, f"method {resolved.method} drops rows without a scorer"
    scores = make_scorer(resolved.plan.scorer, rows=rows)(inputs)
    positions = select_rows(scores, rows)
    return CompressedLayer(
        keys=_gather(inputs.keys, positions), values=_gather(inputs.values, positions), positions=positions
    )


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
