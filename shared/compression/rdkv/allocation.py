"""Bit allocation of one layer: V tokens first, then K channels over the retained tokens (RDKV section 3.2).

Called by RDKV's compression between weights and packing. Budgets are in bits of codes; scales, minima and
indexes are not part of the budget and are counted separately.

Legend: H_kv KV heads, T prompt tokens, D head_dim, B_tok budget in tokens per head, n retained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.compression.rdkv.epsilon import WIDTHS, EpsilonTable
from kvferry.shared.compression.rdkv.knapsack import KnapsackSolution, solve_knapsack

SCALE_BITS = 64
"""A float32 scale and a float32 minimum for each unit below 16 bits."""
POSITION_BITS = 32
CHANNEL_BITS = 16


@dataclass(frozen=True, kw_only=True)
class LayerAllocation:
    """The widths of one layer.

    Attributes:
        values: bits `[H_kv, T]` of V tokens; with 0 the token is dropped, K and V.
        keys: bits `[H_kv, D]` of K channels over the retained tokens; with 0 the channel is dropped.
    """

    values: KnapsackSolution
    keys: KnapsackSolution

    @property
    def num_kept(self) -> Tensor:
        """n, int64 `[H_kv]`."""
        return (self.values.bits > 0).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class BitCount:
    """The bits of one layer's allocation, before alignment and padding.

    Attributes:
        codes: what the budget counts: codes, and values stored at 16 bits.
        scales: scales and minima, which the budget does not count.
        index: positions of retained tokens and numbers of retained channels.
    """

    codes: int
    scales: int
    index: int


def allocate(
    token_weights: Tensor,
    channel_weights: Tensor,
    *,
    budget_tokens: int,
    table: EpsilonTable,
    widths: Sequence[int] = WIDTHS,
) -> LayerAllocation:
    """V tokens get `16 B_tok` bits summed over a head's tokens, per channel; K channels get
    `floor(16 B_tok D / n)` bits summed over channels, per retained token, and at most `16 D`.

    The channel weights are those of the whole prompt; they are not recomputed for the retained tokens
    (section 3.2).

    Args:
        token_weights: `[H_kv, T]`.
        channel_weights: `[H_kv, D]`.
        budget_tokens: B_tok, at least 1: the budget is the bits of K and V of this many tokens in full
            precision.
        widths: the allowed widths (Table 4's ablations), ascending, a subset of `WIDTHS`; the budget must
            suffice for the least width for every token.

    Raises:
        KvferryError: a weight is negative or not finite.
    """
    assert budget_tokens >= 1, budget_tokens
    num_kv_heads, num_tokens = token_weights.shape
    head_dim = channel_weights.shape[1]
    share = WIDTHS[-1] * min(budget_tokens, num_tokens)
    value_budget = torch.full((num_kv_heads,), share, dtype=torch.int64, device=token_weights.device)
    values = solve_knapsack(token_weights, table.value_curve, value_budget, widths=widths)
    kept = (values.bits > 0).sum(dim=1)
    key_budget = (share * head_dim // kept.clamp(min=1)).clamp(max=WIDTHS[-1] * head_dim)
    keys = solve_knapsack(
        channel_weights, table.key_curve, torch.where(kept > 0, key_budget, 0), widths=widths
    )
    return LayerAllocation(values=values, keys=keys)


def count_bits(allocation: LayerAllocation) -> BitCount:
    """Bits of one layer, summed over its KV heads."""
    key_bits, value_bits = allocation.keys.bits.long(), allocation.values.bits.long()
    kept = allocation.num_kept
    code_bits = (key_bits.sum(dim=1) * kept + value_bits.sum(dim=1) * key_bits.shape[1]).sum()
    coded = _below_16(key_bits).sum() + _below_16(value_bits).sum()
    index = kept.sum() * POSITION_BITS + (key_bits > 0).sum() * CHANNEL_BITS
    return BitCount(codes=int(code_bits), scales=int(coded) * SCALE_BITS, index=int(index))


def _below_16(bits: Tensor) -> Tensor:
    return (bits > 0) & (bits < WIDTHS[-1])
