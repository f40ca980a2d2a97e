"""The fit of a quality curve, against data with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.shared.compression.curves import (
    Calibration,
    Observation,
)
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.evaluation.fitting import fit_calibration, quality_curve

RETENTIONS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


def curve(retention: float, slope: float) -> float:
    rho, b = torch.tensor([retention, slope], dtype=torch.float64)
    return float(quality_curve(rho, b))


def predicted(calibration: Calibration, retention: float, nll: float) -> float:
    return curve(retention, calibration.alpha * nll + calibration.beta)


def observed(alpha: float, beta: float, nlls: tuple[float, ...], noise: float = 0.0) -> list[Observation]:
    """Points of a curve; `noise` is added and taken away in turn."""
    points = []
    for i, nll in enumerate(nlls):
        for j, retention in enumerate((0.0, *RETENTIONS, 1.0)):
            quality = curve(retention, alpha * nll + beta) + noise * (-1) ** (i + j)
            points.append(Observation(retention=retention, nll=nll, quality=max(quality, 0.0)))
    return points


@pytest.mark.parametrize(
    ("alpha", "beta"), [(2.0, -8.0), (-1.5, 1.0), (0.0, -6.0), (4.0, -4.0), (10.0, -20.0), (0.0, 0.0)]
)
def test_points_on_a_curve_give_that_curve_back(alpha: float, beta: float) -> None:
    fitted = fit_calibration(observed(alpha, beta, (0.2, 0.9, 1.7, 3.1)))
    assert fitted.alpha == pytest.approx(alpha, abs=1e-4)
    assert fitted.beta == pytest.approx(beta, abs=1e-4)


def test_contexts_of_one_nll_fit_with_alpha_0() -> None:
    fitted = fit_calibration(observed(3.0, -8.0, (1.5,)))
    assert fitted.alpha == 0
    assert fitted.beta == pytest.approx(-3.5, abs=1e-6)
    assert fitted.retention(0.95, nll=1.5) == pytest.approx(
        Calibration(alpha=0.0, beta=-3.5).retention(0.95, nll=0.0)
    )


def loss(calibration: Calibration, points: list[Observation], weight: float) -> float:
    total = 0.0
    for point in points:
        error = predicted(calibration, point.retention, point.nll) - point.quality
        total += (weight if error > 0 else 1.0) * error**2
    return total


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_a_fit_is_the_least_asymmetric_loss_around(weight: float) -> None:
    points = observed(1.0, -5.0, (0.5, 1.0, 2.0), noise=0.07)
    fitted = fit_calibration(points, over_prediction_weight=weight)
    best = loss(fitted, points, weight)
    for da in (-0.3, -0.01, 0.0, 0.01, 0.3):
        for db in (-0.3, -0.01, 0.0, 0.01, 0.3):
            other = Calibration(alpha=fitted.alpha + da, beta=fitted.beta + db)
            assert loss(other, points, weight) >= best - 1e-12


def test_promising_too_much_weighs_more() -> None:
    points = observed(1.0, -5.0, (0.5, 1.0, 2.0), noise=0.07)
    even = fit_calibration(points, over_prediction_weight=1.0)
    careful = fit_calibration(points)
    for nll in (0.5, 1.0, 2.0):
        assert predicted(careful, 0.25, nll) < predicted(even, 0.25, nll)
        assert careful.retention(0.9, nll=nll) > even.retention(0.9, nll=nll)


def test_more_surprising_contexts_keep_more() -> None:
    fitted = fit_calibration(observed(2.0, -8.0, (0.2, 0.9, 1.7, 3.1)))
    kept = [fitted.retention(0.95, nll=nll) for nll in (0.5, 1.0, 2.0, 3.0)]
    assert kept == sorted(kept)
    assert predicted(fitted, kept[0], 0.5) == pytest.approx(0.95)


@given(
    points=st.lists(
        st.builds(
            Observation,
            retention=st.floats(0.01, 0.99),
            nll=st.floats(0, 10),
            quality=st.floats(0, 1.5),
        ),
        min_size=2,
        max_size=12,
    )
)
@example(
    points=[
        Observation(retention=0.5, nll=2.0, quality=0.0),
        Observation(retention=0.5, nll=2.25, quality=1.0),
        Observation(retention=0.125, nll=6.0, quality=1.0),
    ]
)
@settings(max_examples=12)
def test_any_measurements_give_a_curve_no_worse_than_the_diagonal(points: list[Observation]) -> None:
    fitted = fit_calibration(points)
    assert math.isfinite(fitted.alpha)
    assert math.isfinite(fitted.beta)
    assert loss(fitted, points, 4.0) <= loss(Calibration(alpha=0.0, beta=0.0), points, 4.0) + 1e-6


@pytest.mark.parametrize("retentions", [(), (0.5,), (0.0, 1.0, 0.5)])
def test_too_few_measurements_are_refused(retentions: tuple[float, ...]) -> None:
    points = [Observation(retention=r, nll=1.0, quality=r) for r in retentions]
    with pytest.raises(ConfigurationError, match="at least 2"):
        fit_calibration(points)
