"""Records averaged over examples: one cell for each (task, length, depth, setting, method, budget).

These are the cells of the JSON result, from which tables and plots are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean

from kvferry.tools.evaluation.experiment import Contender, Experiment, Setting, Unit
from kvferry.tools.evaluation.records import Key, Record, TurnScore


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Means over examples. Accuracy, nll and agreement are those of the last question.

    Attributes:
        accuracy: share of answers that are exactly right; half_width: of its 95 % Wilson interval.
        contained: share of answers that contain the right one.
        nll: mean negative log-likelihood per token of the right answer, in nats.
        agreement: share of the full cache's greedy answer tokens that stay the likeliest.
        accuracy_by_turn: one entry a question.
        first_difference: of each token of the answers, the share of examples whose greedy answer first
            differs there from the full cache's; empty where that was not recorded.
        right: a character for each example, in the order of their seeds: 1 if the last answer is exactly
            right, else 0. With it any two contenders can be compared question by question.
        named: of a public format, its own scores' means over all questions, by name.
        kept_share, read_share: bytes retained, and read per decode step, as a share of the full KV's.
    """

    accuracy: float
    half_width: float
    contained: float
    nll: float
    agreement: float
    accuracy_by_turn: tuple[float, ...]
    kept_bytes: float
    kept_share: float
    read_bytes: float
    read_share: float
    right: str = ""
    named: Mapping[str, float] = field(default_factory=dict)
    first_difference: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A contender at one task, length, depth and setting. `scores` is None where the budget cannot be met."""

    task: str
    num_tokens: int
    depth: float | None
    setting: Setting
    method: str
    budget: str
    num_examples: int
    scores: Scores | None


def summarise(experiment: Experiment, fingerprint: str, records: dict[Key, Record]) -> tuple[Cell, ...]:
    """Compute the experiment's cells, from the records that exist; cells without records are left out."""
    cells = []
    for task in experiment.tasks:
        for num_tokens in experiment.lengths:
            for depth in experiment.depths:
                for setting in experiment.settings_of(task):
                    for contender in experiment.contenders:
                        units = (
                            Unit(
                                task=task,
                                num_tokens=num_tokens,
                                depth=depth,
                                held_out=experiment.held_out,
                                seed=seed,
                            )
                            for seed in experiment.seeds(task, num_tokens)
                        )
                        keys = (Key.of(fingerprint, experiment, unit, setting, contender) for unit in units)
                        found = [records[key] for key in keys if key in records]
                        if found:
                            cells.append(_cell(found, contender))
    return tuple(cells)


def _cell(records: Sequence[Record], contender: Contender) -> Cell:
    key = records[0].key
    return Cell(
        task=key.task,
        num_tokens=key.num_tokens,
        depth=key.depth,
        setting=key.setting,
        method=contender.method,
        budget=contender.budget,
        num_examples=len(records),
        scores=_scores(records) if all(record.turns for record in records) else None,
    )


def _scores(records: Sequence[Record]) -> Scores:
    last = [record.turns[-1] for record in records]
    accuracy = _share_exact(last)
    return Scores(
        accuracy=accuracy,
        half_width=wilson_half_width(accuracy, len(records)),
        contained=fmean(score.contained for score in last),
        nll=fmean(score.nll for score in last),
        agreement=fmean(score.agreement for score in last),
        accuracy_by_turn=tuple(
            _share_exact([score for score in turn if score is not None])
            for turn in zip_longest(*(record.turns for record in records))
        ),
        kept_bytes=fmean(record.kept_bytes for record in records),
        kept_share=fmean(record.kept_bytes / record.full_bytes for record in records),
        read_bytes=fmean(record.read_bytes for record in records),
        read_share=fmean(record.read_bytes / record.full_bytes for record in records),
        right="".join(str(int(score.exact)) for score in last),
        named=_named(records),
        first_difference=_first_difference(last),
    )


def _first_difference(scores: Sequence[TurnScore]) -> tuple[float, ...]:
    steps = [score.num_same for score in scores if score.agreement < 1]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return ()
    return tuple(known.count(step) / len(scores) for step in range(max(known, default=-1) + 1))


def _named(records: Sequence[Record]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for record in records:
        for turn in record.turns:
            for name, score in turn.scores.items():
                found.setdefault(name, []).append(score)
    return {name: fmean(scores) for name, scores in found.items()}


def _share_exact(scores: Iterable[TurnScore]) -> float:
    return fmean(score.exact for score in scores)


def wilson_half_width(share: float, num_examples: int) -> float:
    """Return half the width of the 95 % Wilson score interval of a share."""
    n, z = num_examples, 1.96
    return z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
