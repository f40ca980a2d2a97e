"""SparQ (Ribar et al. 2024): a few channels choose the tokens to attend, the mean value fills in.

The running sum of the values is built when a transfer commits and grows with each appended row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_attention, check_size
from kvferry.kernels.softmax import Scaling, plain
from kvferry.kernels.torch_attention import attend_rows, attend_tokens, top_tokens
from kvferry.shared.compression.attention import CacheView, Choosing
from kvferry.shared.compression.interface import LayerShape, Method, TensorSpec
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part


@dataclass(frozen=True, kw_only=True)
class SparQ(Choosing):
    """Tokens by approximate scores from a few channels; the mean value stands for the others.

    Ribar et al. 2024; RocketKV appendix A.3.

    Attributes:
        num_channels: r, channels of K read for the scores.
    """

    name: ClassVar[str] = "sparq"
    takes_any_softmax: ClassVar[bool] = False
    num_channels: int

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int, row_dim: int) -> SparQ:
        """Spend half of the budget on reading channels of K, half on K and V of the chosen tokens.

        `r = floor(d/c)` with `c = cap/t`, so that r channels of cap keys take no more bytes than K and V of
        t/2 tokens; `floor(t/2)` tokens are attended. Latent rows have half of the bytes, so r is half, too.
        """
        num_channels = min(max(row_dim * budget // (2 * cap), 1), head_dim)
        return cls(num_channels=num_channels, num_tokens=max(budget // 2, 1))

    def specs(self, shape: LayerShape, num_rows: int, *, packed: bool = False) -> tuple[TensorSpec, ...]:
        """Return the spec of the running sum of the values, float32 `[H_kv, D]`."""
        return (TensorSpec(shape=(shape.num_kv_heads, shape.value_dim), dtype=torch.float32),)

    def build(self, cache: CacheView, *, length: int) -> None:
        torch.sum(cache.values[:, :length], dim=1, dtype=torch.float32, out=cache.auxiliary[0])

    def append(self, cache: CacheView, key: Tensor, value: Tensor, *, position: int) -> None:
        super().append(cache, key, value, position=position)
        cache.auxiliary[0].add_(value)

    def attend(self, queries: Tensor, cache: CacheView, *, length: int, scaling: Scaling) -> Tensor:
        """Compute `alpha * attn(q, K[I2], V[I2]) + (1 - alpha) * mean(V)`, I2 chosen per KV head.

        I1 = top-r channels of sum_G |q|; over tokens
        s_g = softmax(scaling * q_g[I1] . K[I1] / sqrt(|q_g[I1]|_1 / |q_g|_1)); I2 = top-k of the mean of s
        over G, k being num_tokens; alpha_g = sum of s_g over I2. If all rows are attended, nothing is
        filled in.

        Deviation: selections are per KV head (sums over G), and the newest token stands for the paper's local
        window. The softmax scale stands for 1/sqrt(D), which it equals in most models.
        """
        check_attention(queries, cache.keys, cache.values)
        check_size("length", length, 1, cache.keys.shape[1])
        scale, (value_sum,) = plain(scaling), cache.auxiliary
        keys, values = cache.keys[:, :length], cache.values[:, :length]
        if length <= self.num_tokens:
            return attend_rows(queries, keys, values, scaling=scale)
        scores = approximate_scores(queries, keys, num_channels=self.num_channels, scaling=scale)
        tokens = top_tokens(scores.mean(1), self.num_tokens)
        alpha = scores.gather(2, tokens[:, None].expand(-1, scores.shape[1], -1)).sum(-1, keepdim=True)
        exact = attend_tokens(queries, keys, values, tokens, scaling=scale)
        return (alpha * exact.float() + (1 - alpha) * (value_sum / length)[:, None]).to(queries.dtype)

    def _estimate_bytes(self, shape: LayerShape, num_rows: int, *, packed: bool) -> int:
        """Count the bytes of r channels of every key, and of the mean value."""
        return num_rows * self.num_channels * shape.dtype.itemsize + 4 * shape.value_dim


def approximate_scores(queries: Tensor, keys: Tensor, *, num_channels: int, scaling: float) -> Tensor:
    """Return each head's softmax over tokens, from r channels: float32 `[H_kv, G, n]`."""
    q = queries.float()
    q_abs = q.abs()
    channels = q_abs.sum(1).sort(dim=-1, descending=True, stable=True).indices[:, :num_channels]
    chosen = torch.zeros_like(q_abs[:, 0], dtype=torch.bool).scatter_(1, channels, True)
    # reading whole rows with zeros in q is faster than gathering single channels
    q_kept = torch.where(chosen[:, None], q, 0.0)
    l1_kept = q_kept.abs().sum(-1, keepdim=True)
    # a head that is zero on these channels has logits of zero for any divisor
    temperature = torch.where(l1_kept > 0, (l1_kept / q_abs.sum(-1, keepdim=True)).sqrt(), 1.0)
    return torch.matmul(q_kept * scaling / temperature, keys.float().transpose(1, 2)).softmax(dim=-1)


METHOD = Method(
    plan=CompressionPlan(method="sparq", attention=Part(name=SparQ.name), budget=Budget(tokens=512)),
    attention=SparQ,
)
