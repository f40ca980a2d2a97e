"""Window scores as the equation reads: every probability at once, in float32. For tests only."""

from __future__ import annotations

import torch
from torch import Tensor


def window_scores_reference(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """`A = softmax(Q_w K^T * scaling + causal mask)`, then `s_t = sum_g sum_i A_{g,i,t}`.

    Args: queries `[H_kv, G, W, D]`, keys `[H_kv, T, D]`. Returns: float32 `[H_kv, T]`.
    """
    window, num_tokens = queries.shape[2], keys.shape[1]
    logits = torch.einsum("hgwd,htd->hgwt", queries.float(), keys.float()) * scaling
    query_positions = torch.arange(num_tokens - window, num_tokens, device=keys.device)
    key_positions = torch.arange(num_tokens, device=keys.device)
    future = key_positions[None, :] > query_positions[:, None]
    probabilities = logits.masked_fill(future, float("-inf")).softmax(dim=-1)
    return probabilities.sum(dim=(1, 2))
