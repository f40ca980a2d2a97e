"""Context-calibrated compression (Compactor section 3.5): the retention that a wanted quality needs.

Quality is a share y of 0 to 1, measured in one of three ways (`Measure`). A curve is fitted once per model
and method from measured triples, for any method, and evaluated once per context, with an estimate of the
context's NLL (negative log-likelihood). `kvferry calibrate` measures, fits, and writes one JSON file per
model with one curve per method (`calibrations.py`), which the router reads.

    {"format": 2, "model": "demo", "fingerprints": {"float32": "43f5...", ...}, "curves": {"snapkv":
     {"measure": "agreement", "alpha": ..., "beta": ..., "lowest_nll": ..., "highest_nll": ...,
      "observations": [...]}}, ...}

Deviation: the paper's y is a true answer's mean NLL with the full cache over its NLL with the compressed one.
That ratio falls long before an answer changes, so that 0.95 retained nearly everything; by default y is the
share of answers that agree.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from kvferry.shared.compression.calibrations import calibration_files
from kvferry.shared.errors import ConfigurationError, InvalidRequest

FORMAT = 2
SUFFIX = ".quality.json"
_STEPS = 10_000
"""Retentions are rounded up to a multiple of 1 / this, so that reports can show them exactly."""

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
        """Return the least retention at which the curve predicts this quality: its inverse, clamped to
        [0, 1], `rho* = log1p(tau expm1(b)) / b`.

        Args: quality: tau in [0, 1].
        Raises: InvalidRequest: quality is outside [0, 1].
        """
        if not 0 <= quality <= 1:
            raise InvalidRequest(
                f"quality is {quality}; it must be a number from 0 to 1", param="kv_compression.quality"
            )
        if quality in (0, 1):
            return float(quality)
        slope = self.alpha * nll + self.beta
        if abs(slope) < FLAT_SLOPE:
            retention = quality
        elif slope > _LARGE:
            # expm1(b) would overflow
            retention = 1 + math.log(quality + (1 - quality) * math.exp(-slope)) / slope
        else:
            retention = math.log1p(quality * math.expm1(slope)) / slope
        return min(max(retention, 0.0), 1.0)


def estimate_context_nll(token_ids: Sequence[int], *, vocab_size: int) -> float:
    """Estimate NLL(c), how hard a context is to predict, from its token ids alone; in nats per token.

    It is the code length of an adaptive bigram code, which learns each chunk's statistics from its tokens so
    far: `p(t | s) = (n(s, t) + p(t)) / (n(s) + 1)` with `p(t) = (n(t) + 1 / V) / (n + 1)`; n are counts of
    earlier tokens.

    Deviation: Compactor (section 3.5) takes the mean NLL of the context under the model itself. Decode
    reserves a sequence's memory before prefill has run a token, so the retention must be known earlier.
    Curves are fitted and evaluated with this same estimate.

    Args: token_ids: at least one; vocab_size: V, greater than every id.
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


@dataclass(frozen=True, kw_only=True)
class QualityCurve:
    """One method's curve and the range of contexts that it was fitted to.

    The curve does not extrapolate: an NLL outside the range is clamped to it, and no retention is below the
    least that was measured.

    Attributes:
        measure: what quality means.
        lowest_nll, highest_nll: the range of those contexts' NLL, by `estimate_context_nll`.
        observations: what the curve was fitted to.
    """

    measure: Measure = "agreement"
    calibration: Calibration
    lowest_nll: float
    highest_nll: float
    observations: tuple[Observation, ...] = ()

    def retention(self, quality: float, token_ids: Sequence[int], *, vocab_size: int) -> float:
        """Return the least retention in (0, 1] at which the curve predicts this quality for a prompt.

        Raises: InvalidRequest: quality is outside [0, 1].
        """
        nll = estimate_context_nll(token_ids, vocab_size=vocab_size)
        return self.retention_at(quality, nll=nll)

    def retention_at(self, quality: float, *, nll: float) -> float:
        """Return what `retention` does, for a context whose NLL is known."""
        within = min(max(nll, self.lowest_nll), self.highest_nll)
        exact = self.calibration.retention(quality, nll=within)
        least = min((o.retention for o in self.observations), default=0.0)
        return max(1, math.ceil(max(exact, least) * _STEPS - 1e-9)) / _STEPS


@dataclass(frozen=True, kw_only=True)
class ModelCurves:
    """The content of one file.

    Attributes:
        model: a name for people to read.
        fingerprints: by compute dtype, and "served", that of the measured model: a curve measured in one
            dtype is used for all.
        curves: by method.
        origin: how they were measured; any JSON.
    """

    model: str
    fingerprints: Mapping[str, str]
    curves: Mapping[str, QualityCurve]
    origin: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the model and a hash of its weights: `demo-550c2155`."""
        return f"{self.model}-{self.fingerprints['float32'][:8]}"

    @property
    def file_name(self) -> str:
        return f"{self.name}{SUFFIX}"


class CurveBook:
    """All curves that a process has read. A curve in a later file replaces the method's earlier one."""

    def __init__(self, files: Iterable[ModelCurves] = ()) -> None:
        self._curves: dict[tuple[str, str], QualityCurve] = {}
        for file in files:
            for fingerprint in file.fingerprints.values():
                self._curves.update({(fingerprint, method): curve for method, curve in file.curves.items()})

    @classmethod
    def read(cls, calibration: str) -> CurveBook:
        """Read all curves there are. Args: calibration: as in `calibration_files`.

        Raises: ConfigurationError: the folder does not exist, or a file is not a curve file.
        """
        return cls(load_curves(path) for path in calibration_files(calibration, SUFFIX))

    def find(self, fingerprint: str, method: str) -> QualityCurve | None:
        return self._curves.get((fingerprint, method))

    def methods(self, fingerprint: str) -> tuple[str, ...]:
        """Return the methods with a curve for a model."""
        return tuple(sorted(method for at, method in self._curves if at == fingerprint))


def load_curves(path: Path) -> ModelCurves:
    """Read one file. Raises: ConfigurationError: it cannot be read, or is not a curve file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return ModelCurves(
            model=content["model"],
            fingerprints=content["fingerprints"],
            curves={name: _curve(entry) for name, entry in content["curves"].items()},
            origin=content["origin"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is no file of kvferry calibrate, format {FORMAT}: {error}"
        ) from error


def _curve(entry: Mapping[str, Any]) -> QualityCurve:
    numbers = {name: float(entry[name]) for name in ("alpha", "beta", "lowest_nll", "highest_nll")}
    alpha, beta, lowest, highest = numbers.values()
    if not all(map(math.isfinite, numbers.values())) or lowest > highest:
        raise ValueError(f"a curve has {numbers}")
    if entry["measure"] not in get_args(Measure):
        raise ValueError(f"a curve's measure is {entry['measure']!r}")
    return QualityCurve(
        measure=entry["measure"],
        calibration=Calibration(alpha=alpha, beta=beta),
        lowest_nll=lowest,
        highest_nll=highest,
        observations=tuple(
            Observation(retention=rho, nll=nll, quality=quality)
            for rho, nll, quality in entry["observations"]
        ),
    )
