"""Exact top-k decode attention: reads every key to choose t tokens, the best that any estimate can do.

Called by the decode engine once per layer and step for layers whose plan says so. Reduces what is attended,
not what is read: an upper bound on the quality of HSA, Quest and SparQ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_attention, check_size, path_for
from kvferry.kernels.softmax import Scaling, scale_of
from kvferry.kernels.torch_attention import attend_rows, attend_tokens, top_tokens


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, length: int, num_tokens: int, scaling: Scaling
) -> Tensor:
    """Attend exactly to the t tokens of largest `mean_g softmax(scaling * q_g K^T)`, chosen per KV head.

    Args: as in `kernels`; t is num_tokens.
    """
    check_attention(queries, keys, values)
    check_size("length", length, 1, keys.shape[1])
    check_size("num_tokens", num_tokens, 1)
    path_for("exact_topk", queries.device)
    keys, values = keys[:, :length], values[:, :length]
    if length <= num_tokens:
        return attend_rows(queries, keys, values, scaling=scaling)
    tokens = top_tokens(token_scores(queries, keys, scaling=scale_of(scaling)), num_tokens)
    return attend_tokens(queries, keys, values, tokens, scaling=scaling)


def token_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """The mean over the group of each head's softmax over tokens: float32 `[H_kv, n]`."""
    logits = torch.matmul(queries.float() * scaling, keys.float().transpose(1, 2))
    return logits.softmax(dim=-1).mean(1)
