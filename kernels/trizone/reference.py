"""TriZone attention as Eq. 7 reads: dequantise all of K and V, then attend densely in float32. For tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedLayer, unpack_layer


def trizone_decode(
    queries: Tensor, packed: PackedLayer, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """`softmax(q [K_kept, K_new]^T scaling) [V_kept, V_new]`, as `kernels.trizone.trizone_decode`.

    Returns: float32 `[H_kv, G, D]`.
    """
    output = torch.empty(queries.shape, dtype=torch.float32)
    for h, (kept_keys, kept_values, _) in enumerate(unpack_layer(packed)):
        keys = torch.cat([kept_keys, new_keys[h].float()])
        values = torch.cat([kept_values, new_values[h].float()])
        for g in range(queries.shape[1]):
            probabilities = torch.softmax(scaling * (keys @ queries[h, g].float()), dim=0)
            output[h, g] = probabilities @ values
    return output
