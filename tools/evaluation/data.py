"""A user's own questions as examples: `kvferry eval --data FILE`, a JSON object on each line.

{"context": "a document", "question": "about it", "answers": ["the right answer", "another"]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall.tasks import Example

_FIELDS = "context and question (text) and answers (a list of texts, at least one)"


def read_data(path: Path) -> tuple[Example, ...]:
    """The examples of a file; lines without text are skipped.

    Raises: ConfigurationError: the file cannot be read, has no examples, or a line has other fields.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--data {path} cannot be read: {error}") from error
    examples = tuple(_example(path, n, line) for n, line in enumerate(lines, 1) if line.strip())
    if not examples:
        raise ConfigurationError(f"--data {path} has no examples; each line needs {_FIELDS}")
    return examples


def _example(path: Path, number: int, line: str) -> Example:
    try:
        fields: Any = json.loads(line)
        context, question, answers = fields["context"], fields["question"], fields["answers"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"line {number} of --data {path} needs {_FIELDS}: {error!r}") from error
    is_text = isinstance(answers, list) and all(isinstance(its, str) and its.strip() for its in answers)
    if not (is_text and answers and isinstance(context, str) and isinstance(question, str)):
        raise ConfigurationError(f"line {number} of --data {path} needs {_FIELDS}")
    return Example(
        messages=({"role": "user", "content": f"{context}\n\n{question}"},),
        answer=answers[0],
        others=tuple(answers[1:]),
        document=context,
    )
