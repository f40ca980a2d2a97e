"""StreamingLLM (Xiao et al. 2024): the first tokens and the latest ones, whatever they say.

Called per layer while the prompt is prefilled. Does not select; `select.py` does.

Deviation: tokens keep the positions they had, where the paper renumbers those in the cache; and generated
tokens are never evicted, so what is attended grows with the completion.
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
    """Later tokens score higher; the first `min(sinks, rows - 1)` are always kept.

    Attributes:
        sinks: attention sinks, the paper's 4.
        rows: rows to be kept per KV head; the newest token has one of them before any sink.
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
        # not the position itself: float32 has no distinct numbers for long prompts
        scores[:, max(num_tokens - (self.rows - sinks), 0) :] = 1.0
        scores[:, :sinks] = torch.inf
        return scores
