"""SparQ's decode attention in vectorised torch: no loop over heads or tokens. Arguments are checked by the
dispatch in `__init__.py`; shapes are as documented there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.torch_path import dense_decode
from kvferry.kernels.top_tokens import attend_tokens, top_tokens


def approximate_scores(queries: Tensor, keys: Tensor, *, num_channels: int, scaling: float) -> Tensor:
    """Each head's softmax over tokens, from r channels: float32 `[H_kv, G, n]`."""
    q = queries.float()
    q_abs = q.abs()
    channels = q_abs.sum(1).sort(dim=-1, descending=True, stable=True).indices[:, :num_channels]
    chosen = torch.zeros(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device).scatter_(
        1, channels, True
    )
    # reading whole rows with zeros in q beats gathering single channels on every device without our kernel
    q_kept = torch.where(chosen[:, None], q, 0.0)
    l1_kept = q_kept.abs().sum(-1, keepdim=True)
    # a head that is zero on these channels has logits of zero whatever it is divided by
    temperature = torch.where(l1_kept > 0, (l1_kept / q_abs.sum(-1, keepdim=True)).sqrt(), 1.0)
    return torch.matmul(q_kept * scaling / temperature, keys.float().transpose(1, 2)).softmax(dim=-1)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mean_value: Tensor,
    *,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """Over exactly the rows given.

    Args: mean_value float32 `[H_kv, D]`.
    """
    if keys.shape[1] <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    scores = approximate_scores(queries, keys, num_channels=num_channels, scaling=scaling)
    tokens = top_tokens(scores.mean(1), num_tokens)
    alpha = scores.gather(2, tokens[:, None].expand(-1, scores.shape[1], -1)).sum(-1, keepdim=True)
    exact = attend_tokens(queries, keys, values, tokens, scaling=scaling)
    return (alpha * exact.float() + (1 - alpha) * mean_value[:, None]).to(queries.dtype)
