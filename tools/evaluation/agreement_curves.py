"""Quality curves from the records of an evaluation, so that a router's `quality` is of the same questions.

Quality is agreement: the share of last answers that equal the full KV's, token for token, with the first
token as the evaluation has it. The curves are of the setting "aware", in which a server compresses, and of
methods with their own parameters, for which the router takes curves. `fitting.py` fits, `command.py` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from kvferry.shared.compression.curves import QualityCurve
from kvferry.tools.evaluation.experiment import Contender, Experiment
from kvferry.tools.evaluation.fitting import Comparison, fit_curve
from kvferry.tools.evaluation.records import Key, Record

_GROUPS = 4
"""Groups of similar prompts, if there are as many."""


def agreement_curves(
    experiment: Experiment, fingerprint: str, records: Mapping[Key, Record]
) -> dict[str, QualityCurve]:
    """Fit a curve for each method that met at least two budgets below the whole prompt on every question."""
    contenders: dict[str, list[Contender]] = {}
    for contender in experiment.contenders:
        if contender.target is not None and contender.method == contender.plan.method:
            contenders.setdefault(contender.method, []).append(contender)
    curves = {}
    for method, of_method in contenders.items():
        found = [_comparisons(experiment, fingerprint, records, contender) for contender in of_method]
        budgets = [
            comparisons
            for comparisons in found
            if comparisons and fmean(each.retention for each in comparisons) < 1
        ]
        if len(budgets) > 1:
            groups = min(_GROUPS, *map(len, budgets))
            curves[method] = fit_curve(budgets, measure="agreement", groups=groups)
    return curves


def _comparisons(
    experiment: Experiment, fingerprint: str, records: Mapping[Key, Record], contender: Contender
) -> Sequence[Comparison]:
    """Return one for each question; none if a budget was not met on all, or a record lacks a value."""
    if "aware" not in experiment.settings:
        return ()
    compared = []
    for unit in experiment.units():
        record = records.get(Key.of(fingerprint, experiment, unit, "aware", contender))
        if record is None or not record.turns or record.retention is None or record.context_nll is None:
            return ()
        compared.append(
            Comparison(
                retention=record.retention,
                context_nll=record.context_nll,
                full=1.0,
                compressed=float(record.turns[-1].agreement == 1),
            )
        )
    return compared
