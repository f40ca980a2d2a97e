"""Scores that depend on positions only: StreamingLLM (Xiao et al. 2024), and random ones to compare with.

Called per layer while the prompt is prefilled. The format selects the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Between, ParamValue, read_params

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
        """From a plan's `Part.params`; raises as `read_params`."""
        return cls(**read_params("streaming", params, {"sinks": Between(0, _MAX_SINKS)}), rows=rows)

    @property
    def protected_rows(self) -> int:
        return min(self.sinks, self.rows - 1)

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`: recents 1, others 0, sinks +inf."""
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        sinks = self.protected_rows
        scores = torch.zeros(num_kv_heads, num_tokens, device=inputs.keys.device)
        # not the position itself: float32 cannot tell the positions of a long prompt apart
        scores[:, max(num_tokens - (self.rows - sinks), 0) :] = 1.0
        scores[:, :sinks] = torch.inf
        return scores


@dataclass(frozen=True, kw_only=True)
class RandomScorer:
    """The scores are numbers of NumPy's PCG64 for (seed, layer, KV head), so that device, prompt length,
    batch and worker do not matter.

    Attributes:
        seed: different seeds select different rows.
    """

    observed_queries: ClassVar[int] = 0
    protected_rows: ClassVar[int] = 0
    depends_on_rows: ClassVar[bool] = False
    scores_heads_apart: ClassVar[bool] = False
    seed: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> RandomScorer:
        """From a plan's `Part.params`; raises as `read_params`."""
        return cls(**read_params("random", params, {"seed": int}))

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]` in [0, 1)."""
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        streams = [np.random.PCG64((self.seed % 2**64, inputs.layer, head)) for head in range(num_kv_heads)]
        # its raw numbers are the same in every version of NumPy; those of its distributions need not be
        bits = np.stack([stream.random_raw(num_tokens) for stream in streams]) >> np.uint64(40)
        return torch.from_numpy(bits.astype(np.float32)).div_(2**24).to(inputs.keys.device)
