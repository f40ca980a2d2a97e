"""Context-calibrated compression (Compactor section 3.5): the retention that a wanted quality needs.

Quality is a share y of 0 to 1, measured in one of three ways (`Measure`). A curve is fitted once per model
and method from measured triples, for any method, and evaluated once per context, with an estimate of the
context's NLL (negative log-likelihood). `kvferry calibrate` measures and fits.

Deviation: the paper's y is a true answer's mean NLL with the full cache over its NLL with the compressed one.
That ratio falls long before an answer changes, so that 0.95 retained nearly everything; by default y is the
share of answers that agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvferry.shared.errors import ConfigurationError, InvalidRequest

Measure = Literal["agreement", "exact", "nll"]
"""What y is: the share of greedy answers that equal the full cache's; right answers as a share of the full
cache's; or the NLL of right answers with the full cache over that with the compressed one."""

FLAT_SLOPE = 1e-8
"""With a slope nearer to 0 than this the curve is a straight line in float64."""
_LARGE = 30.0
CHUNK_TOKENS = 1024
"""Tokens after which the code's counts are reset; otherwise a long context would have a lower NLL."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Questions answered from compressed contexts of similar NLL.

    Attributes:
        retention: rho, the fraction of tokens kept, in [0, 1].
        nll: mean NLL of the context's own tokens, in nats.
        quality: y; at least 0.
    """

    retention: float
    nll: float
    quality: float

    def __post_init__(self) -> None:
        if not 0 <= self.retention <= 1:
            raise ConfigurationError(f"retention is {self.retention}; it must be 0 to 1")
        for name, value in (("nll", self.nll), ("quality", self.quality)):
            if not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} is {value}; it must be finite and at least 0")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The curve of one model and method: `f_b(rho) = expm1(b rho) / expm1(b)`, `b = alpha NLL(c) + beta`."""

    alpha: float
    beta: float

    def retention(self, quality: float, *, nll: float) -> float:
        """The least retention, in [0, 1], at which the curve predicts this quality.

        Args: quality: tau in [0, 1].
        Raises: InvalidRequest: quality is outside [0, 1].
        """
        return retention_for(quality, self.alpha * nll + self.beta)


def retention_for(quality: float, slope: float) -> float:
    """The curve's inverse: `rho* = log1p(tau expm1(b)) / b`, clamped to [0, 1].

    Args: quality: tau. slope: b.
    Raises: InvalidRequest: quality is outside [0, 1].
    """
    if not 0 <= quality <= 1:
        raise InvalidRequest(
            f"quality is {quality}; it must be a number from 0 to 1", param="kv_compression.quality"
        )
    if quality in (0, 1):
        return float(quality)
    if abs(slope) < FLAT_SLOPE:
        retention = quality
    elif slope > _LARGE:
        # expm1(b) would overflow
        retention = 1 + math.log(quality + (1 - quality) * math.exp(-slope)) / slope
    else:
        retention = math.log1p(quality * math.expm1(slope)) / slope
    return min(max(retention, 0.0), 1.0)


def estimate_context_nll(token_ids: Sequence[int], *, vocab_size: int) -> float:
    """NLL(c): how hard a context is to predict, from its token ids alone; nats per token.

    The code length of an adaptive bigram code, which learns each chunk's statistics from the tokens so far:
    `p(t | s) = (n(s, t) + p(t)) / (n(s) + 1)` with `p(t) = (n(t) + 1 / V) / (n + 1)`; n are counts of earlier
    tokens.

    Deviation: Compactor (section 3.5) takes the mean NLL of the context under the model itself. Decode
    reserves a sequence's memory before prefill has run a token, so the retention must be known earlier.
    Curves are fitted and evaluated with this same estimate.

    Args: token_ids: at least one. vocab_size: V, greater than every id.
    """
    assert token_ids
    num_chunks = max(1, len(token_ids) // CHUNK_TOKENS)
    ends = [len(token_ids) * i // num_chunks for i in range(num_chunks + 1)]
    total = sum(_code_length(token_ids[start:end], vocab_size) for start, end in pairwise(ends))
    return total / len(token_ids)


def _code_length(token_ids: Sequence[int], vocab_size: int) -> float:
    single: Counter[int] = Counter()
    followed: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    total, before = 0.0, -1
    for num_before, token_id in enumerate(token_ids):
        alone = (single[token_id] + 1 / vocab_size) / (num_before + 1)
        total -= math.log((pairs[before, token_id] + alone) / (followed[before] + 1))
        single[token_id] += 1
        followed[before] += 1
        pairs[before, token_id] += 1
        before = token_id
    return total
