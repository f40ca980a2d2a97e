"""Attention whose softmax differs from softmax(scaling * q K^T): capped logits, and sinks.

Layers of a few models (Gemma 2, gpt-oss) need it, in prefill, which runs in torch, and in decode, which the
kernels of dense decode and HSA run, too. All others pass their scale as a float.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Softmax:
    """logits l = scaling * q K^T, or softcap * tanh(l / softcap); weights e^l / (sum e^l + e^sink).

    Attributes:
        softcap: 0 caps nothing.
        sinks: `[H_kv, G]`: the logit of one more token, whose value is zero; None if there is none.
    """

    scaling: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    def heads(self, start: int, stop: int) -> Softmax:
        sinks = None if self.sinks is None else self.sinks[start:stop]
        return Softmax(scaling=self.scaling, softcap=self.softcap, sinks=sinks)


Scaling = float | Softmax
"""How logits become weights: the scale of a plain softmax, or another one."""


def scale_of(scaling: Scaling) -> float:
    """Return the scale alone, for estimates that only rank tokens."""
    return scaling.scaling if isinstance(scaling, Softmax) else scaling


def as_softmax(scaling: Scaling) -> Softmax:
    """Return the softmax of a scale: a plain one for a number, with nothing capped and no sinks."""
    return scaling if isinstance(scaling, Softmax) else Softmax(scaling=scaling)


def plain(scaling: Scaling) -> float:
    """Return the scale of a plain softmax, for attention without any other; plans with another are
    refused."""
    assert not isinstance(scaling, Softmax), "this attention has no soft-capping and no sinks"
    return scaling


def attend_softmax(
    queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax, *, mask: Tensor | None = None
) -> Tensor:
    """Compute attention in float32.

    Args:
        queries: `[H_kv, G, T, D]`; keys and values `[H_kv, n, D]`.
        mask: bool `[T, n]`, True for keys that a query attends to, at least one; None: all.

    Returns: `[H_kv, G, T, D]` in the queries' dtype.
    """
    num_kv_heads, group_size, num_queries, head_dim = queries.shape
    flat = queries.float().reshape(num_kv_heads, group_size * num_queries, head_dim)
    logits = torch.bmm(flat, keys.float().mT).mul_(softmax.scaling)
    if softmax.softcap:
        logits = logits.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    logits = logits.view(num_kv_heads, group_size, num_queries, keys.shape[1])
    if mask is not None:
        logits = logits.masked_fill_(~mask, -torch.inf)
    if softmax.sinks is not None:
        sinks = softmax.sinks.float()[:, :, None, None].expand(-1, -1, num_queries, 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    attended = torch.bmm(weights.reshape(num_kv_heads, group_size * num_queries, -1), values.float())
    return attended.view(*queries.shape[:3], -1).to(queries.dtype)
