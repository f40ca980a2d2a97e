"""A small folder of documents and questions in the demo model's words, for `kvferry eval --data FOLDER`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from kvferry.tools.recall.tasks import TASKS


def write_lines(path: Path, records: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_collection(folder: Path) -> Path:
    """Write two documents of kinds of their own, each with one question as two tasks. Returns the folder."""
    questions = []
    (folder / "documents").mkdir(parents=True)
    for number in range(2):
        example = TASKS["single_needle"].example(num_tokens=400, seed=number)
        question = str(example.messages[-1]["content"]).removeprefix(example.document).strip()
        sentences = example.document.replace(" . ", " .\n")
        (folder / "documents" / f"{number}.txt").write_text(sentences, encoding="utf-8")
        (needle,) = (line for line in sentences.splitlines() if f" {example.answer} " in f" {line} ")
        for task in ("fact", "two_hops"):
            questions.append(
                {
                    "task": task,
                    "document": str(number),
                    "question": question,
                    "answers": [example.answer],
                    "evidence": [needle],
                }
            )
    documents = ({"name": str(number), "title": "it", "kind": str(number)} for number in range(2))
    write_lines(folder / "documents.jsonl", documents)
    write_lines(folder / "questions.jsonl", questions)
    return folder
