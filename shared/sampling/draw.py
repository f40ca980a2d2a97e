"""The arithmetic of sampling for a batch, on any device: penalties, truncation and the draw, in float64.

`SequenceSampler` uses it for one completion on the host, `BatchSampler` for a running batch on the model's
device. Both use the same operators and so draw the same tokens, up to the last bit of float64, which devices
may round differently. Nothing here synchronizes with the device. Legend: `[B, V]`, one row per completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from kvferry.shared.sampling.params import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
"""The parameters of a row without a completion."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """Which parts of sampling any completion of a batch needs; the others are skipped.

    Attributes:
        draws: a temperature above 0; truncates: top_k or top_p; penalises: a bias or a penalty.
    """

    draws: bool
    truncates: bool
    penalises: bool

    @classmethod
    def of(cls, batch: Sequence[SamplingParams]) -> Flavour:
        drawn = [params for params in batch if params.temperature != 0.0]
        return cls(
            draws=bool(drawn),
            truncates=any(params.top_k > 0 or params.top_p < 1.0 for params in drawn),
            penalises=any(
                params.logit_bias
                or params.repetition_penalty != 1.0
                or params.presence_penalty != 0.0
                or params.frequency_penalty != 0.0
                for params in batch
            ),
        )


NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


_numbers_of = attrgetter(*NUMBERS)


def numbers_of(batch: Sequence[SamplingParams]) -> Tensor:
    """The parameters used in the arithmetic: float64 `[len(NUMBERS), B]`, on the host."""
    return torch.tensor(list(map(_numbers_of, batch)), dtype=torch.float64).T.contiguous()


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """The state of a batch's penalties.

    Attributes: bias: float64 `[B, V]`; seen: bool `[B, V]`, ids in prompt and completion; counts: float64
    `[B, V]`, in the completion.
    """

    bias: Tensor
    seen: Tensor
    counts: Tensor

    def apply(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Steps 2 to 4 of `SequenceSampler`. Args: logits float64 `[B, V]`; numbers: as `numbers_of`."""
        repetition, presence, frequency = numbers[4:, :, None]
        logits = logits + self.bias
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self.seen, penalised, logits)
        logits = logits - presence * (self.counts > 0)
        less_frequent: Tensor = logits - frequency * self.counts
        return less_frequent

    def observe(self, tokens: Tensor, active: Tensor) -> None:
        """Record a token of each row. Args: tokens, active: int64 `[B]`; active is 0 or 1."""
        self.counts.scatter_add_(1, tokens[:, None], active[:, None].to(torch.float64))
        here = self.seen.gather(1, tokens[:, None]) | (active[:, None] > 0)
        self.seen.scatter_(1, tokens[:, None], here)


def draw(logits: Tensor, numbers: Tensor, uniforms: Tensor, flavour: Flavour) -> Tensor:
    """Steps 5 to 9 of `SequenceSampler`.

    Args: logits float64 `[B, V]`, penalised; numbers: as `numbers_of`; uniforms float64 `[B]` in [0, 1).
    Returns: int64 `[B]`; any id for a row whose logits are not finite.
    """
    greedy = logits.argmax(1)
    if not flavour.draws:
        return greedy
    temperature, top_k, top_p, min_p = numbers[:4, :, None]
    # Subtracting the maximum first prevents an overflow with a very small temperature.
    relative = logits - logits.amax(1, keepdim=True)
    weights = (relative / torch.where(temperature > 0, temperature, 1.0)).exp()
    if flavour.truncates:
        weights = _truncated(weights, top_k, top_p)
    weights = torch.where(weights >= min_p * weights.amax(1, keepdim=True), weights, 0.0)
    cumulative = weights.cumsum(1)
    target = uniforms[:, None] * cumulative[:, -1:]
    # right=True: the first id whose cumulative weight is above the target, so never one of weight 0.
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    ids = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(weights > 0, ids, 0).amax(1)
    return torch.where(temperature[:, 0] > 0, torch.minimum(drawn, last), greedy)


def _truncated(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights, with those excluded by top_k and top_p set to zero. The largest one is never excluded, of
    equal ones that of the lowest index.

    Args: weights float64 `[B, V]`, not normalised; top_k, top_p `[B, 1]`.
    """
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    ordered = torch.where((rank < top_k) | (top_k == 0), ordered, 0.0)
    reached = ordered.cumsum(1)
    inside = (reached - ordered < top_p * reached[:, -1:]) | (top_p >= 1.0) | (rank == 0)
    return torch.zeros_like(weights).scatter_(1, order, torch.where(inside, ordered, 0.0))
