"""Column sums as the equations read, the whole matrix at once, in float32. For tests only."""

from __future__ import annotations

import torch
from torch import Tensor


def column_sums_reference(queries: Tensor, keys: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """`A = softmax(Q K^T * scaling + causal mask)`; D2O Eq. 6: `s_t = sum_g sum_i A_{g,i,t}`; Eq. 4:
    `F_g = Var_t(sum_i A_{g,i,t})`.

    Args: queries `[H_kv, G, T_new, D]`, keys `[H_kv, T, D]`. Returns: float32 `[H_kv, T]` and `[H_kv, G]`.
    """
    num_queries, num_tokens = queries.shape[2], keys.shape[1]
    logits = torch.einsum("hgid,htd->hgit", queries.float(), keys.float()) * scaling
    query_positions = torch.arange(num_tokens - num_queries, num_tokens)
    future = torch.arange(num_tokens)[None, :] > query_positions[:, None]
    columns = logits.masked_fill(future, float("-inf")).softmax(dim=-1).sum(dim=2)  # [H_kv, G, T]
    mean = columns.mean(dim=-1, keepdim=True)
    return columns.sum(dim=1), ((columns - mean) ** 2).mean(dim=-1)
