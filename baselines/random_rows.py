"""Random rows: what any choice must be better than."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvferry.shared.compression.interface import LayerInputs, Method
from kvferry.shared.compression.plan import Budget, CompressionPlan, ParamValue, Part, read_params


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
        """Make a scorer from a plan's `Part.params`; raises as `read_params`."""
        return cls(**read_params("random", params, {"seed": int}))

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Return float32 `[H_kv, T]` in [0, 1)."""
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        streams = [np.random.PCG64((self.seed % 2**64, inputs.layer, head)) for head in range(num_kv_heads)]
        # its raw numbers are the same in every version of NumPy; those of NumPy's distributions may not be
        bits = np.stack([stream.random_raw(num_tokens) for stream in streams]) >> np.uint64(40)
        return torch.from_numpy(bits.astype(np.float32)).div_(2**24).to(inputs.keys.device)


METHOD = Method(
    plan=CompressionPlan(
        method="random", scorer=Part(name="random", params={"seed": 0}), budget=Budget(tokens=2048)
    ),
    scorer=RandomScorer.from_params,
)
