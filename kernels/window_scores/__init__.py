"""Window scores: how much the prompt's last queries attend to each token, summed over window and group.

First step of SnapKV's and RocketKV's scoring, called once per layer while the prompt is prefilled. Does not
pool, does not select, and does not drop the window's own columns. In torch at most `MAX_LOGITS` float32
logits exist at a time, however long the prompt is; the Triton kernels (`kernels/attention_mass.py`) store
none.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.checks import check_scores, check_size, scores_problem
from kvferry.kernels.dispatch import path_for

MAX_LOGITS = 1 << 24
"""float32 logits at a time (64 MiB); one row of T logits is always allowed."""


def window_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """Column sums of the window's causal attention: `s_t = sum_{g, i} softmax(q_{g,i} K^T * scaling)_t`.

    Args:
        queries: post-RoPE `[H_kv, G, W, D]`; query i sits at position T - W + i and sees no later token.
        keys: post-RoPE `[H_kv, T, D]`, T >= W >= 1, same dtype and device as `queries`.
        scaling: softmax scale.

    Returns: float32 `[H_kv, T]`; each row sums to G * W.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    check_scores(queries, keys, rows="W")
    check_size("the window's queries", queries.shape[2], 1, keys.shape[1])
    if path_for("window_scores", keys.device, partial(scores_problem, queries, keys)) != "torch":
        # a CPU install has no Triton
        from kvferry.kernels.attention_mass import attention_mass

        return attention_mass(queries, keys, scaling=scaling, per_query_head=False)
    return window_scores_torch(queries, keys, scaling)


def window_scores_torch(
    queries: Tensor, keys: Tensor, scaling: float, max_logits: int = MAX_LOGITS
) -> Tensor:
    """`window_scores` in torch, head by head and chunk of query rows by chunk; arguments are not checked.

    Args: max_logits: bound on a chunk's logits.
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
            # only the window's own columns can be after a query
            future = columns[None, :] > rows[chunk, None]
            logits[:, window_start:].masked_fill_(future, float("-inf"))
            scores[head] += logits.softmax(dim=-1).sum(dim=0)
    return scores
