"""Calibrated quality curves on disk: one JSON file per model, one curve per method.

`kvferry calibrate quality` writes them. The router reads its folders once at start and evaluates the curve of
a request's model and method. `calibration.py` fits the curves.

    {"format": 2, "model": "demo", "fingerprints": {"float32": "43f5...", ...}, "curves": {"snapkv":
     {"measure": "agreement", "alpha": ..., "beta": ..., "lowest_nll": ..., "highest_nll": ...,
      "observations": [...]}}, ...}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from kvferry.shared.compression.calibration import Calibration, Measure, Observation, estimate_context_nll
from kvferry.shared.errors import ConfigurationError

FORMAT = 2
SUFFIX = ".quality.json"
_STEPS = 10_000
"""Retentions are rounded up to a multiple of 1 / this, so that reports can show them exactly."""


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
        """The least retention in (0, 1] at which the curve predicts this quality for a prompt.

        Raises: InvalidRequest: quality is outside [0, 1].
        """
        nll = estimate_context_nll(token_ids, vocab_size=vocab_size)
        return self.retention_at(quality, nll=nll)

    def retention_at(self, quality: float, *, nll: float) -> float:
        """As `retention`, for a context whose NLL is known."""
        within = min(max(nll, self.lowest_nll), self.highest_nll)
        exact = self.calibration.retention(quality, nll=within)
        least = min((o.retention for o in self.observations), default=0.0)
        return max(1, math.ceil(max(exact, least) * _STEPS - 1e-9)) / _STEPS


@dataclass(frozen=True, kw_only=True)
class ModelCurves:
    """The content of one file.

    Attributes:
        model: a name for people to read.
        fingerprints: by compute dtype; a curve measured in one dtype is used for all.
        curves: by method.
        origin: how they were measured; any JSON.
    """

    model: str
    fingerprints: Mapping[str, str]
    curves: Mapping[str, QualityCurve]
    origin: Mapping[str, Any]

    @property
    def file_name(self) -> str:
        """The name of the model and a hash of its weights: `demo-550c2155.quality.json`."""
        return f"{self.model}-{self.fingerprints['float32'][:8]}{SUFFIX}"


class CurveBook:
    """All curves that a process has read. A curve in a later folder replaces the method's earlier one."""

    def __init__(self, files: Iterable[ModelCurves] = ()) -> None:
        self._curves: dict[tuple[str, str], QualityCurve] = {}
        for file in files:
            for fingerprint in file.fingerprints.values():
                self._curves.update({(fingerprint, method): curve for method, curve in file.curves.items()})

    @classmethod
    def read(cls, folders: Iterable[Path]) -> CurveBook:
        """Read all curves of the folders.

        Raises: ConfigurationError: a folder does not exist, or a file in it is not a curve file.
        """
        files: list[ModelCurves] = []
        for folder in folders:
            if not folder.is_dir():
                raise ConfigurationError(f"calibration is {str(folder)!r}; it must be a folder")
            files += [load_curves(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
        return cls(files)

    def find(self, fingerprint: str, method: str) -> QualityCurve | None:
        return self._curves.get((fingerprint, method))

    def methods(self, fingerprint: str) -> tuple[str, ...]:
        """Methods with a curve for a model."""
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
            f"{path} is no file of kvferry calibrate quality, format {FORMAT}: {error}"
        ) from error


def _curve(entry: Mapping[str, Any]) -> QualityCurve:
    names = ("alpha", "beta", "lowest_nll", "highest_nll")
    alpha, beta, lowest, highest = (float(entry[name]) for name in names)
    if not all(map(math.isfinite, (alpha, beta, lowest, highest))) or lowest > highest:
        raise ValueError(f"a curve has {dict(zip(names, (alpha, beta, lowest, highest), strict=True))}")
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
