"""Exact top-k: reads every key to choose t tokens, the best that any estimate can do.

Reduces what is attended, not what is read: an upper bound on the quality of HSA, Quest and SparQ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_attention, check_size
from kvferry.kernels.softmax import Scaling, scale_of
from kvferry.kernels.torch_attention import attend_rows, attend_tokens, top_tokens
from kvferry.shared.compression.attention import CacheView, Choosing
from kvferry.shared.compression.interface import Method
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part


@dataclass(frozen=True, kw_only=True)
class ExactTopK(Choosing):
    """The t tokens with the largest true attention (RocketKV appendix A.3).

    It reads all keys to find them, so it is an upper bound for sparse attention and saves no traffic. That
    reading is not counted.
    """

    name: ClassVar[str] = "exact_topk"

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int, row_dim: int) -> ExactTopK:
        """Spend the whole budget on attention."""
        return cls(num_tokens=budget)

    def attend(self, queries: Tensor, cache: CacheView, *, length: int, scaling: Scaling) -> Tensor:
        """Attend exactly to the t tokens of largest `mean_g softmax(scaling * q_g K^T)`, chosen per KV head;
        t is num_tokens."""
        check_attention(queries, cache.keys, cache.values)
        check_size("length", length, 1, cache.keys.shape[1])
        keys, values = cache.keys[:, :length], cache.values[:, :length]
        if length <= self.num_tokens:
            return attend_rows(queries, keys, values, scaling=scaling)
        tokens = top_tokens(token_scores(queries, keys, scaling=scale_of(scaling)), self.num_tokens)
        return attend_tokens(queries, keys, values, tokens, scaling=scaling)


def token_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """Return the mean over the group of each head's softmax over tokens: float32 `[H_kv, n]`."""
    logits = torch.matmul(queries.float() * scaling, keys.float().transpose(1, 2))
    return logits.softmax(dim=-1).mean(1)


METHOD = Method(
    plan=CompressionPlan(method="exact-topk", attention=Part(name=ExactTopK.name), budget=Budget(tokens=512)),
    attention=ExactTopK,
)
