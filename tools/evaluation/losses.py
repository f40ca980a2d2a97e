"""Losses against the full cache, by task and question by question: right answers, and divergence.

Only questions count that the full cache answers right, in whole or in part, because a wrong answer cannot be
lost. The divergence counts every question, by the token's place in the answer: its first tokens may come from
prefill or a draft, and say little about those after them. `command.py` writes both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvferry.tools.evaluation.experiment import FULL, Experiment, Setting, describe_length, describe_task
from kvferry.tools.evaluation.recommendation import paired_interval
from kvferry.tools.evaluation.records import Key, Record

ALL_TASKS = "all tasks"
PLACES = (0, 8, 32, 128)
"""Where the parts of an answer begin, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A contender's loss in one setting at one length.

    Attributes:
        task: a task, or ALL_TASKS.
        num_examples: all questions; num_right: those that the full cache answers right, at least in part.
        loss: of these, the mean share of the full cache's right answers that is lost; 0.01 is a point.
        lowest, highest: its 95 % interval.
        kl: mean nats a token of the full cache's answers, in the parts that begin at `PLACES`; None where
            no answer is so long. num_tokens: how many tokens that is.
        kept_share: bytes as a share of the full KV's.
    """

    task: str
    num_tokens: int
    setting: Setting
    method: str
    budget: str
    num_examples: int
    num_right: int
    loss: float
    lowest: float
    highest: float
    kl: tuple[float | None, ...]
    num_answer_tokens: tuple[int, ...]
    kept_share: float


def losses(experiment: Experiment, fingerprint: str, records: Mapping[Key, Record]) -> tuple[Loss, ...]:
    """Return the loss of every contender but the full cache, as far as both were measured."""
    full = next((c for c in experiment.contenders if c.method == FULL), None)
    if full is None:
        return ()
    found: dict[tuple[Setting, int, str, str, str], list[tuple[Record, Record]]] = {}
    for unit in experiment.units():
        for setting in experiment.settings_of(unit.task):
            reference = records.get(Key.of(fingerprint, experiment, unit, setting, full))
            for contender in experiment.contenders:
                record = records.get(Key.of(fingerprint, experiment, unit, setting, contender))
                if contender is full or not (reference and reference.turns and record and record.turns):
                    continue
                for task in (unit.task, ALL_TASKS):
                    cell = (setting, unit.num_tokens, task, contender.method, contender.budget)
                    found.setdefault(cell, []).append((reference, record))
    return tuple(
        paired_loss(pairs, setting, num_tokens, task, method, budget)
        for (setting, num_tokens, task, method, budget), pairs in found.items()
    )


def paired_loss(
    pairs: Sequence[tuple[Record, Record]],
    setting: Setting,
    num_tokens: int,
    task: str,
    method: str,
    budget: str,
) -> Loss:
    """Return a contender's loss. Args: pairs: the full cache's record and its own of each question."""
    scores = [(_score(full), _score(record)) for full, record in pairs]
    lost = [max(0.0, full - score) / full for full, score in scores if full]
    lowest, highest = paired_interval(lost)
    parts = [_part([record for _, record in pairs], i) for i in range(len(PLACES))]
    return Loss(
        task=task,
        num_tokens=num_tokens,
        setting=setting,
        method=method,
        budget=budget,
        num_examples=len(pairs),
        num_right=len(lost),
        loss=fmean(lost) if lost else 0.0,
        lowest=max(lowest, 0.0),
        highest=highest,
        kl=tuple(fmean(part) if part else None for part in parts),
        num_answer_tokens=tuple(map(len, parts)),
        kept_share=fmean(record.kept_bytes / record.full_bytes for _, record in pairs),
    )


def _part(records: Sequence[Record], number: int) -> list[float]:
    """Return the divergences of one part of the last answers."""
    end = PLACES[number + 1] if number + 1 < len(PLACES) else None
    return [kl for record in records for kl in record.turns[-1].kl[PLACES[number] : end]]


def _score(record: Record) -> float:
    """Return the last answer's own score, or whether it contains the right one."""
    last = record.turns[-1]
    return fmean(last.scores.values()) if last.scores else float(last.contained)


def losses_markdown(found: Sequence[Loss]) -> Iterator[str]:
    """Yield a table for each setting and length."""
    if not found:
        return
    yield (
        "Lost: of the answers that the full KV has right, the share in % that is lost, its 95 % interval and "
        "the number of such questions. KL: nats a token of the full KV's answer, in the mean over the "
        "answers' tokens from the place named up to the next."
    )
    heads = [f"KL from {place}" for place in PLACES]
    for setting, num_tokens in dict.fromkeys((loss.setting, loss.num_tokens) for loss in found):
        yield f"## {describe_length(num_tokens)}, {setting}: lost against the full KV"
        lines = ["| task | method | budget | kept | lost | of | " + " | ".join(heads) + " |"]
        lines.append("|---|---|---|---|---|---|" + "---|" * len(heads))
        chosen = [loss for loss in found if (loss.setting, loss.num_tokens) == (setting, num_tokens)]
        for loss in sorted(chosen, key=lambda each: each.task != ALL_TASKS):
            lost = f"{100 * loss.loss:.1f} ({100 * loss.lowest:.1f} to {100 * loss.highest:.1f})"
            kl = ["" if value is None else f"{value:.3g}" for value in loss.kl]
            texts = [describe_task(loss.task), loss.method, loss.budget, f"{100 * loss.kept_share:.1f} %"]
            lines.append("| " + " | ".join([*texts, lost, str(loss.num_right), *kl]) + " |")
        yield "\n".join(lines)
