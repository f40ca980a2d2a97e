"""Window scores in plain torch, in chunks of query rows so that no large buffer is ever alive."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOGITS = 1 << 24
"""float32 logits alive at a time (64 MiB); one row of T logits is always allowed."""


def window_scores_torch(
    queries: Tensor, keys: Tensor, scaling: float, max_logits: int = MAX_LOGITS
) -> Tensor:
    """The sums of `window_scores`, head by head and chunk by chunk; shapes are the caller's to check.

    Args: queries `[H_kv, G, W, D]`, keys `[H_kv, T, D]`, max_logits: bound on a chunk's logits.
    Returns: float32 `[H_kv, T]`.
    """
    num_kv_heads, group, window, head_dim = queries.shape
    num_tokens = keys.shape[1]
    row_chunk = max(1, max_logits // num_tokens)
    window_start = num_tokens - window
    rows = torch.arange(group * window, device=keys.device) % window
    columns = torch.arange(window, device=keys.device)
    scores = torch.zeros(num_kv_heads, num_tokens, dtype=torch.float32, device=keys.device)
    for head in range(num_kv_heads):
        head_queries = queries[head].reshape(group * window, head_dim).float() * scaling
        head_keys = keys[head].float()
        for begin in range(0, group * window, row_chunk):
            chunk = slice(begin, begin + row_chunk)
            logits = head_queries[chunk] @ head_keys.T
            # Only the window's own columns can lie in a query's future.
            future = columns[None, :] > rows[chunk, None]
            logits[:, window_start:].masked_fill_(future, float("-inf"))
            scores[head] += logits.softmax(dim=-1).sum(dim=0)
    return scores
