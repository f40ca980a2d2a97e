"""Quest (Tang et al. 2024): upper bounds of whole pages choose the tokens to attend.

Pages are built and grown as those of `kernels.hsa`: the auxiliary tensors are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_attention
from kvferry.kernels.hsa import check_pages, num_pages
from kvferry.kernels.softmax import Scaling, scale_of
from kvferry.kernels.torch_attention import attend_rows, attend_tokens, top_tokens
from kvferry.shared.compression.attention import CacheView, Paged
from kvferry.shared.compression.interface import LayerShape, Method
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part


@dataclass(frozen=True, kw_only=True)
class Quest(Paged):
    """Tokens of the pages with the highest upper bounds (Tang et al. 2024; RocketKV appendix A.3)."""

    name: ClassVar[str] = "quest"

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int, row_dim: int) -> Quest:
        """Spend half of the budget on reading bounds, half on K and V.

        `P = ceil(cap/t)`, so that one extreme of d channels for each of cap/P pages takes no more bytes than
        K and V of t/2 tokens, twice that for latent rows; `floor(t/2)` tokens are attended. If the query
        heads of a group differ in sign on a channel, both extremes of the channel are read.
        """
        page_size = -(-2 * head_dim * cap // (row_dim * budget))
        return cls(page_size=max(page_size, 1), num_tokens=max(budget // 2, 1))

    def attend(self, queries: Tensor, cache: CacheView, *, length: int, scaling: Scaling) -> Tensor:
        """Attend exactly to the k tokens whose pages have the highest upper bounds, chosen per KV head; k is
        num_tokens.

        A page's logit of head g is `scaling * sum_d max(q_gd Kmax_d, q_gd Kmin_d)`, over all channels;
        softmax over tokens per head (a page's logit stands for each of its tokens), mean over G, top-k.

        Deviation: whole pages are not forced: if k is not a multiple of P the last chosen page is cut, so
        that the budget is exact.
        """
        page_size, extremes = self.page_size, self.extremes(cache)
        check_attention(queries, cache.keys, cache.values)
        check_pages(cache.keys, *extremes, length=length, page_size=page_size)
        keys, values = cache.keys[:, :length], cache.values[:, :length]
        if length <= self.num_tokens:
            return attend_rows(queries, keys, values, scaling=scaling)
        used = [extreme[:, : num_pages(length, page_size)] for extreme in extremes]
        scores = token_scores(queries, *used, length=length, page_size=page_size, scaling=scale_of(scaling))
        tokens = top_tokens(scores, self.num_tokens)
        return attend_tokens(queries, keys, values, tokens, scaling=scaling)

    def _estimate_bytes(self, shape: LayerShape, num_rows: int, *, packed: bool) -> int:
        """Count the bytes of one of Kmax and Kmin for every channel of each page."""
        return num_pages(num_rows, self.page_size) * shape.head_dim * shape.dtype.itemsize


def token_scores(
    queries: Tensor, page_max: Tensor, page_min: Tensor, *, length: int, page_size: int, scaling: float
) -> Tensor:
    """Return the mean over the group of each head's bounded softmax over tokens: float32 `[H_kv, n]`."""
    q = queries.float() * scaling
    # max(q Kmax, q Kmin) is q Kmax where q is positive, q Kmin where it is not
    logits = torch.matmul(q.clamp(min=0), page_max.float().transpose(1, 2))
    logits += torch.matmul(q.clamp(max=0), page_min.float().transpose(1, 2))  # [H_kv, G, pages]

    # softmax over tokens: a page's term counts once for each of its tokens
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    pages = page_max.shape[1]
    counts = torch.full((pages,), float(page_size), device=q.device)
    counts[-1] = length - (pages - 1) * page_size
    scores = (weights / (weights @ counts)[..., None]).mean(1)
    return scores.repeat_interleave(page_size, dim=1)[:, :length]


METHOD = Method(
    plan=CompressionPlan(
        method="quest", attention=Part(name=Quest.name, params={"dense_layers": 2}), budget=Budget(tokens=512)
    ),
    attention=Quest,
)
