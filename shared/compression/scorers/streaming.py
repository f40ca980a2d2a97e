"""StreamingLLM (Xiao et al. 2024): selects the first and the latest tokens, whatever their content.

Called per layer while the prompt is prefilled. The format selects the rows.

Deviation: tokens keep their original positions, while the paper renumbers those in the cache. Generated
tokens are never evicted, so the number of attended rows grows with the completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ParamValue, check_params
from kvferry.shared.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class StreamingScorer:
    """The latest tokens score 1, the others 0; the first `min(sinks, rows - 1)` are always selected.

    Attributes:
        sinks: number of attention sinks; 4 in the paper.
        rows: rows to select per KV head; the newest token comes before any sink.
    """

    sinks: int
    rows: int

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise InvalidRequest(
                f"sinks is {self.sinks}; it must be at least 0", param="kv_compression.sinks"
            )

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> StreamingScorer:
        """From a plan's `Part.params`. Raises InvalidRequest on missing, unknown or mistyped parameters."""
        check_params("streaming", params, {"sinks": int})
        return cls(sinks=int(params["sinks"]), rows=rows)

    @property
    def observed_queries(self) -> int:
        return 0

    @property
    def depends_on_rows(self) -> bool:
        return True

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`: recents 1, others 0, sinks +inf."""
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        sinks = min(self.sinks, self.rows - 1)
        scores = torch.zeros(num_kv_heads, num_tokens, device=inputs.keys.device)
        # not the position itself: float32 cannot tell the positions of a long prompt apart
        scores[:, max(num_tokens - (self.rows - sinks), 0) :] = 1.0
        scores[:, :sinks] = torch.inf
        return scores
