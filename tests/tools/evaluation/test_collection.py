"""Collections of documents and questions: the committed one is sound, and documents are run once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from kvtest.collection import write_collection, write_lines

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.answer_scores import Reference
from kvferry.tools.evaluation.collection import COLLECTION_TASKS, read_collection
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.experiment import Experiment, read_experiment
from kvferry.tools.evaluation.losses import ALL_TASKS, losses
from kvferry.tools.evaluation.records import Record
from kvferry.tools.evaluation.runner import UnitRunner
from kvferry.tools.oracle import OneProcessGenerator

REAL = Path(__file__).parents[3] / "benchmarks" / "real"


def count_words(text: str) -> int:
    return len(text.split())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_evidence_is_in_the_committed_documents_once() -> None:
    documents = {document["name"]: document for document in lines(REAL / "documents.jsonl")}
    texts = {name: (REAL / "documents" / f"{name}.txt").read_text(encoding="utf-8") for name in documents}
    assert {path.stem for path in (REAL / "documents").iterdir()} == set(documents)
    assert all(document["source"] and document["licence"] for document in documents.values())
    questions = lines(REAL / "questions.jsonl")
    assert len(documents) >= 20
    assert len(questions) >= 300
    assert len({(question["document"], question["question"]) for question in questions}) == len(questions)
    for question in questions:
        counts = [texts[question["document"]].count(evidence) for evidence in question["evidence"]]
        assert counts == [1] * len(counts), question
        score = "facts" if question["task"] == "long" else "fact"
        reference = Reference(score=score, texts=tuple(question["answers"]))
        assert reference(" ".join(question["answers"])) == 1, question


@pytest.mark.parametrize("length", [1500, 3000])
def test_every_prompt_is_as_long_as_asked_and_has_what_its_question_needs(length: int) -> None:
    found = read_collection(REAL, lengths=(length,), count_tokens=count_words)
    assert {task for task, _ in found} == set(COLLECTION_TASKS)
    assert sum(map(len, found.values())) >= 300
    titles = {document["name"]: document["title"] for document in lines(REAL / "documents.jsonl")}
    questions = {
        f"This is a question about {titles[question['document']]}. {question['question']}": question
        for question in lines(REAL / "questions.jsonl")
    }
    documents = set()
    for (task, _), examples in found.items():
        for example in examples:
            assert 0.75 * (length - 160) <= count_words(example.document) <= length
            asked = [message["content"] for message in example.messages if message["role"] == "user"]
            assert asked[0].startswith(example.document)
            assert len(asked) == (3 if task == "third_turn" else 1)
            if task == "needle":
                assert example.answer in example.document
                continue
            documents.add(example.document)
            for content in asked:
                (question,) = (question for text, question in questions.items() if text in content)
                assert all(text in example.document for text in question["evidence"])
    assert len(documents) <= 120  # many questions share one


def test_an_example_is_about_the_same_document_as_the_one_before_it_as_long_as_there_are_such() -> None:
    experiment = read_experiment(EvalConfig(data=str(REAL), lengths="2048"))
    documents = [experiment.example(unit).document for unit in experiment.units()]
    changes = sum(a != b for a, b in itertools.pairwise(documents))
    assert changes == len(set(documents)) - 1


@pytest.mark.parametrize(
    ("answer", "texts", "score", "right"),
    [
        ("It is 103,092, I think.", ("103092",), "fact", 1),
        ("It is 43.", ("4",), "fact", 0),
        ("The Times", ("the times", "Times"), "fact", 1),
        ("at the time", ("Times",), "fact", 0),
        ("Poncho, blankets; tapes", ("blankets", "tapes", "feet", "poncho"), "facts", 0.75),
        ("", ("a",), "fact", 0),
    ],
)
def test_a_fact_is_right_where_all_its_words_stand_in_the_answer(
    answer: str, texts: tuple[str, ...], score: str, right: float
) -> None:
    assert Reference(score=score, texts=texts)(answer) == right


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_collection(tmp_path / "collection")


def measure(
    model: TransformersModel, tokenizer: ChatTokenizer, experiment: Experiment
) -> dict[str, list[Record]]:
    runner = UnitRunner(model, tokenizer, experiment)
    found: dict[str, list[Record]] = {}
    for unit in experiment.units():
        work = tuple(("aware", contender) for contender in experiment.contenders)
        found.setdefault(unit.task, []).extend(runner.run([(unit, work)]))
    return found


def test_a_document_that_is_run_once_gives_each_question_what_its_own_run_gives(
    model: TransformersModel, tokenizer: ChatTokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    capture = OneProcessGenerator.capture

    def counted(self: OneProcessGenerator, prompt: list[int], **options: Any) -> Any:
        earlier = options.get("earlier")
        runs.append(len(prompt) - (len(earlier.token_ids) if earlier else 0))
        return capture(self, prompt, **options)

    monkeypatch.setattr(OneProcessGenerator, "capture", counted)
    options: dict[str, Any] = {"methods": "full,snapkv,compactor", "budgets": "30%", "max_new_tokens": 6}
    shared = read_experiment(EvalConfig(data=str(folder), lengths="512", **options))
    assert shared.tasks == ("fact", "two_hops")
    measured = measure(model, tokenizer, shared)
    assert sum(run > 200 for run in runs) == 2  # one for each document
    examples = shared.data["fact", 512]
    single = folder / "single.jsonl"
    write_lines(
        single,
        (
            {
                "context": example.document,
                "question": str(example.messages[0]["content"]).removeprefix(example.document).strip(),
                "answers": [example.answer],
            }
            for example in examples
        ),
    )
    alone = measure(model, tokenizer, read_experiment(EvalConfig(data=str(single), **options)))
    for record, expected in zip(measured["fact"], alone["single.jsonl"], strict=True):
        assert record.key.method == expected.key.method
        assert record.kept_bytes == expected.kept_bytes
        assert record.turns[0].text.split()[:6] == expected.turns[0].text.split()[:6]
        assert record.turns[0].nll == pytest.approx(expected.turns[0].nll, rel=1e-3, abs=1e-4)


def test_divergence_is_nothing_for_the_full_cache_and_something_for_a_random_one(
    model: TransformersModel, tokenizer: ChatTokenizer, folder: Path
) -> None:
    experiment = read_experiment(
        EvalConfig(data=str(folder), lengths="512", methods="full,random", budgets="5%")
    )
    records = {
        record.key: record for task in measure(model, tokenizer, experiment).values() for record in task
    }
    for record in records.values():
        (turn,) = record.turns
        assert len(turn.kl) >= 1
        assert turn.kl[0] < 1e-6  # prefill's own
        assert (max(turn.kl) < 1e-4) == (record.key.method == "full")
    fingerprint = next(iter(records)).fingerprint
    found = losses(experiment, fingerprint, records)
    assert {loss.task for loss in found} == {"fact", "two_hops", ALL_TASKS}
    (everything,) = (loss for loss in found if loss.task == ALL_TASKS)
    full = [r for key, r in records.items() if key.method == "full" and any(r.turns[0].scores.values())]
    assert (everything.num_examples, everything.num_right) == (4, len(full))
    assert everything.kl[0] is not None
    assert everything.kl[0] > 0.01


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"task": "poem", "document": "0"}, "line 5 of questions.jsonl has task 'poem'"),
        ({"task": "fact", "document": "2"}, "documents 0, 1"),
    ],
)
def test_a_wrong_question_is_refused_by_its_line(folder: Path, record: dict[str, str], message: str) -> None:
    questions = lines(folder / "questions.jsonl")
    write_lines(folder / "questions.jsonl", [*questions, {**questions[0], **record}])
    with pytest.raises(ConfigurationError, match=message):
        read_collection(folder, lengths=(512,), count_tokens=count_words)


def test_a_length_above_every_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="--lengths has 9000; no kind of document"):
        read_collection(folder, lengths=(9000,), count_tokens=count_words)
