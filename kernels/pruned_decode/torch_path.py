"""Attention on pruned K in torch, all heads at once; arguments are checked by the dispatch."""

from __future__ import annotations

import torch
from torch import Tensor


def pruned_decode(
    queries: Tensor,
    channels: Tensor,
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """As `kernels.pruned_decode.pruned_decode`; the softmax in float32."""
    index = channels.long()[:, None].expand(-1, queries.shape[1], -1)
    logits = torch.cat([queries.gather(2, index) @ keys.mT, queries @ new_keys.mT], dim=2).float()
    probabilities = (logits * scaling).softmax(dim=-1).to(queries.dtype)
    num_rows = keys.shape[1]
    return probabilities[:, :, :num_rows] @ values + probabilities[:, :, num_rows:] @ new_values
