"""H2O (Zhang et al. 2023): tokens of most accumulated attention, and the latest ones, half the budget each.

Called per layer while the prompt is prefilled. Does not select; `select.py` does.

Deviation: the paper goes on adding attention rows and evicting while decoding; here the choice is made once,
from the prompt's queries, and generated tokens all stay. With history the queries are those of the turn's new
tokens. Sums run over the group, so that a KV head keeps one choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.window_scores import window_scores
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.parameters import check_params
from kvferry.shared.compression.plan import ParamValue


@dataclass(frozen=True, kw_only=True)
class HeavyHitterScorer:
    """`s_t = sum_g sum_i softmax(q_{g,i} K^T * scaling)_t` over all the queries there are; the last
    `ceil(rows / 2)` tokens score +inf.

    Attributes:
        rows: rows to be kept per KV head; an odd one goes to the recent tokens.
    """

    rows: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> HeavyHitterScorer:
        """From a plan's `Part.params`. Raises InvalidRequest where there are any."""
        check_params("heavy_hitters", params, {})
        return cls(rows=rows)

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`, +inf on the recent tokens."""
        scores = window_scores(inputs.queries, inputs.keys, scaling=inputs.scaling)
        scores[:, -(self.rows - self.rows // 2) :] = torch.inf
        return scores
