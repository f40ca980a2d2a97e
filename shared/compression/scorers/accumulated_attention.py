"""Scores by accumulated attention, beside sinks and recents: H2O (Zhang et al. 2023), D2O section 4.2.1.

Called per layer while the prompt is prefilled. The format selects the rows. The decode attentions "evict" and
"merge" continue with the same sums and the same zones.

Deviation: with history, the queries are those of the turn's new tokens, because older queries are not stored.
Sums run over the group, so that all query heads of a KV head share one selection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvferry.shared.compression.d2o.eviction import Zones, half_zones, protected, zones
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ParamValue, read_params


@dataclass(frozen=True, kw_only=True)
class AccumulatedAttentionScorer:
    """`s_t = sum_g sum_i softmax(q_{g,i} K^T * scaling)_t` over all available queries, causal; sinks and
    recents score +inf.

    Attributes:
        layer_zones: how the selected rows of a KV head divide into sinks, important rows and recents.
    """

    observed_queries: ClassVar[None] = None
    depends_on_rows: ClassVar[bool] = True
    scores_heads_apart: ClassVar[bool] = True
    layer_zones: Zones

    @classmethod
    def heavy_hitters(cls, params: Mapping[str, ParamValue], rows: int) -> AccumulatedAttentionScorer:
        """H2O's zones: half of the rows, rounded up, are recents. Raises InvalidRequest on any parameter."""
        read_params("heavy_hitters", params, {})
        return cls(layer_zones=half_zones(rows))

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> AccumulatedAttentionScorer:
        """D2O's zones: 4 sinks, then three important rows for each recent one. Raises as `heavy_hitters`."""
        read_params("accumulated_attention", params, {})
        return cls(layer_zones=zones(rows))

    @property
    def protected_rows(self) -> int:
        return self.layer_zones.num_sinks + self.layer_zones.num_recents

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`, +inf on sinks and recents."""
        sums = inputs.with_sums().sums
        assert sums is not None
        return protected(sums.sums, self.layer_zones)
