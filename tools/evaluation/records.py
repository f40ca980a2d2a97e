"""What was measured, one JSON line for each example and contender, so that a stopped run goes on.

    run ──► append(records) ──► records.jsonl ──► next run: what is there is not measured again

A line is keyed by everything that decides it, the model's fingerprint and the method's definition included.
Does not average; `summary.py` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.evaluation.experiment import Contender, Experiment, Setting, Unit

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Key:
    """What decides a record.

    Attributes:
        fingerprint: the model's.
        example, digest: of the example's text and the method's definition, so that a record of older ones is
            not taken for one of these.
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
            example=_example_digest(unit),
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


@lru_cache(maxsize=1 << 16)
def _example_digest(unit: Unit) -> str:
    return hashlib.blake2b(repr(unit.example()).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TurnScore:
    """One answer.

    Attributes:
        exact: the greedy answer is the right one, to its end.
        contained: the right answer stands in the greedy one.
        nll: mean negative log-likelihood of the right answer's tokens, in nats.
        agreement: share of the full cache's greedy tokens that are also the likeliest here, after the same
            tokens before them.
    """

    exact: bool
    contained: bool
    nll: float
    agreement: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """One contender on one example.

    Attributes:
        turns: one score a question; empty where the budget cannot be met.
        num_compressed_tokens: tokens of the prompt that the last selection saw.
        kept_bytes, read_bytes, full_bytes: of those tokens, as held once compressed; see `budgets.py`.
        commit: of the sources that measured it; a folder may hold records of several.
    """

    key: Key
    turns: tuple[TurnScore, ...]
    num_compressed_tokens: int = 0
    kept_bytes: int = 0
    read_bytes: int = 0
    full_bytes: int = 0
    commit: str = "unknown"


class RecordFile:
    """The records of a folder. One process writes; lines are whole, or the last one is cut off and dropped.

    Raises: ConfigurationError where a line is of another format.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        self.records: dict[Key, Record] = {}
        if path.exists() and not fresh:
            self._read()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written anew, so that nothing is appended to a line that was cut off.
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
                record = _record(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):
                    break
                raise ConfigurationError(
                    f"line {number} of {self._path.name} is no record of format {FORMAT}; --fresh starts anew"
                ) from error
            self.records[record.key] = record


def _record(line: dict[str, Any]) -> Record:
    if line.pop("format") != FORMAT:
        raise ValueError("format")
    turns = tuple(TurnScore(**turn) for turn in line.pop("turns"))
    return Record(key=Key(**line.pop("key")), turns=turns, **line)
