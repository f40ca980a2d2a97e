"""Scores by the attention of the prompt's last queries: SnapKV, and RocketKV's first stage.

Called per layer while the prompt is prefilled. The format selects the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.kernels.window_scores import window_scores
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ParamValue, check_params
from kvferry.shared.errors import InvalidRequest

MAX_WINDOW = 4096
MAX_KERNEL_SIZE = 4095


@dataclass(frozen=True, kw_only=True)
class WindowAttentionScorer:
    """`s = pool(sum_g sum_i softmax(q_{g,i} K^T * scaling))` over the columns before the window.

    The window is the last w = min(window, rows, T_new) queries. Its own columns are left out of the pooling
    and score +inf, so they are always selected. Pooling comes after the sums, with stride 1 and padding of
    kernel_size // 2: "avg" counts the padding's zeros (SnapKV, Li et al. 2024, kernel 7 or 5), "max" ignores
    them (RocketKV section 3.3, kernel 63).

    Attributes:
        rows: rows to select per KV head; the window never protects more than that.
    """

    window: int
    pooling: Literal["avg", "max"]
    kernel_size: int
    rows: int

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MAX_WINDOW:
            raise InvalidRequest(
                f"window is {self.window}; it must be 1 to {MAX_WINDOW}", param="kv_compression.window"
            )
        if self.pooling not in ("avg", "max"):
            raise InvalidRequest(
                f"pooling is {self.pooling!r}; it must be avg or max", param="kv_compression.pooling"
            )
        if not 1 <= self.kernel_size <= MAX_KERNEL_SIZE or self.kernel_size % 2 == 0:
            raise InvalidRequest(
                f"kernel_size is {self.kernel_size}; it must be odd, 1 to {MAX_KERNEL_SIZE}",
                param="kv_compression.kernel_size",
            )
        if self.rows < 1:
            raise InvalidRequest(f"rows is {self.rows}; it must be at least 1", param="kv_compression")

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> WindowAttentionScorer:
        """From a plan's `Part.params`. Raises InvalidRequest on missing, unknown or mistyped parameters."""
        check_params("window_attention", params, {"window": int, "pooling": str, "kernel_size": int})
        return cls(
            window=int(params["window"]),
            pooling=cast(Literal["avg", "max"], params["pooling"]),
            kernel_size=int(params["kernel_size"]),
            rows=rows,
        )

    @property
    def observed_queries(self) -> int:
        return self.window

    @property
    def depends_on_rows(self) -> bool:
        return False

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`, +inf on the window's columns."""
        num_tokens = inputs.keys.shape[1]
        window = min(self.window, self.rows, inputs.queries.shape[2])
        scores = inputs.keys.new_full((inputs.keys.shape[0], num_tokens), torch.inf, dtype=torch.float32)
        before = num_tokens - window
        if before > 0:
            sums = window_scores(inputs.queries[:, :, -window:], inputs.keys, scaling=inputs.scaling)
            scores[:, :before] = self._pool(sums[:, :before])
        return scores

    def _pool(self, sums: Tensor) -> Tensor:
        padding = self.kernel_size // 2
        if self.pooling == "avg":
            return F.avg_pool1d(sums[:, None], self.kernel_size, stride=1, padding=padding)[:, 0]
        return F.max_pool1d(sums[:, None], self.kernel_size, stride=1, padding=padding)[:, 0]
