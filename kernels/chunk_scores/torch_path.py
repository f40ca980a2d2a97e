"""Chunk scores in plain torch: many chunks at a time, as many as a bounded buffer of logits allows."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOGITS = 1 << 24
"""float32 logits alive at a time (64 MiB); those of one query, or of one chunk pair, are always allowed."""


def chunk_scores_torch(
    queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float, max_logits: int = MAX_LOGITS
) -> Tensor:
    """The sums of `chunk_scores`; shapes are the caller's to check.

    Args: queries `[H_kv, G, T, D]`, keys `[H_kv, T, D]`. Returns: float32 `[H_kv, T]`.
    """
    num_kv_heads, group, num_tokens, head_dim = queries.shape
    scores = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=keys.device)
    step = chunk_tokens * max(1, max_logits // (group * chunk_tokens**2))
    num_whole = num_tokens // chunk_tokens * chunk_tokens
    spans = [(begin, min(begin + step, num_whole), chunk_tokens) for begin in range(0, num_whole, step)]
    if num_whole < num_tokens:
        spans.append((num_whole, num_tokens, num_tokens - num_whole))
    for head in range(num_kv_heads):
        for begin, end, size in spans:
            head_queries = queries[head, :, begin:end].float().reshape(group, -1, size, head_dim)
            head_keys = keys[head, begin:end].float().reshape(-1, size, head_dim)
            probabilities = (head_queries @ head_keys.mT).mul_(scaling).softmax(dim=-1)  # [G, n, c, c]
            scores[head, begin:end] = probabilities.sum(dim=2).mean(dim=0).flatten()
    return scores


def shared_chunk_scores_torch(
    queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float, max_logits: int = MAX_LOGITS
) -> Tensor:
    """The sums of `shared_chunk_scores`; shapes are the caller's to check.

    Args: queries `[H_kv, G, M, D]`, keys `[H_kv, T, D]`. Returns: float32 `[H_kv, T]`.
    """
    num_kv_heads, num_tokens, _ = keys.shape
    num_rows = queries.shape[1] * queries.shape[2]
    scores = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=keys.device)
    step = chunk_tokens * max(1, max_logits // (num_rows * chunk_tokens))
    num_whole = num_tokens // chunk_tokens * chunk_tokens
    spans = [(begin, min(begin + step, num_whole), chunk_tokens) for begin in range(0, num_whole, step)]
    if num_whole < num_tokens:
        spans.append((num_whole, num_tokens, num_tokens - num_whole))
    for head in range(num_kv_heads):
        rows = queries[head].flatten(0, 1).float() * scaling
        for begin, end, size in spans:
            logits = (rows @ keys[head, begin:end].float().mT).view(num_rows, -1, size)  # [G M, n, c]
            scores[head, begin:end] = logits.softmax(dim=-1).mean(dim=0).flatten() * size
    return scores
