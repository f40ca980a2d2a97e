"""Decode attention at a fixed size: a row leaves for every row that comes. H2O drops it, D2O merges it.

Dense attention over what is there, whose probabilities then decide what leaves. The state (scores, positions,
thresholds) begins in prefill and travels with the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.d2o.cache import EvictingCache
from kvferry.shared.compression.d2o.eviction import Zones, half_zones, zones
from kvferry.shared.compression.d2o.merging import merge_prompt

_SCORE_BYTES = 4
_POSITION_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class _Evicting:
    """The part of `AttentionKind` that both share.

    auxiliary: scores float32 `[H_kv, rows]`, positions int32 `[H_kv, rows]` (their last column, that of
    the token under way, is not used); where rows are merged, thresholds float32 `[H_kv]` as well
    state: scores `[H_kv, n]`, then thresholds `[H_kv]`
    """

    evicts: ClassVar[bool] = True
    merges: ClassVar[bool]
    zones_of: ClassVar[Callable[[int], Zones]]

    def auxiliary_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        per_row = (num_kv_heads, num_rows)
        specs = (
            TensorSpec(shape=per_row, dtype=torch.float32),
            TensorSpec(shape=per_row, dtype=torch.int32),
        )
        return (*specs, TensorSpec(shape=(num_kv_heads,), dtype=torch.float32)) if self.merges else specs

    def state_size(self, *, num_kv_heads: int, num_rows: int) -> int:
        return num_kv_heads * (num_rows + 1 if self.merges else num_rows)

    def keep(
        self, keys: Tensor, values: Tensor, sums: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKind.keep`; D2O section 4.2, prompt encoding, where rows are merged."""
        index = positions.long()
        scores = sums.gather(1, index).flatten()
        if self.merges:
            merged = merge_prompt(keys, values, positions)
            return merged.keys, merged.values, torch.cat([scores, merged.thresholds])
        wide = index[:, :, None].expand(-1, -1, keys.shape[2])
        return keys.gather(1, wide), values.gather(1, wide), scores

    def build(self, keys: Tensor, values: Tensor, auxiliary: tuple[Tensor, ...], *, length: int) -> None:
        raise AssertionError("what K and V do not tell is loaded, not built")

    def load(
        self, auxiliary: tuple[Tensor, ...], *, positions: Tensor | None, state: Tensor, length: int
    ) -> None:
        scores, rows = auxiliary[0][:, :length], auxiliary[1][:, :length]
        thresholds = state[scores.numel() :]
        if not (state[: scores.numel()] >= 0).all() or not state[: scores.numel()].isfinite().all():
            raise ValueError("accumulated attention must be finite and at least 0")
        if thresholds.isinf().any():
            raise ValueError("merging thresholds must not be infinite")
        scores.copy_(state[: scores.numel()].view_as(scores))
        rows.copy_(positions if positions is not None else torch.arange(length).expand_as(rows))
        if self.merges:
            auxiliary[2].copy_(thresholds)

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        key: Tensor,
        value: Tensor,
        *,
        position: int,
    ) -> None:
        self._cache(keys, values, auxiliary).append(key, value)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        *,
        length: int,
        scaling: float,
    ) -> Tensor:
        cache = self._cache(keys, values, auxiliary)
        output, attention_row = cache.attend(queries, scaling=scaling)
        cache.evict(attention_row)
        return output

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        """K, V, scores and positions; K once more to find the row to merge into."""
        row_bytes = head_dim * element_bytes
        state_bytes = _SCORE_BYTES + _POSITION_BYTES
        return num_rows * ((3 if self.merges else 2) * row_bytes + state_bytes)

    def _cache(self, keys: Tensor, values: Tensor, auxiliary: tuple[Tensor, ...]) -> EvictingCache:
        rows = keys.shape[1] - 1
        return EvictingCache(
            keys=keys,
            values=values,
            scores=auxiliary[0][:, :rows],
            positions=auxiliary[1][:, :rows],
            layer_zones=type(self).zones_of(rows),
            thresholds=auxiliary[2] if self.merges else None,
        )


@dataclass(frozen=True, kw_only=True)
class Evict(_Evicting):
    """Implements `AttentionKind`: H2O (Zhang et al. 2023). The row of least accumulated attention that is not
    among the latest half leaves at each step."""

    merges: ClassVar[bool] = False
    zones_of: ClassVar[Callable[[int], Zones]] = staticmethod(half_zones)

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> Evict:
        return cls()


@dataclass(frozen=True, kw_only=True)
class Merge(_Evicting):
    """Implements `AttentionKind`: D2O section 4.2. The row that leaves is merged into its nearest row where
    they are near enough."""

    merges: ClassVar[bool] = True
    zones_of: ClassVar[Callable[[int], Zones]] = staticmethod(zones)

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> Merge:
        return cls()
