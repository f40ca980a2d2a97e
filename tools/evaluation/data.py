"""Examples from a file: `kvferry eval --data FILE`, a JSON object on each line.

Own questions, and the records of RULER, LongBench and SCBench (`public_formats.py`), each recognised by its
fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.evaluation.public_formats import longbench, ruler, scbench
from kvferry.tools.recall.tasks import Example


def _own(fields: Mapping[str, Any], path: Path) -> Example:
    context, question, answers = fields["context"], fields["question"], fields["answers"]
    is_text = isinstance(answers, list) and all(isinstance(each, str) and each.strip() for each in answers)
    if not (is_text and answers and isinstance(context, str) and isinstance(question, str)):
        raise ValueError("a field has another type, or there are no answers")
    return Example(
        messages=({"role": "user", "content": f"{context}\n\n{question}"},),
        answer=answers[0],
        others=tuple(answers[1:]),
        document=context,
    )


@dataclass(frozen=True)
class _Format:
    """A record's format.

    Attributes:
        fields: the names that it is recognised by, in the order of `_FORMATS`.
        description: for messages.
    """

    fields: frozenset[str]
    description: str
    read: Callable[[Mapping[str, Any], Path], Example]


_FORMATS = (
    _Format(
        frozenset({"multi_turns"}),
        "SCBench: context (text) and multi_turns (a list of input and answer)",
        scbench,
    ),
    _Format(frozenset({"outputs"}), "RULER: input (text) and outputs (a list of texts)", ruler),
    _Format(
        frozenset({"input", "answers"}),
        "LongBench: input, context and dataset (text) and answers (a list of texts)",
        longbench,
    ),
    _Format(
        frozenset({"question"}),
        "own questions: context and question (text) and answers (a list of texts, at least one)",
        _own,
    ),
)
_UNDERSTOOD = "; ".join(known.description for known in reversed(_FORMATS))


def read_data(path: Path) -> tuple[Example, ...]:
    """Read the examples of a file; lines without text are skipped.

    Raises: ConfigurationError: the file cannot be read, has no examples, or a line has other fields.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--data {path} cannot be read: {error}") from error
    examples = tuple(_example(path, n, line) for n, line in enumerate(lines, 1) if line.strip())
    if not examples:
        raise ConfigurationError(f"--data {path} has no examples; understood are {_UNDERSTOOD}")
    return examples


def _example(path: Path, number: int, line: str) -> Example:
    where = f"line {number} of --data {path}"
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not JSON: {error}; understood are {_UNDERSTOOD}") from error
    names = set(fields) if isinstance(fields, dict) else set()
    found = next((candidate for candidate in _FORMATS if candidate.fields <= names), None)
    if found is None:
        raise ConfigurationError(
            f"{where} has the fields {', '.join(sorted(names)) or 'none'}; understood are {_UNDERSTOOD}"
        )
    try:
        return found.read(fields, path)
    except KeyError as error:
        raise ConfigurationError(f"{where} has no {error.args[0]}; {found.description}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{where}: {error}; {found.description}") from error
