"""Records of RULER, LongBench and SCBench as examples. `data.py` reads the file and recognises the format.

The questions' wording is our own, so scores compare methods with each other and not with published tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.tools.evaluation.answer_scores import Reference
from kvferry.tools.recall.tasks import Example, Message

_QUESTION = "Answer the question about the text above in as few words as possible.\n\nQuestion: {input}"
_DIALOGUE = "{input}"
_SUMMARY = "Write a summary of the text above."
_QUERY = "Answer the request about the text above in one paragraph.\n\nRequest: {input}"
_PARAGRAPH = (
    "Which of the paragraphs above does this summary describe? Answer with its name and number alone, as the "
    "text gives them.\n\n{input}"
)
_COUNT = "How many different paragraphs does the text above have? Answer with the number alone."
_CODE = "{input}\n\nWrite the next line of the code above."

LONGBENCH: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh", "hotpotqa", "2wikimqa", "musique"),
        ("f1", _QUESTION),
    ),
    "triviaqa": ("f1", _DIALOGUE),
    "dureader": ("rouge_l", _QUERY),
    "qmsum": ("rouge_l", _QUERY),
    **dict.fromkeys(("gov_report", "multi_news", "vcsum"), ("rouge_l", _SUMMARY)),
    "samsum": ("rouge_l", _DIALOGUE),
    **dict.fromkeys(("trec", "lsht"), ("classification", _DIALOGUE)),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), ("retrieval", _PARAGRAPH)),
    "passage_count": ("retrieval", _COUNT),
    **dict.fromkeys(("lcc", "repobench-p"), ("edit_similarity", _CODE)),
}
"""By data set: its score, and what is asked after the context."""
_FIRST_LINE = ("triviaqa", "samsum", "trec", "lsht")
"""Data sets whose contexts are examples of questions and answers, which a model may go on with."""
_SCBENCH = (("repoqa", "edit_similarity"), ("summary", "rouge_l"), ("qa", "f1"))
"""By a part of the task's name; the others are found or not."""


@dataclass(frozen=True, kw_only=True)
class DatasetExample(Example):
    """An example of a public format.

    Attributes:
        references: of each question in turn.
        answer_prefix: how the last answer begins; it stands in the prompt.
        max_new_tokens: the longest answer to each question; 0 leaves it to `--max-new-tokens`.
    """

    references: tuple[Reference, ...]
    answer_prefix: str = ""
    max_new_tokens: int = 0


def ruler(fields: Mapping[str, Any], path: Path) -> DatasetExample:
    """Read `{"index", "input", "outputs", "length", "answer_prefix"}`.

    The document is everything before the input's last line. All outputs are wanted; for questions (`qa_1`,
    by the record's task, the file's name or its folder's) one of them is enough.

    Raises: KeyError, ValueError: a field is missing or has another type.
    """
    text, outputs = _text(fields, "input"), _texts(fields, "outputs")
    names = (str(fields.get("task", "")), path.stem, path.absolute().parent.name)
    is_question = any(name.startswith("qa_") for name in names)
    return _single(
        document=text.rstrip("\n").rpartition("\n")[0],
        content=text,
        reference=Reference(score="contains_any" if is_question else "contains_all", texts=outputs),
        answer_prefix=_text(fields, "answer_prefix") if "answer_prefix" in fields else "",
    )


def longbench(fields: Mapping[str, Any], path: Path) -> DatasetExample:
    """Read `{"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"}`.

    Raises: KeyError, ValueError: a field is missing or has another type, or the data set is unknown.
    """
    dataset = _text(fields, "dataset").removesuffix("_e")
    if dataset not in LONGBENCH:
        raise ValueError(f"dataset is {dataset!r}; known are {', '.join(LONGBENCH)}")
    score, wording = LONGBENCH[dataset]
    context = _text(fields, "context")
    classes = _texts(fields, "all_classes") if score == "classification" else ()
    return _single(
        document=context,
        content=f"{context}\n\n{wording.format(input=_text(fields, 'input'))}",
        reference=Reference(
            score=score,
            texts=_texts(fields, "answers"),
            classes=classes,
            first_line=dataset in _FIRST_LINE,
        ),
    )


def scbench(fields: Mapping[str, Any], path: Path) -> DatasetExample:
    """Read `{"id", "context", "multi_turns": [{"input", "answer"}]}`: questions about one context in turn.

    Raises: KeyError, ValueError: a field is missing or has another type, or a turn has options.
    """
    context, turns = _text(fields, "context"), fields["multi_turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("multi_turns must be a list of at least one turn")
    messages: list[Message] = []
    references = []
    for turn in turns:
        if "options" in turn:
            raise ValueError("a turn has options; turns that choose from options are not understood")
        answer = turn["answer"]
        name = str(turn.get("task", path.stem))
        score = next((score for part, score in _SCBENCH if part in name), "contains_all")
        texts = _texts(turn, "answer") if isinstance(answer, list) else (str(answer),)
        references.append(Reference(score=score, texts=texts))
        question = _text(turn, "input")
        content = question if messages else f"{context}\n\n{question}"
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": references[-1].right[0]})
    return DatasetExample(
        messages=tuple(messages[:-1]),
        answer=references[-1].right[0],
        others=references[-1].right[1:],
        document=context,
        references=tuple(references),
    )


def _single(*, document: str, content: str, reference: Reference, answer_prefix: str = "") -> DatasetExample:
    return DatasetExample(
        messages=({"role": "user", "content": content},),
        answer=reference.right[0],
        others=reference.right[1:],
        document=document,
        references=(reference,),
        answer_prefix=answer_prefix,
    )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}; it must be text")
    return value


def _texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Read a list of at least one text; numbers become text."""
    value = fields[name]
    is_plain = isinstance(value, list) and all(isinstance(each, str | int | float) for each in value)
    texts = tuple(str(each) for each in value) if is_plain else ()
    if not texts or not all(text.strip() for text in texts):
        raise ValueError(f"{name} must be a list of at least one text")
    return texts
