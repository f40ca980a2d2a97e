"""Questions about real documents, cut to a wanted length: `kvferry eval --data FOLDER`.

    FOLDER/documents.jsonl   name, title and kind of each document, its source and licence
    FOLDER/documents/*.txt   their texts
    FOLDER/questions.jsonl   task, document, question, answers, and the evidence: texts that the answer needs

The documents of a kind follow one another and are cut at ends of lines into windows of a length. A question
is asked about the window that has all its evidence; where a cut parts the evidence, it is left out. So the
same questions are asked at every length. Two tasks are made from the others: `needle` hides numbers in prose,
and `third_turn` asks a third question of the same window after two that were answered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.evaluation.answer_scores import Reference
from kvferry.tools.evaluation.public_formats import DatasetExample
from kvferry.tools.recall.tasks import Message

COLLECTION_TASKS = {
    "fact": "a fact of a document",
    "two_hops": "a fact by way of another",
    "needle": "a number hidden in prose",
    "third_turn": "the third question of a conversation",
    "long": "answers of 60 to 300 tokens",
}
"""Names and descriptions of a collection's tasks."""
_WRITTEN = ("fact", "two_hops", "long")
_QUESTION_TOKENS = 160
"""Of a window's length, what the chat template and the question may take."""
_SHORT_TOKENS, _LONG_TOKENS = 32, 300
_NEEDLES = 5
_NEEDLE = "The {colour} {thing} has the registration number {number}."
_NEEDLE_QUESTION = "What is the registration number of the {colour} {thing}?"
_COLOURS = ("amber", "azure", "crimson", "ivory", "olive", "silver", "turquoise", "violet")
_THINGS = ("bicycle", "ferry", "glider", "lantern", "piano", "telescope", "tractor", "typewriter")
_PROSE = ("prose", "dialogue")


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A line of `questions.jsonl`. Each text of `evidence` occurs once in the document."""

    task: str
    title: str
    question: str
    answers: tuple[str, ...]
    evidence: tuple[str, ...]

    @property
    def reference(self) -> Reference:
        return Reference(score="facts" if self.task == "long" else "fact", texts=self.answers)

    @property
    def text(self) -> str:
        rule = "" if self.task == "long" else " Answer in a few words."
        return f"This is a question about {self.title}. {self.question}{rule}"


@dataclass(frozen=True, kw_only=True)
class _Window:
    """A part of the documents of a kind: `text`, whose lines are `lines`."""

    kind: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.lines).strip("\n")


def is_collection(path: Path) -> bool:
    """Return whether a path is a folder of documents and questions."""
    return (path / "questions.jsonl").is_file()


def read_collection(
    folder: Path, *, lengths: Sequence[int], count_tokens: Callable[[str], int]
) -> dict[tuple[str, int], tuple[DatasetExample, ...]]:
    """Return the examples of each task and length, those of one window after one another.

    Args:
        lengths: of prompts, in tokens of the model.
        count_tokens: returns how many a text has.

    Raises: ConfigurationError: a file cannot be read or is wrong, or a length is above the documents'.
    """
    kinds, questions = _read(folder)
    found: dict[tuple[str, int], tuple[DatasetExample, ...]] = {}
    for length in lengths:
        windows = [
            window
            for kind, lines in kinds.items()
            for window in _cut(kind, lines, length - _QUESTION_TOKENS, count_tokens)
        ]
        if not windows:
            raise ConfigurationError(f"--lengths has {length}; no kind of document in {folder} is so long")
        by_window = {window: [asked for asked in questions if _answers(window, asked)] for window in windows}
        seen: set[_Question] = set()
        for window, asked in by_window.items():  # windows overlap, so a question may fit into two
            by_window[window] = [question for question in asked if question not in seen]
            seen.update(asked)
        for task in COLLECTION_TASKS:
            examples = tuple(_examples(task, by_window, length))
            if examples:
                found[task, length] = examples
    return found


def _examples(
    task: str, by_window: Mapping[_Window, Sequence[_Question]], length: int
) -> Iterator[DatasetExample]:
    for number, (window, questions) in enumerate(by_window.items()):
        if task == "needle":
            if window.kind in _PROSE:
                yield from _needles(window, random.Random(f"{length}/{number}"))
        elif task == "third_turn":
            facts = [question for question in questions if question.task == "fact"]
            for start in range(0, len(facts) - 2, 3):
                yield _example(window.text, facts[start : start + 3])
        else:
            yield from (_example(window.text, [asked]) for asked in questions if asked.task == task)


def _needles(window: _Window, rng: random.Random) -> Iterator[DatasetExample]:
    """Yield examples with five numbers of one wording hidden in a window, each of them asked for once."""
    names = rng.sample([(colour, thing) for colour in _COLOURS for thing in _THINGS], _NEEDLES)
    numbers = [str(rng.randrange(10**6, 10**7)) for _ in names]
    lines = list(window.lines)
    for (colour, thing), number in zip(names, numbers, strict=True):
        sentence = _NEEDLE.format(colour=colour, thing=thing, number=number)
        lines.insert(rng.randrange(1, len(lines)), f"{sentence}\n\n")
    document = "".join(lines).strip("\n")
    for (colour, thing), number in zip(names, numbers, strict=True):
        question = _Question(
            task="needle",
            title="the text above",
            question=_NEEDLE_QUESTION.format(colour=colour, thing=thing),
            answers=(number,),
            evidence=(number,),
        )
        yield _example(document, [question])


def _example(document: str, questions: Sequence[_Question]) -> DatasetExample:
    messages: list[Message] = []
    for question in questions:
        content = question.text if messages else f"{document}\n\n{question.text}"
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": question.reference.right[0]})
    last = questions[-1].reference
    return DatasetExample(
        messages=tuple(messages[:-1]),
        answer=last.right[0],
        others=last.right[1:],
        document=document,
        references=tuple(question.reference for question in questions),
        max_new_tokens=_LONG_TOKENS if questions[-1].task == "long" else _SHORT_TOKENS,
    )


def _answers(window: _Window, question: _Question) -> bool:
    text = window.text
    return all(evidence in text for evidence in question.evidence)


def _cut(kind: str, lines: Sequence[str], length: int, count_tokens: Callable[[str], int]) -> list[_Window]:
    """Cut windows of at most `length` tokens; the last one reaches back, to be as long as the others."""
    counts = [count_tokens(line) for line in lines]
    if sum(counts) < length:
        return []
    windows, first, size = [], 0, 0
    for number, count in enumerate(counts):
        if size + count > length:
            windows.append(_Window(kind=kind, lines=tuple(lines[first:number])))
            first, size = number, 0
        size += count
    while first and size + counts[first - 1] <= length:
        first -= 1
        size += counts[first]
    return [*windows, _Window(kind=kind, lines=tuple(lines[first:]))]


def _read(folder: Path) -> tuple[dict[str, list[str]], list[_Question]]:
    """Read the lines of the documents of each kind, and all written questions."""
    kinds: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    for _, fields in _lines(folder / "documents.jsonl"):
        name, title = str(fields["name"]), str(fields["title"])
        titles[name] = title
        text = _text(folder / "documents" / f"{name}.txt").strip("\n")
        kinds.setdefault(str(fields["kind"]), []).extend(
            [f"# {title}\n", "\n", *text.splitlines(True), "\n\n"]
        )
    questions = []
    for where, fields in _lines(folder / "questions.jsonl"):
        task, document = str(fields["task"]), str(fields["document"])
        if task not in _WRITTEN or document not in titles:
            raise ConfigurationError(
                f"{where} has task {task!r} and document {document!r}; tasks are {', '.join(_WRITTEN)}, "
                f"documents {', '.join(titles)}"
            )
        questions.append(
            _Question(
                task=task,
                title=titles[document],
                question=str(fields["question"]),
                answers=tuple(map(str, fields["answers"])),
                evidence=tuple(map(str, fields["evidence"])),
            )
        )
    return kinds, questions


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        try:
            yield f"line {number} of {path.name}", json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"line {number} of {path} is not JSON: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--data: {path} cannot be read: {error}") from error
