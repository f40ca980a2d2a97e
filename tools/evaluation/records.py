"""Measurements, one JSON line for each example and contender, so that an interrupted run can be resumed.

    run ──► append(records) ──► records.jsonl ──► next run: recorded examples are not measured again

A line's key contains everything that determines its result, the model's fingerprint and the method's
definition included. `summary.py` averages records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.evaluation.experiment import Contender, Experiment, Setting, Unit, example_digest

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Key:
    """What determines a record.

    Attributes:
        fingerprint: the model's.
        example, digest: of the example's text and of the method's definition, so that a record made with
            earlier ones is not mistaken for a current one.
    """

    fingerprint: str
    example: str
    task: str
    num_tokens: int
    depth: float | None
    held_out: bool
    seed: int
    setting: Setting
    first_token: str
    answers: str
    method: str
    digest: str
    budget: str
    match: str
    kv_dtype: str
    max_new_tokens: int
    gap: int = 0

    @classmethod
    def of(
        cls, fingerprint: str, experiment: Experiment, unit: Unit, setting: Setting, contender: Contender
    ) -> Key:
        return cls(
            fingerprint=fingerprint,
            example=_example_digest(experiment, unit),
            **asdict(unit),
            setting=setting,
            first_token=experiment.first_token,
            answers=experiment.answers,
            method=contender.method,
            digest=contender.digest,
            budget=contender.budget,
            match=experiment.match if contender.target else "given",
            kv_dtype=experiment.kv_dtype,
            max_new_tokens=experiment.max_new_tokens,
            gap=experiment.gap,
        )


_task_digests: dict[Unit, str] = {}
"""Of examples that were drawn already: drawing one takes longer than all the rest of a key."""


def _example_digest(experiment: Experiment, unit: Unit) -> str:
    if experiment.data:
        return experiment.data_digests[unit.task, unit.num_tokens][unit.seed]
    if unit not in _task_digests:
        _task_digests[unit] = example_digest(experiment.example(unit))
    return _task_digests[unit]


@dataclass(frozen=True, kw_only=True)
class TurnScore:
    """One answer.

    Attributes:
        exact: the greedy answer equals the right one, its end included.
        contained: the greedy answer contains the right one.
        nll: mean negative log-likelihood of the right answer's tokens, in nats.
        agreement: share of the full cache's greedy tokens that are also the likeliest here, after the same
            tokens before them.
        scores: by name, those of the data's own format, each 0 to 1.
        num_same: tokens of the full cache's greedy answer before the first that differs here, all of them if
            none does; None in records that were made before this was recorded.
        kl: of each of those tokens, in nats, the divergence of the distribution here from the full cache's,
            D(full || here); empty in records that were made before this was recorded.
        tokens: the greedy answer's ids, its end token included; empty as above.
    """

    exact: bool
    contained: bool
    nll: float
    agreement: float
    text: str
    scores: Mapping[str, float] = field(default_factory=dict)
    num_same: int | None = None
    kl: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Record:
    """One contender on one example.

    Attributes:
        turns: one score per question; empty where the budget cannot be met.
        num_compressed_tokens: tokens of the prompt that the last selection saw.
        kept_bytes, read_bytes, full_bytes: of those tokens after compression; see `budgets.py`.
        retention: the plan's own budget as a fraction of those tokens; None for a method that keeps all, and
            in records that were made before this was recorded.
        context_nll: of the last prompt, by `estimate_context_nll`; None as above.
        commit: of the sources that measured it; a folder may contain records of several commits.
    """

    key: Key
    turns: tuple[TurnScore, ...]
    num_compressed_tokens: int = 0
    kept_bytes: int = 0
    read_bytes: int = 0
    full_bytes: int = 0
    retention: float | None = None
    context_nll: float | None = None
    commit: str = "unknown"


class RecordFile:
    """The records of a folder, written by one process. An incomplete last line is dropped.

    Raises: ConfigurationError where a line has another format.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        self.records: dict[Key, Record] = {}
        if path.exists() and not fresh:
            self._read()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Rewrite the file, so that nothing is appended to an incomplete line.
        self._write(self.records.values(), "w")

    def append(self, records: Iterable[Record]) -> None:
        new = list(records)
        self._write(new, "a")
        self.records.update({record.key: record for record in new})

    def _write(self, records: Iterable[Record], mode: str) -> None:
        with self._path.open(mode, encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps({"format": FORMAT, **asdict(record)}, sort_keys=True) + "\n")

    def _read(self) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                record = read_record(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):
                    break
                raise ConfigurationError(
                    f"line {number} of {self._path.name} is not a record of format {FORMAT}; --fresh "
                    "starts over"
                ) from error
            self.records[record.key] = record


def read_record(line: dict[str, Any]) -> Record:
    """Return the record of a line. Raises: ValueError, TypeError or KeyError: it is none of this format."""
    if line.pop("format") != FORMAT:
        raise ValueError("format")
    turns = tuple(
        TurnScore(**{**turn, **{name: tuple(turn.get(name, ())) for name in ("kl", "tokens")}})
        for turn in line.pop("turns")
    )
    return Record(key=Key(**line.pop("key")), turns=turns, **line)
