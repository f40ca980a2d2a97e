"""Exact top-k decode attention: reads every key to choose t tokens, the best that any estimate can do.

Called by the decode engine once per layer and step for layers whose plan says so. Reduces what is attended,
not what is read: an upper bound on the quality of HSA, Quest and SparQ. `reference.py` is the same maths in
plain float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.checks import check_attention, check_size
from kvferry.kernels.dense_decode.torch_path import dense_decode
from kvferry.kernels.dispatch import path_for
from kvferry.kernels.top_tokens import attend_tokens, top_tokens


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, length: int, num_tokens: int, scaling: float
) -> Tensor:
    """Attend exactly to the t tokens of largest `mean_g softmax(scaling * q_g K^T)`, chosen per KV head.

    The lowest index wins ties. Up to t rows, all are attended. Rows at n and beyond are never read.

    Deviation: the newest token is always among the t.

    Args:
        queries: `[H_kv, G, D]`.
        keys, values: `[H_kv, cap, D]`, the queries' dtype.
        length: n, rows in use, 1 to cap.
        num_tokens: t, at least 1.
        scaling: the softmax scale.

    Returns: `[H_kv, G, D]` in the queries' dtype.
    Raises: ValueError: shapes or dtypes do not fit together, or a size is out of range.
    """
    check_attention(queries, keys, values)
    check_size("length", length, 1, keys.shape[1])
    check_size("num_tokens", num_tokens, 1)
    path_for("exact_topk", queries.device)
    keys, values = keys[:, :length], values[:, :length]
    if length <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    tokens = top_tokens(token_scores(queries, keys, scaling=scaling), num_tokens)
    return attend_tokens(queries, keys, values, tokens, scaling=scaling)


def token_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """The mean over the group of each head's softmax over tokens: float32 `[H_kv, n]`."""
    logits = torch.matmul(queries.float() * scaling, keys.float().transpose(1, 2))
    return logits.softmax(dim=-1).mean(1)
