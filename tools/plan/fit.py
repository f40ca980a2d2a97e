"""Fits a measured machine's coefficients, all of them at least 0, to measured times."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.tools.plan.machine import MethodTimes
from kvferry.tools.plan.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class Point:
    """The times of one measured setting.

    Attributes:
        batch: requests that were answered together.
        first_s: to the first token, of a request alone; None of a batch.
        second_s: from the first to the second token; step_s: between later ones.
    """

    num_tokens: int
    batch: int
    sizes: Sizes
    first_s: float | None
    second_s: float
    step_s: float


def fit_prefill(points: Sequence[Point]) -> tuple[float, float, float]:
    """Fit the coefficients of prefill. Args: points: of method full."""
    alone = [(point.num_tokens, point.first_s) for point in points if point.first_s is not None]
    fixed, linear, quadratic = fit([(1.0, n, n * n) for n, _ in alone], [first_s for _, first_s in alone])
    return fixed, linear, quadratic


def fit_method(points: Sequence[Point], full: Mapping[int, float]) -> MethodTimes:
    """Fit one method's coefficients. Args: full: method full's time to the first token, by prompt tokens."""
    alone = [point for point in points if point.batch == 1 and point.first_s is not None]
    extra = [max(0.0, (point.first_s or 0.0) - full[point.num_tokens]) for point in alone]
    after = [max(0.0, point.second_s - point.step_s) for point in alone]
    # A difference of two times is as uncertain as the two times, however small it is.
    compress = fit(
        [(1.0, point.num_tokens) for point in alone], extra, [point.first_s or 0.0 for point in alone]
    )
    handover = fit(
        [(1.0, point.sizes.shipped) for point in alone], after, [point.second_s for point in alone]
    )
    step = fit(
        [(1.0, point.batch, point.batch * point.sizes.read) for point in points],
        [point.step_s for point in points],
    )
    return MethodTimes(
        compress=(compress[0], compress[1]),
        handover=(handover[0], handover[1]),
        step=(step[0], step[1], step[2]),
    )


def fit(
    rows: Sequence[Sequence[float]], times_s: Sequence[float], errors_s: Sequence[float] | None = None
) -> list[float]:
    """Find coefficients of at least 0 with the least squares of errors: the best of all choices of columns
    whose solution has none below 0.

    Args:
        errors_s: what each error is divided by, for example the time that `times_s` is a part of; None: the
            times themselves.
    """
    target = np.asarray(times_s, dtype=float)
    weights = 1 / np.maximum(target if errors_s is None else np.asarray(errors_s, dtype=float), 1e-4)
    columns = np.asarray(rows, dtype=float)
    scale = columns.max(axis=0)
    weighted = columns / scale * weights[:, None]
    number = columns.shape[1]
    best, best_error = np.zeros(number), float("inf")
    for size in range(1, number + 1):
        for chosen in itertools.combinations(range(number), size):
            part = weighted[:, chosen]
            found, *_ = np.linalg.lstsq(part, target * weights, rcond=None)
            error = float(((part @ found - target * weights) ** 2).sum())
            if (found >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(number), error
                best[list(chosen)] = found
    return [float(value) for value in best / scale]
