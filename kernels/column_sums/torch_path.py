"""Column sums in plain torch, a chunk of queries of one KV head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOGITS = 1 << 24
"""float32 logits alive at a time (64 MiB); one query's G * T logits are always allowed."""
MAX_CHUNK_QUERIES = 256
"""A chunk computes its whole diagonal block, half of it for nothing: short chunks keep that small."""


def column_sums_torch(
    queries: Tensor, keys: Tensor, scaling: float, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor]:
    """`sums` and `variances` of `ColumnSums`; shapes are the caller's to check.

    Args: queries `[H_kv, G, T_new, D]`, keys `[H_kv, T, D]`, max_logits: bound on a chunk's logits.
    Returns: float32 `[H_kv, T]` and `[H_kv, G]`.
    """
    num_kv_heads, group, num_queries, head_dim = queries.shape
    num_tokens = keys.shape[1]
    history = num_tokens - num_queries
    chunk = min(max(1, max_logits // (group * num_tokens)), MAX_CHUNK_QUERIES, num_queries)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=keys.device).triu(1)
    sums = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=keys.device)
    variances = torch.empty(num_kv_heads, group, dtype=torch.float32, device=keys.device)
    for head in range(num_kv_heads):
        columns = torch.zeros(group, num_tokens, dtype=torch.float32, device=keys.device)
        head_keys = keys[head].float()
        for begin in range(0, num_queries, chunk):
            count = min(chunk, num_queries - begin)
            visible = history + begin + count
            rows = queries[head, :, begin : begin + count].reshape(group * count, head_dim).float() * scaling
            logits = (rows @ head_keys[:visible].T).view(group, count, visible)
            # only the chunk's own columns can lie in a query's future
            logits[:, :, visible - count :].masked_fill_(future[:count, :count], float("-inf"))
            weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
            # dividing each row by its sum and summing the columns is one product: no second matrix
            inverse = weights.sum(-1).reciprocal_()
            columns[:, :visible] += torch.bmm(inverse[:, None], weights)[:, 0]
        sums[head] = columns.sum(0)
        variances[head] = columns.var(-1, correction=0)
    return sums, variances
