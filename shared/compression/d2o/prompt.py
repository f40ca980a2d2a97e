"""One layer of a prompt under D2O: evict, then merge. Called by prefill once the layer's budget is known.

Does not sum attention (`kernels.column_sums`) and does not choose the budget (`layer_budgets.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvferry.shared.compression.d2o.eviction import NUM_SINKS, kept_positions, zones
from kvferry.shared.compression.d2o.merging import merge_prompt


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """What decode needs of a layer: the arguments of `MergingCache`, K and V without its extra row.

    Attributes:
        keys, values: `[H_kv, S, D]`, the prompt's dtype, merged, in position order.
        positions: int32 `[H_kv, S]`, ascending.
        scores: float32 `[H_kv, S]`, accumulated attention of those tokens alone.
        thresholds: float32 `[H_kv]`, tau_0; NaN where nothing was evicted.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor
    thresholds: Tensor


def evict_and_merge(
    keys: Tensor, values: Tensor, scores: Tensor, *, rows: int, num_sinks: int = NUM_SINKS
) -> PromptRows:
    """Bring a layer to S rows per KV head (D2O section 4.2, prompt encoding).

    Args:
        keys, values: `[H_kv, T, D]`, keys post-RoPE.
        scores: float32 `[H_kv, T]`, `column_sums(...).sums`.
        rows: S, 1 to T, the layer's budget.
    """
    positions = kept_positions(scores, zones(rows, num_sinks=num_sinks))
    merged = merge_prompt(keys, values, positions)
    return PromptRows(
        keys=merged.keys,
        values=merged.values,
        positions=positions,
        scores=scores.gather(1, positions.long()),
        thresholds=merged.thresholds,
    )
