"""Exact top-k decode attention: the oracle of dynamic selection, which reads every key to choose t tokens.

Called by the decode engine once per layer and step for layers whose plan says so. Reduces what is attended,
not what is read: it bounds what any estimate (HSA, Quest, SparQ) can reach. `reference.py` is the same maths
in plain float32.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.dispatch import path_for
from kvferry.kernels.exact_topk import torch_path
from kvferry.kernels.top_tokens import check_cache


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

    Returns:
        `[H_kv, G, D]` in the queries' dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or a size is out of range.
    """
    check_cache(queries, keys, values, length=length, num_tokens=num_tokens)
    path_for("exact_topk", queries.device)
    return torch_path.attend(
        queries, keys[:, :length], values[:, :length], num_tokens=num_tokens, scaling=scaling
    )
