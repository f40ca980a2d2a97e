"""Decides which method a plan recommends, and whether to disaggregate and to compress at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.tools.plan.predict import Prediction

SMALL_GAIN = 0.05
"""Gains below this share are not worth a more complicated deployment."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do about a load, with reasons in figures.

    Attributes: method: the best with disaggregation; None: nothing meets the bounds.
    """

    method: str | None
    disaggregate: bool
    compress: bool
    reasons: tuple[str, ...]


def advise(apart: Mapping[str, Prediction], together: Callable[[int], Prediction]) -> Advice:
    """Compare predictions.

    Args:
        apart: by method, with disaggregation; "full" is among them.
        together: of method full without disaggregation, with the fewest workers from a number on.
    """
    full = apart["full"]
    feasible = {name: prediction for name, prediction in apart.items() if prediction.workers is not None}
    fewest = together(1)
    if not feasible:
        return Advice(method=None, disaggregate=False, compress=False, reasons=(_hopeless(fewest),))
    best = min(feasible, key=lambda name: (feasible[name].workers, feasible[name].total_s))
    compress = best != "full" and _gains(feasible[best], full)
    if not compress and "full" in feasible:
        best = "full"
    chosen = feasible[best]
    assert chosen.workers is not None
    same = together(chosen.workers)
    disaggregate = _apart_is_better(chosen, fewest, same)
    return Advice(
        method=best,
        disaggregate=disaggregate,
        compress=compress,
        reasons=(
            _about_compression(best, chosen, full) if compress else _against_compression(apart),
            _about_workers(chosen, fewest, same, disaggregate=disaggregate),
        ),
    )


def _hopeless(fewest: Prediction) -> str:
    if fewest.workers is None:
        return "no number of workers meets the bounds: one prompt or one step alone takes longer"
    return f"only without disaggregation the bounds are met, with {_workers(fewest)}"


def _about_compression(method: str, chosen: Prediction, full: Prediction) -> str:
    return (
        f"compress with {method}: {_workers(chosen)} and {chosen.total_s:.3g} s a request, against "
        f"{_workers(full)} and {full.total_s:.3g} s with the full KV"
    )


def _against_compression(apart: Mapping[str, Prediction]) -> str:
    full = apart["full"]
    best_s = min(
        (prediction.total_s for name, prediction in apart.items() if name != "full"), default=full.total_s
    )
    return (
        f"do not compress: a request takes {full.total_s:.3g} s with the full KV, {full.transfer_s:.2g} s of "
        f"it to ship, and {best_s:.3g} s with the best method, and no worker is saved"
    )


def _about_workers(chosen: Prediction, fewest: Prediction, same: Prediction, *, disaggregate: bool) -> str:
    what = "disaggregate" if disaggregate else "do not disaggregate"
    without = f"{_workers(same)} that do both take {same.total_s:.3g} s a request"
    if fewest.workers is None:
        without = "no number of workers that do both meets the bounds"
    elif _has_bounds(fewest) and fewest.workers != same.workers:
        without = f"{_workers(fewest)} that do both meet the bounds"
    return (
        f"{what}: {_workers(chosen)} take {chosen.total_s:.3g} s a request; {without}, and each prompt stops "
        f"its worker's streams for {fewest.stall_s:.2g} s, {100 * _busy(same):.0f} % of the time"
    )


def _gains(prediction: Prediction, full: Prediction) -> bool:
    """Return whether compression saves workers, or enough time with as many."""
    if full.workers is None or prediction.workers is None:
        return full.workers is None
    if prediction.workers != full.workers:
        return prediction.workers < full.workers
    return prediction.total_s < (1 - SMALL_GAIN) * full.total_s


def _apart_is_better(apart: Prediction, fewest: Prediction, same: Prediction) -> bool:
    """Return whether fewer workers meet the bounds apart, if bounds are given. Without bounds, or with as
    many workers: whether requests take less time with the same number of workers."""
    assert apart.workers is not None
    if fewest.workers is None:
        return True
    if fewest.workers > apart.workers:
        return True
    if _has_bounds(fewest) and fewest.workers < apart.workers:
        return False
    return apart.total_s < (1 - SMALL_GAIN) * same.total_s


def _has_bounds(prediction: Prediction) -> bool:
    return bool(prediction.load.first_token_bound_s or prediction.load.per_token_bound_s)


def _busy(together: Prediction) -> float:
    """Return the share of a worker's time that prompts take."""
    return together.load.rate / together.workers * together.stall_s if together.workers else math.nan


def _workers(prediction: Prediction) -> str:
    if prediction.workers is None:
        return "no number of workers"
    if not prediction.prefill_workers:
        return f"{prediction.workers} worker{'s' * (prediction.workers > 1)}"
    return f"{prediction.prefill_workers} + {prediction.decode_workers} workers"
