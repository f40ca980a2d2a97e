"""Quality curves: fitted to measured triples, and written to a model's file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvferry.shared.compression.curves import (
    FLAT_SLOPE,
    FORMAT,
    Calibration,
    Measure,
    ModelCurves,
    Observation,
    QualityCurve,
    load_curves,
)
from kvferry.shared.errors import ConfigurationError

OVER_PREDICTION_WEIGHT = 4.0
"""The weight of a squared error where the curve predicts more quality than was measured. The paper does not
publish its weight."""
_STARTS = (-12.0, -4.0, -1.0, 1.0, 4.0, 12.0)
_MAX_STEPS = 200
_LEAST_NLL = 1e-6
"""Nats. An answer below it counts as certain, and the ratio of two such answers is 1."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One answer from the full cache and from a compressed one.

    Attributes:
        retention: rho, the budget as a fraction of the prompt.
        context_nll: of the prompt, by `estimate_context_nll`.
        full, compressed: with each cache the right answer's mean NLL, or 1 where the answer is the one
            wanted, else 0.
    """

    retention: float
    context_nll: float
    full: float
    compressed: float


def fit_curve(budgets: Sequence[Sequence[Comparison]], *, measure: Measure, groups: int) -> QualityCurve:
    """Fit a method's curve.

    Deviation: the paper's y is one context's. Here it is computed from means over contexts of similar NLL(c),
    because one answer either agrees or does not, and the NLL of an answer that a model is certain of is near
    0, so that the ratio of two such values is noise.

    Args:
        budgets: the comparisons at each budget.
        groups: into how many groups of similar contexts those of a budget are divided.

    Raises: ConfigurationError: fewer than two budgets are below the whole prompt, or the full cache answers
        none of a group right.
    """
    observations = [
        Observation(
            retention=fmean(comparison.retention for comparison in group),
            nll=fmean(comparison.context_nll for comparison in group),
            quality=_quality(
                fmean(comparison.full for comparison in group),
                fmean(comparison.compressed for comparison in group),
                measure,
            ),
        )
        for compared in budgets
        for group in _groups(compared, groups)
    ]
    means = [o.nll for o in observations]
    return QualityCurve(
        measure=measure,
        calibration=fit_calibration(observations),
        lowest_nll=min(means),
        highest_nll=max(means),
        observations=tuple(observations),
    )


def _groups(compared: Sequence[Comparison], number: int) -> Iterator[Sequence[Comparison]]:
    """Divide comparisons into groups of about equal size, by the contexts' NLL."""
    ordered = sorted(compared, key=lambda comparison: comparison.context_nll)
    ends = [len(ordered) * i // number for i in range(number + 1)]
    return (ordered[start:end] for start, end in pairwise(ends))


def _quality(full: float, compressed: float, measure: Measure) -> float:
    """Compute y from the two means."""
    if measure == "nll":
        return max(full, _LEAST_NLL) / max(compressed, _LEAST_NLL)
    if full == 0:
        raise ConfigurationError(
            f"--measure is {measure!r}, and the full KV answers no prompt of a group right; take agreement, "
            "or other prompts"
        )
    return compressed / full


def quality_curve(retention: Tensor, slope: Tensor) -> Tensor:
    """Compute `f_b(rho) = expm1(b rho) / expm1(b)`: it rises from 0 at 0 to 1 at 1, and is rho if b is 0.

    Args: retention: rho in [0, 1]. slope: b, of a shape that broadcasts.
    Returns: float64.
    """
    rho, b = retention.double(), slope.double()
    safe = torch.where(b.abs() < FLAT_SLOPE, 1.0, b)
    negative = -safe.abs()
    # for b > 0: expm1(b rho) / expm1(b) = e^{b (rho - 1)} expm1(-b rho) / expm1(-b), which never overflows
    ratio = torch.expm1(negative * rho) / torch.expm1(negative)
    curve = torch.where(safe > 0, ratio * torch.exp(safe * (rho - 1)), ratio)
    return torch.where(b.abs() < FLAT_SLOPE, rho, curve)


def fit_calibration(
    observations: Sequence[Observation], *, over_prediction_weight: float = OVER_PREDICTION_WEIGHT
) -> Calibration:
    """Find the least squares of `f_b(rho) - y` over alpha and beta; predicting too much has a larger weight.

    L-BFGS from several starts; deterministic. If all contexts have the same NLL, alpha is 0.

    Args: over_prediction_weight: weight of the squared errors where f > y; the others have weight 1.
    Raises: ConfigurationError: fewer than two observations have a retention strictly between 0 and 1; at 0
        and 1 every curve has the same value.
    """
    inner = [o for o in observations if 0 < o.retention < 1]
    if len(inner) < 2:
        raise ConfigurationError(
            f"{len(inner)} observations have a retention between 0 and 1; a curve needs at least 2"
        )
    rho = torch.tensor([o.retention for o in inner], dtype=torch.float64)
    nll = torch.tensor([o.nll for o in inner], dtype=torch.float64)
    quality = torch.tensor([o.quality for o in inner], dtype=torch.float64)
    centre, spread = nll.mean(), nll.std(correction=0)
    varies = bool(spread > 1e-9)
    # b = gain * z + level with z-scored NLL, so that both parameters have the same scale
    z = (nll - centre) / spread if varies else torch.zeros_like(nll)
    design = torch.stack([z, torch.ones_like(z)], dim=1)
    # The diagonal is a candidate. Where points contradict each other, L-BFGS can end with values that are not
    # finite; such a fit is dropped.
    fits = [
        (
            float(_loss(torch.zeros(2, dtype=torch.float64), design, rho, quality, over_prediction_weight)),
            [0.0, 0.0],
        )
    ]
    for start in _STARTS:
        parameters = torch.tensor([0.0, start], dtype=torch.float64, requires_grad=True)
        found = _descend(parameters, design, rho, quality, over_prediction_weight)
        if math.isfinite(found) and bool(parameters.isfinite().all()):
            fits.append((found, parameters.tolist()))
    _, (gain, level) = min(fits)
    alpha = gain / float(spread) if varies else 0.0
    return Calibration(alpha=alpha, beta=level - alpha * float(centre))


def _loss(parameters: Tensor, design: Tensor, rho: Tensor, quality: Tensor, weight: float) -> Tensor:
    residuals = quality_curve(rho, design @ parameters) - quality
    return (torch.where(residuals > 0, weight, 1.0) * residuals.square()).sum()


def _descend(parameters: Tensor, design: Tensor, rho: Tensor, quality: Tensor, weight: float) -> float:
    """Minimise the loss over (gain, level) in place; returns the loss."""

    def evaluate() -> Tensor:
        parameters.grad = None
        value = _loss(parameters, design, rho, quality, weight)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser = torch.optim.LBFGS(
        [parameters],
        max_iter=_MAX_STEPS,
        tolerance_grad=1e-13,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )
    optimiser.step(evaluate)  # type: ignore[no-untyped-call]
    return float(evaluate().detach())


def save_curves(folder: Path, found: ModelCurves) -> Path:
    """Write a model's curves to its file; returns the path. Curves of other methods in the file stay.

    The file is replaced atomically, so a reader never sees a part of it.

    Raises: ConfigurationError: the file exists and is not a curve file, or cannot be written.
    """
    path = folder / found.file_name
    before = load_curves(path).curves if path.exists() else {}
    content = {
        "format": FORMAT,
        "model": found.model,
        "fingerprints": dict(found.fingerprints),
        "origin": dict(found.origin),
        "curves": {name: _entry(curve) for name, curve in sorted({**before, **found.curves}.items())},
    }
    temporary = path.with_name(path.name + ".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigurationError(f"the quality curves cannot be written to {path}: {error}") from error
    return path


def _entry(curve: QualityCurve) -> dict[str, Any]:
    return {
        "measure": curve.measure,
        **asdict(curve.calibration),
        "lowest_nll": curve.lowest_nll,
        "highest_nll": curve.highest_nll,
        "observations": [[o.retention, o.nll, o.quality] for o in curve.observations],
    }
