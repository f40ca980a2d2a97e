"""StreamingLLM (Xiao et al. 2024): the first tokens and the latest ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.shared.compression.interface import LayerInputs, Method
from kvferry.shared.compression.plan import (
    Between,
    Budget,
    CompressionPlan,
    ParamValue,
    Part,
    read_params,
)

_MAX_SINKS = 4096


@dataclass(frozen=True, kw_only=True)
class StreamingScorer:
    """The latest tokens score 1, the others 0; the first `min(sinks, rows - 1)` are always selected.

    Deviation: tokens keep their original positions, while the paper renumbers those in the cache. Generated
    tokens are never evicted, so the number of attended rows grows with the completion.

    Attributes:
        sinks: number of attention sinks; 4 in the paper.
        rows: rows to select per KV head; the newest token comes before any sink.
    """

    observed_queries: ClassVar[int] = 0
    depends_on_rows: ClassVar[bool] = True
    scores_heads_apart: ClassVar[bool] = True
    sinks: int
    rows: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> StreamingScorer:
        """Make a scorer from a plan's `Part.params`; raises as `read_params`."""
        return cls(**read_params("streaming", params, {"sinks": Between(0, _MAX_SINKS)}), rows=rows)

    @property
    def protected_rows(self) -> int:
        return min(self.sinks, self.rows - 1)

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Return float32 `[H_kv, T]`: recents 1, others 0, sinks +inf."""
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        sinks = self.protected_rows
        scores = torch.zeros(num_kv_heads, num_tokens, device=inputs.keys.device)
        # not the position itself: float32 cannot tell the positions of a long prompt apart
        scores[:, max(num_tokens - (self.rows - sinks), 0) :] = 1.0
        scores[:, :sinks] = torch.inf
        return scores


METHOD = Method(
    plan=CompressionPlan(
        method="streamingllm",
        scorer=Part(name="streaming", params={"sinks": 4}),
        budget=Budget(tokens=2048),
    ),
    scorer=StreamingScorer.from_params,
)
