"""Scores that depend on positions only: StreamingLLM (Xiao et al. 2024), and random ones to compare with.

Called per layer while the prompt is prefilled. The format selects the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Between, ParamValue, read_params

_MAX_SINKS = 4096
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = 64


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
    """The score is a hash of (seed, layer, KV head, position): SplitMix64 in integers, so that device, prompt
    length, batch and worker do not matter.

    Attributes:
        seed: different seeds select different rows.
    """

    observed_queries: ClassVar[int] = 0
    protected_rows: ClassVar[int] = 0
    depends_on_rows: ClassVar[bool] = False
    seed: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> RandomScorer:
        """From a plan's `Part.params`; raises as `read_params`."""
        return cls(**read_params("random", params, {"seed": int}))

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]` in [0, 1)."""
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        device = inputs.keys.device
        state = _mix(torch.tensor(_signed(self.seed), device=device) + _signed(_GOLDEN))
        for counter in (
            torch.tensor(inputs.layer, device=device),
            torch.arange(num_kv_heads, device=device)[:, None],
            torch.arange(num_tokens, device=device),
        ):
            state = _mix((state ^ counter) + _signed(_GOLDEN))
        return _shift(state, _BITS - 24).to(torch.float32) / 2**24


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose arithmetic wraps like that of uint64."""
    state = (state ^ _shift(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(_MIX_2)
    return state ^ _shift(state, 31)


def _shift(state: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's own shift is arithmetic."""
    return (state >> bits) & ((1 << (_BITS - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << _BITS) - 1
    return value - (1 << _BITS) if value >= 1 << (_BITS - 1) else value
