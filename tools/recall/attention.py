"""Causal attention for training the demo model: the fastest forward and backward pass on a CPU.

torch's fused attention reaches a fifth of a CPU's bf16 matrix rate. Plain products over blocks of queries,
which save their probabilities for the backward pass, reach two to three times as much, at `T^2 H` bytes a
row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK_QUERIES = 128


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute grouped-query attention of every position over itself and the earlier ones.

    Args: queries `[B, H, T, D]`; keys and values `[B, H_kv, T, D]`, H a multiple of H_kv.

    Returns: `[B, H, T, D]`.
    """
    if queries.device.type == "cpu":
        out: Tensor = _BlockedAttention.apply(queries, keys, values)  # type: ignore[no-untyped-call]
        return out
    # Repeating a small model's KV costs little, and a GPU has a fused kernel for it.
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)


class _BlockedAttention(torch.autograd.Function):
    """Explicit attention, a block of queries at a time over the keys up to the block's end."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        (b, heads, t, d), h_kv = queries.shape, keys.shape[1]
        n, group = b * h_kv, heads // h_kv
        queries = (queries * d**-0.5).reshape(n, group, t, d)
        keys, values = keys.reshape(n, t, d), values.reshape(n, t, d)
        out = torch.empty_like(queries)
        probabilities = []
        for start in range(0, t, _BLOCK_QUERIES):
            end = min(start + _BLOCK_QUERIES, t)
            block = queries[:, :, start:end].reshape(n, -1, d)
            scores = torch.bmm(block, keys[:, :end].transpose(1, 2)).view(n, group, end - start, end)
            later = scores.new_full((end - start, end - start), -math.inf).triu_(1)
            scores[..., start:] += later
            weights = torch.softmax(scores, -1).view(n, -1, end)
            out[:, :, start:end] = torch.bmm(weights, values[:, :end]).view(n, group, -1, d)
            if any(ctx.needs_input_grad):
                probabilities.append(weights)
        ctx.save_for_backward(queries, keys, values, *probabilities)
        return out.view(b, heads, t, d)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values, *probabilities = ctx.saved_tensors
        (n, group, t, d), b = queries.shape, gradients[0].shape[0]
        wanted = gradients[0].reshape(n, group, t, d)
        d_queries = torch.empty_like(queries)
        d_keys, d_values = (torch.zeros(n, t, d, dtype=torch.float32) for _ in range(2))
        for i, weights in enumerate(probabilities):
            start, end = i * _BLOCK_QUERIES, weights.shape[-1]
            d_out, block = (x[:, :, start:end].flatten(1, 2) for x in (wanted, queries))
            d_values[:, :end] += torch.bmm(weights.transpose(1, 2), d_out)
            d_weights = torch.bmm(d_out, values[:, :end].transpose(1, 2))
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_queries[:, :, start:end] = torch.bmm(d_scores, keys[:, :end]).view(n, group, -1, d)
            d_keys[:, :end] += torch.bmm(d_scores.transpose(1, 2), block)
        to_keys, to_values = (x.to(keys.dtype).view(b, -1, t, d) for x in (d_keys, d_values))
        return (d_queries * d**-0.5).view(b, -1, t, d), to_keys, to_values
