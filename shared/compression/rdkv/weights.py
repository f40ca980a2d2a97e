"""Distortion weights: how much a V token or a K channel matters to attention (RDKV section 3.1).

First step of RDKV's compression, once per layer, from the prompt's last queries.

Legend: H_kv KV heads, G query heads per KV head, W queries of the window, T prompt tokens, D head_dim.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.kernels.column_sums import window_scores

ChannelWeights = Literal["norms", "mean_squares"]
_PER_DEVIATION = 0.125
"""So little that nearly all bits go to many tokens of few bits. With 1, few tokens take most bits, and on the
demo model (n = 20, 2.5 % of the bytes, questions after compression) the four tasks have 100, 60, 70 and 40 %
in place of 100, 95, 95 and 90 %."""

_QUESTIONS_SHARE = 0.03
"""Of a draft's weights, what the question's attention counts: it finds what the answer needs after the draft.
With less, that is hardly found; more costs the draft's tokens bits of K, which all retained tokens share
(benchmarks/results/eval/README.md)."""


def token_weights(
    queries: Tensor, keys: Tensor, *, scaling: float, kernel_size: int = 5, num_ahead: int = 0
) -> Tensor:
    """`w_t = sum_{g, tau} a_{tau, t}` (Eq. 2) over all T columns, average-pooled with stride 1.

    Pooling pads by reflection; if T <= kernel_size // 2 there is no reflection, and the weights are not
    pooled. No token is protected.

    Args:
        queries: post-RoPE `[H_kv, G, W, D]`, the prompt's last W <= T queries.
        keys: post-RoPE `[H_kv, T, D]`.
        scaling: the softmax scale.
        kernel_size: odd; 1 means no pooling.
        num_ahead: how many of the last queries and keys are of a draft's tokens, which are not weighed.

    Returns: float32 `[H_kv, T - num_ahead]`.
    """
    assert kernel_size % 2 == 1, kernel_size
    sums = window_scores(queries, keys, scaling=scaling)[:, : keys.shape[1] - num_ahead]
    padding = kernel_size // 2
    if sums.shape[1] <= padding:
        return sums
    padded = F.pad(sums[:, None], (padding, padding), mode="reflect")
    return F.avg_pool1d(padded, kernel_size, stride=1)[:, 0]


def draft_weights(drafted: Tensor, attention: Tensor) -> Tensor:
    """`w_t = d_t + 0.03 a_t`: what the draft's queries attend to, and what the question's do.

    Args: drafted, attention: float32 `[H_kv, T]`, of `token_weights`, divided by the number of queries.
    Returns: float32 `[H_kv, T]`.
    """
    return drafted + _QUESTIONS_SHARE * attention


def score_weights(scores: Tensor) -> Tensor:
    """`w_t = exp(s_t / 8)` of standardised scores; a token with +inf weighs as much as the highest other one.

    Deviation: the paper weighs tokens by the attention of the prompt's last queries, which know the question.
    With the scores of a method that does not, the same allocation serves questions that come later.

    Args: scores: float32 `[H_kv, T]`, +inf where a token is protected.
    Returns: float32 `[H_kv, T]`.
    """
    protected = scores == torch.inf
    highest = scores.masked_fill(protected, -torch.inf).amax(dim=1, keepdim=True)
    others = scores.where(~protected, highest.nan_to_num(neginf=0.0))
    return (others * _PER_DEVIATION).exp()


def joint_weights(attention: Tensor, scores: Tensor) -> Tensor:
    """`w_t = max(a_t, a_(r))`, where r is the rank of `s_t` among its head's scores and `a_(r)` the r-th
    largest of its attention weights. The scores have another unit, so only their order counts.

    Deviation: the paper weighs by attention alone. That drops tokens that the question does not name but that
    lead to its answer, such as the first of two assignments over which a variable is traced.

    Args:
        attention: float32 `[H_kv, T]`, of `token_weights`.
        scores: float32 `[H_kv, T]`, +inf where a token is protected; of equal ones the first ranks higher.
    Returns: float32 `[H_kv, T]`.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    ranked = attention.sort(dim=1, descending=True).values
    return torch.maximum(attention, torch.empty_like(attention).scatter_(1, order, ranked))


def channel_weights(queries: Tensor, keys: Tensor, *, variant: ChannelWeights = "norms") -> Tensor:
    """`w_c = |Q_c| |K_c| / sqrt(D)` (Eq. 4): one norm over group and window, one over all T tokens.

    Args:
        queries: post-RoPE `[H_kv, G, W, D]`.
        keys: post-RoPE `[H_kv, T, D]`.
        variant: "norms" as in the paper; "mean_squares" as in the authors' code, `mean(Q_c^2) mean(K_c^2)`:
            the square of the paper's weight, up to a factor that all channels share.

    Returns: float32 `[H_kv, D]`.
    """
    q, k = queries.float(), keys.float()
    if variant == "mean_squares":
        return q.square().mean(dim=(1, 2)) * k.square().mean(dim=1)
    norms = q.square().sum(dim=(1, 2)).sqrt() * k.square().sum(dim=1).sqrt()
    return norms / math.sqrt(keys.shape[2])
