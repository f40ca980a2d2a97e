"""Chunk scores as the equation reads, chunk by chunk, in float32. For tests only."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_scores_reference(queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float) -> Tensor:
    """Compactor equation 5: `A_b = softmax(Q_b K_b^T * scaling)` of chunk b, no mask, `a_b = 1^T A_b`; mean
    over the group.

    Args: queries `[H_kv, G, T, D]`, keys `[H_kv, T, D]`. Returns: float32 `[H_kv, T]`.
    """
    chunks = []
    for begin in range(0, keys.shape[1], chunk_tokens):
        chunk = slice(begin, begin + chunk_tokens)
        logits = torch.einsum("hgqd,hkd->hgqk", queries[:, :, chunk].float(), keys[:, chunk].float())
        chunks.append((logits * scaling).softmax(dim=-1).sum(dim=2).mean(dim=1))
    return torch.cat([keys.new_zeros(keys.shape[0], 0, dtype=torch.float32), *chunks], dim=1)


def shared_chunk_scores_reference(queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float) -> Tensor:
    """The same with one set of queries for every chunk: the mean over queries, times the chunk's length.

    Args: queries `[H_kv, G, M, D]`, keys `[H_kv, T, D]`. Returns: float32 `[H_kv, T]`.
    """
    chunks = []
    for begin in range(0, keys.shape[1], chunk_tokens):
        chunk = keys[:, begin : begin + chunk_tokens].float()
        logits = torch.einsum("hgqd,hkd->hgqk", queries.float(), chunk) * scaling
        chunks.append(logits.softmax(dim=-1).mean(dim=(1, 2)) * chunk.shape[1])
    return torch.cat([keys.new_zeros(keys.shape[0], 0, dtype=torch.float32), *chunks], dim=1)
