"""The cheapest method and budget that lose at most a stated share of right answers, for each setting.

The loss is taken example by example against the full cache, over all tasks, lengths and depths of a setting.
`command.py` writes it at the end of the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

from kvferry.tools.evaluation.experiment import FULL, Contender, Experiment, Setting, Unit
from kvferry.tools.evaluation.records import Key, Record

_Z = 1.96
_ROUNDING = 1e-9
_BY: tuple[Literal["kept", "read"], ...] = ("kept", "read")
_BYTES = {"kept": "bytes kept", "read": "bytes read per step"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A contender in one setting.

    Attributes:
        loss: the full cache's score less this one's, the mean over examples; 0.01 is a percentage point.
        lowest, highest: its 95 % interval.
        kept_share, read_share: bytes as a share of the full KV's.
    """

    method: str
    budget: str
    num_examples: int
    loss: float
    lowest: float
    highest: float
    kept_share: float
    read_share: float


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to take in one setting.

    Attributes:
        by: the bytes that are to be few.
        found: the cheapest candidate that loses at most the stated loss; None where none qualifies.
        least: the candidate that loses least; None where nothing was compared.
        full: the full cache's mean score.
    """

    setting: Setting
    by: Literal["kept", "read"]
    found: Candidate | None
    least: Candidate | None
    full: float


def recommend(
    experiment: Experiment, fingerprint: str, records: Mapping[Key, Record], *, max_loss: float
) -> tuple[Recommendation, ...]:
    """Make two recommendations for each setting: by bytes kept and by bytes read.

    Args: max_loss: 0 to 1. Returns: nothing if the full cache was not measured.
    """
    full = next((each for each in experiment.contenders if each.method == FULL), None)
    if full is None:
        return ()
    settings = {task: experiment.settings_of(task) for task in experiment.tasks}
    recommendations = []
    for setting in experiment.settings:
        units = [unit for unit in experiment.units() if setting in settings[unit.task]]

        reference = _met(experiment, fingerprint, records, setting, full, units)
        if not reference:
            continue
        met = [
            (contender, _met(experiment, fingerprint, records, setting, contender, units))
            for contender in experiment.contenders
            if contender.target is not None
        ]
        candidates = [_candidate(contender, found, reference) for contender, found in met if found]
        good = [candidate for candidate in candidates if candidate.loss <= max_loss + _ROUNDING]
        least = min(candidates, key=lambda candidate: (candidate.loss, candidate.kept_share), default=None)
        for by in _BY:
            cheap = partial(_cost, by=by)
            recommendations.append(
                Recommendation(
                    setting=setting,
                    by=by,
                    found=min(good, key=cheap, default=None),
                    least=least,
                    full=fmean(map(_score, reference)),
                )
            )
    return tuple(recommendations)


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of paired differences of -1 to 1.

    Agresti and Min (2005): half a pair is added to each of the four outcomes of a pair, so that the interval
    has a width even if all pairs agree.
    """
    n = len(differences) + 2
    mean = sum(differences) / n
    variance = (sum(d * d for d in differences) + 1) / n - mean * mean
    half = _Z * math.sqrt(variance / n)
    return max(mean - half, -1.0), min(mean + half, 1.0)


def describe(recommendations: Sequence[Recommendation], *, max_loss: float, score: str) -> Iterator[str]:
    """Yield a sentence for each. Args: score: what is lost, "exact match"."""
    if not recommendations:
        yield f"No recommendation: the loss is against the full KV, and --methods has no {FULL}."
    for advice in recommendations:
        where = f"{advice.setting}, by {_BYTES[advice.by]}"
        if advice.least is None:
            yield f"{where}: nothing to recommend; no method met a budget on every example."
        elif advice.full == 0:
            yield f"{where}: nothing to recommend; the full KV itself has 0 % of {score}."
        elif advice.found is None:
            yield (
                f"{where}: none qualifies; the least loss has {_text(advice.least, advice.by)}, "
                f"above the stated {100 * max_loss:g}."
            )
        else:
            yield f"{where}: {_text(advice.found, advice.by)}."


def _text(candidate: Candidate, by: Literal["kept", "read"]) -> str:
    return (
        f"{candidate.method} at {candidate.budget}, {100 * _share(candidate, by):.1f} % of the full KV's "
        f"bytes, loses {100 * candidate.loss:.1f} points (95 % interval {100 * candidate.lowest:.1f} to "
        f"{100 * candidate.highest:.1f}, n = {candidate.num_examples})"
    )


def _met(
    experiment: Experiment,
    fingerprint: str,
    records: Mapping[Key, Record],
    setting: Setting,
    contender: Contender,
    units: Sequence[Unit],
) -> list[Record]:
    """Return the contender's records, one for each unit; none if one is missing or a budget was not met."""
    keys = (Key.of(fingerprint, experiment, unit, setting, contender) for unit in units)
    found = [records[key] for key in keys if key in records and records[key].turns]
    return found if len(found) == len(units) else []


def _candidate(contender: Contender, records: Sequence[Record], reference: Sequence[Record]) -> Candidate:
    losses = [_score(full) - _score(record) for full, record in zip(reference, records, strict=True)]
    lowest, highest = paired_interval(losses)
    return Candidate(
        method=contender.method,
        budget=contender.budget,
        num_examples=len(records),
        loss=fmean(losses),
        lowest=lowest,
        highest=highest,
        kept_share=fmean(record.kept_bytes / record.full_bytes for record in records),
        read_share=fmean(record.read_bytes / record.full_bytes for record in records),
    )


def _score(record: Record) -> float:
    """Return the mean of the data's own score over all questions, or whether the last is exactly right."""
    own = [score for turn in record.turns for score in turn.scores.values()]
    return fmean(own) if own else float(record.turns[-1].exact)


def _cost(candidate: Candidate, by: Literal["kept", "read"]) -> tuple[float, float]:
    return _share(candidate, by), candidate.loss


def _share(candidate: Candidate, by: Literal["kept", "read"]) -> float:
    return candidate.kept_share if by == "kept" else candidate.read_share
