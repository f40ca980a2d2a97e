"""The quality curve, its inverse and its fit, against their equations and against data with known answers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.compression.curves import Calibration, Observation
from kvferry.shared.errors import ConfigurationError, InvalidRequest
from kvferry.tools.evaluation.fitting import quality_curve

RETENTIONS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
shares = st.floats(0, 1)
slopes = st.one_of(st.floats(-40, 40), st.floats(-1e-3, 1e-3), st.floats(-1e-7, 1e-7), st.floats(-2000, 2000))


def curve(retention: float, slope: float) -> float:
    rho, b = torch.tensor([retention, slope], dtype=torch.float64)
    return float(quality_curve(rho, b))


def retention_for(quality: float, slope: float) -> float:
    return Calibration(alpha=0.0, beta=slope).retention(quality, nll=0.0)


@pytest.mark.parametrize("slope", [-30.0, -3.0, -0.01, 0.01, 2.0, 30.0])
@pytest.mark.parametrize("retention", [0.0, 0.03, 0.5, 0.97, 1.0])
def test_the_curve_is_the_papers(slope: float, retention: float) -> None:
    expected = math.expm1(slope * retention) / math.expm1(slope)
    assert curve(retention, slope) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@given(retention=shares, slope=slopes)
def test_the_curve_runs_from_0_to_1_without_overflow(retention: float, slope: float) -> None:
    value = curve(retention, slope)
    assert 0 <= value <= 1
    assert curve(0.0, slope) == 0
    assert curve(1.0, slope) == 1
    # above the diagonal where contexts compress well (b < 0), below it where they do not
    assert (value - retention) * slope <= 1e-12


@given(retention=shares, other=shares, slope=slopes)
def test_more_tokens_never_promise_less(retention: float, other: float, slope: float) -> None:
    low, high = sorted((retention, other))
    assert curve(low, slope) <= curve(high, slope) + 1e-12


@given(quality=shares, slope=slopes)
def test_the_inverse_gives_the_wanted_quality(quality: float, slope: float) -> None:
    retention = retention_for(quality, slope)
    assert 0 <= retention <= 1
    # where the curve is steep, one step of a float of retention is a visible step of quality
    assert curve(retention, slope) == pytest.approx(quality, abs=1e-11 * max(1, abs(slope)))


@pytest.mark.parametrize(("quality", "slope"), [(0.95, -3.0), (0.95, 2.5), (0.5, 20.0)])
def test_the_inverse_is_the_papers(quality: float, slope: float) -> None:
    expected = math.log1p(quality * math.expm1(slope)) / slope
    assert retention_for(quality, slope) == pytest.approx(expected, rel=1e-12)


def test_a_flat_slope_needs_the_share_that_is_wanted() -> None:
    assert retention_for(0.95, 0.0) == 0.95
    assert float(Fraction(curve(0.25, 0.0))) == 0.25


@pytest.mark.parametrize("quality", [-0.01, 1.01, math.nan, math.inf])
def test_a_quality_outside_0_to_1_is_refused(quality: float) -> None:
    with pytest.raises(InvalidRequest, match="quality is"):
        retention_for(quality, 1.0)


@pytest.mark.parametrize("slope", [-30.0, -2.0, -2e-4, 0.0, 2e-4, 2.0, 30.0])
def test_the_derivative_is_the_curves(slope: float) -> None:
    """The one that the fit descends by."""
    b = torch.tensor(slope, dtype=torch.float64)
    rho = torch.tensor(RETENTIONS, dtype=torch.float64)
    step = 1e-4
    numeric = (quality_curve(rho, b + step) - quality_curve(rho, b - step)) / (2 * step)
    exact = torch.stack(
        [torch.autograd.functional.jacobian(lambda x, r=r: quality_curve(r, x), b + 1e-7) for r in rho]
    )
    torch.testing.assert_close(exact, numeric, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "changes", [{"retention": 1.1}, {"retention": math.nan}, {"nll": -1.0}, {"quality": math.inf}]
)
def test_impossible_measurements_are_refused(changes: dict[str, float]) -> None:
    fields = {"retention": 0.5, "nll": 1.0, "quality": 0.5} | changes
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        Observation(**fields)
