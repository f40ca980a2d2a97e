"""HSA over packed K and V as it reads: dequantise everything, then attend as `kernels/hsa/reference.py`, head
by head. For tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.hsa import reference as hsa
from kvferry.kernels.packed import PackedLayer, unpack_layer


def attend(
    queries: Tensor,
    packed: PackedLayer,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """As `kernels.packed_hsa.attend`; page extremes are computed here.

    Returns: float32 `[H_kv, G, D]`.
    """
    output = torch.empty(queries.shape, dtype=torch.float32)
    for h, (kept_keys, kept_values, _) in enumerate(unpack_layer(packed)):
        keys = torch.cat([kept_keys, new_keys[h].float()])[None]
        values = torch.cat([kept_values, new_values[h].float()])[None]
        output[h] = hsa.attend(
            queries[h : h + 1].float(),
            keys,
            values,
            *hsa.page_extremes(keys, page_size=page_size),
            page_size=page_size,
            num_channels=num_channels,
            num_tokens=num_tokens,
            scaling=scaling,
        )[0]
    return output
