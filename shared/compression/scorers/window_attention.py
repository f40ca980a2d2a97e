"""Scores by the attention of the prompt's last queries: SnapKV, and RocketKV's first stage.

Called per layer while the prompt is prefilled. The format selects the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.kernels.column_sums import window_scores
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Allowed, Between, ParamValue, read_params

_ALLOWED: Allowed = {
    "window": Between(1, 4096),
    "pooling": ("avg", "max"),
    "kernel_size": Between(1, 4095, odd=True),
    "recents": Between(0, 4096),
}


@dataclass(frozen=True, kw_only=True)
class WindowAttentionScorer:
    """`s = pool(sum_g sum_i softmax(q_{g,i} K^T * scaling))` over the columns before the protected ones.

    The window is the last w = min(window, T_new) queries. The last p = min(recents, max(rows // 4, 1))
    columns are left out of the pooling and score +inf, so they are always selected. Pooling comes after the
    sums, with stride 1 and padding of kernel_size // 2: "avg" counts the padding's zeros, "max" ignores them.
    The papers have "avg" 7 or 5 (SnapKV, Li et al. 2024) and "max" 63 (RocketKV section 3.3).

    Deviation: the papers protect every column of the window. At small budgets nothing else would be selected,
    so the window observes, and only a few recent rows are protected; its other columns compete by their
    scores.

    Attributes:
        recents: the most last tokens that are protected.
        rows: rows to select per KV head; at most a quarter of them is protected, but the newest always is.
    """

    depends_on_rows: ClassVar[bool] = False
    scores_heads_apart: ClassVar[bool] = True
    window: int
    pooling: Literal["avg", "max"]
    kernel_size: int
    recents: int
    rows: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> WindowAttentionScorer:
        """From a plan's `Part.params`; raises as `read_params`."""
        return cls(**read_params("window_attention", params, _ALLOWED), rows=rows)

    @property
    def observed_queries(self) -> int:
        return self.window

    @property
    def protected_rows(self) -> int:
        return min(self.recents, max(self.rows // 4, 1))

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`, +inf on the protected columns."""
        num_tokens = inputs.keys.shape[1]
        window = min(self.window, inputs.queries.shape[2])
        scores = inputs.keys.new_full((inputs.keys.shape[0], num_tokens), torch.inf, dtype=torch.float32)
        before = num_tokens - min(self.protected_rows, num_tokens)
        if before > 0:
            sums = window_scores(inputs.queries[:, :, -window:], inputs.keys, scaling=inputs.scaling)
            scores[:, :before] = self._pool(sums[:, :before])
        return scores

    def _pool(self, sums: Tensor) -> Tensor:
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(sums[:, None], self.kernel_size, stride=1, padding=self.kernel_size // 2)[:, 0]
