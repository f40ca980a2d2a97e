"""Context-calibrated compression (Compactor section 3.5): the retention that a wanted quality needs.

Quality is a ratio y: a true answer's mean negative log-likelihood (NLL) with the full cache, over its NLL
with the compressed one. A curve is fitted once per model and method from measured triples, for any method,
and evaluated once per context. Pure functions: this module does not measure, run a model or store anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.shared.errors import ConfigurationError, InvalidRequest

OVER_PREDICTION_WEIGHT = 4.0
"""The weight of a squared error where the curve predicts more quality than was measured. The paper does not
publish its weight."""
_SMALL = 1e-8
"""With a slope nearer to 0 than this the curve is a straight line in float64."""
_SMALL_IN_DERIVATIVE = 1e-4
_LARGE = 30.0
_STARTS = (-12.0, -4.0, -1.0, 1.0, 4.0, 12.0)
_MAX_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One question answered from one compressed context.

    Attributes:
        retention: rho, the fraction of tokens kept, in [0, 1].
        nll: mean NLL of the context's own tokens, in nats.
        quality: y, NLL of the answer with the full cache over that with the compressed one; at least 0.
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

    def quality(self, retention: float, *, nll: float) -> float:
        """The predicted quality of a context with this NLL at a retention of 0 to 1."""
        rho, slope = torch.tensor([retention, self._slope(nll)], dtype=torch.float64)
        return float(quality_curve(rho, slope))

    def retention(self, quality: float, *, nll: float) -> float:
        """The least retention, in [0, 1], at which the curve predicts this quality.

        Args: quality: tau in [0, 1]; at 0.95 an answer's NLL may grow by about 5 %.
        Raises: InvalidRequest: quality is outside [0, 1].
        """
        return retention_for(quality, self._slope(nll))

    def _slope(self, nll: float) -> float:
        return self.alpha * nll + self.beta


def quality_curve(retention: Tensor, slope: Tensor) -> Tensor:
    """`f_b(rho) = expm1(b rho) / expm1(b)`: it rises from 0 at 0 to 1 at 1, and is rho if b is 0.

    Args: retention: rho in [0, 1]. slope: b, of a shape that broadcasts.
    Returns: float64.
    """
    rho, b = retention.double(), slope.double()
    safe = torch.where(b.abs() < _SMALL, 1.0, b)
    negative = -safe.abs()
    # for b > 0: expm1(b rho) / expm1(b) = e^{b (rho - 1)} expm1(-b rho) / expm1(-b), which never overflows
    ratio = torch.expm1(negative * rho) / torch.expm1(negative)
    curve = torch.where(safe > 0, ratio * torch.exp(safe * (rho - 1)), ratio)
    return torch.where(b.abs() < _SMALL, rho, curve)


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
    if abs(slope) < _SMALL:
        retention = quality
    elif slope > _LARGE:
        # expm1(b) would overflow
        retention = 1 + math.log(quality + (1 - quality) * math.exp(-slope)) / slope
    else:
        retention = math.log1p(quality * math.expm1(slope)) / slope
    return min(max(retention, 0.0), 1.0)


def fit_calibration(
    observations: Sequence[Observation], *, over_prediction_weight: float = OVER_PREDICTION_WEIGHT
) -> Calibration:
    """Least squares of `f_b(rho) - y` over alpha and beta, with a larger weight for predicting too much.

    Levenberg-Marquardt from several starts; deterministic. If all contexts have the same NLL, alpha is 0.

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
    fits = [_descend(design, rho, quality, level, over_prediction_weight) for level in _STARTS]
    _, (gain, level) = min(fits, key=lambda fit: fit[0])
    alpha = gain / float(spread) if varies else 0.0
    return Calibration(alpha=alpha, beta=level - alpha * float(centre))


def _descend(
    design: Tensor, rho: Tensor, quality: Tensor, level: float, weight: float
) -> tuple[float, tuple[float, float]]:
    """Loss and parameters (gain, level) of one Levenberg-Marquardt descent."""
    parameters = torch.tensor([0.0, level], dtype=torch.float64)
    loss, residuals, weights = _loss(design, rho, quality, parameters, weight)
    damping = 1e-2
    for _ in range(_MAX_STEPS):
        jacobian = design * _slope_derivative(rho, design @ parameters)[:, None]
        normal = jacobian.T @ (weights[:, None] * jacobian)
        gradient = jacobian.T @ (weights * residuals)
        damped = normal + damping * (
            torch.diag(normal.diagonal()) + 1e-12 * torch.eye(2, dtype=torch.float64)
        )
        step = torch.linalg.solve(damped, gradient)
        candidate = parameters - step
        new_loss, new_residuals, new_weights = _loss(design, rho, quality, candidate, weight)
        if new_loss < loss:
            converged = loss - new_loss <= 1e-14 * loss
            parameters, loss, residuals, weights = candidate, new_loss, new_residuals, new_weights
            damping = max(damping / 4, 1e-10)
        else:
            converged = damping > 1e10
            damping *= 8
        if converged:
            break
    return loss, (float(parameters[0]), float(parameters[1]))


def _loss(
    design: Tensor, rho: Tensor, quality: Tensor, parameters: Tensor, weight: float
) -> tuple[float, Tensor, Tensor]:
    residuals = quality_curve(rho, design @ parameters) - quality
    weights = torch.where(residuals > 0, weight, 1.0).double()
    return float((weights * residuals.square()).sum()), residuals, weights


def _slope_derivative(rho: Tensor, slope: Tensor) -> Tensor:
    """`df/db = f (rho / (1 - e^{-b rho}) - 1 / (1 - e^{-b}))`, rho > 0; its limit where b is near 0."""
    small = slope.abs() < _SMALL_IN_DERIVATIVE
    safe = torch.where(small, 1.0, slope)
    exact = quality_curve(rho, safe) * (1 / torch.expm1(-safe) - rho / torch.expm1(-safe * rho))
    return torch.where(small, rho * (rho - 1) / 2, exact)
