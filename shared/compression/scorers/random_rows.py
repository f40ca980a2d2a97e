"""Random scores: the baseline for every other scorer, with the same result on every worker.

Called per layer while the prompt is prefilled. The format selects the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import ParamValue, check_params

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = 64


@dataclass(frozen=True, kw_only=True)
class RandomScorer:
    """The score is a hash of (seed, layer, KV head, position): SplitMix64 in integers, so that device, prompt
    length and batch do not matter.

    Attributes:
        seed: different seeds select different rows.
    """

    seed: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> RandomScorer:
        """From a plan's `Part.params`. Raises InvalidRequest on missing, unknown or mistyped parameters."""
        check_params("random", params, {"seed": int})
        return cls(seed=int(params["seed"]))

    @property
    def observed_queries(self) -> int:
        return 0

    @property
    def depends_on_rows(self) -> bool:
        return False

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
