"""Records of RULER, LongBench and SCBench are recognised by their fields and scored by their own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.services.launcher import cli
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.answer_scores import Reference
from kvferry.tools.evaluation.conversation import tokenize
from kvferry.tools.evaluation.data import read_data
from kvferry.tools.evaluation.public_formats import LONGBENCH, DatasetExample
from kvferry.tools.recall.tasks import TASKS


def written(folder: Path, *records: object, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def read(folder: Path, *records: object, name: str = "data.jsonl") -> list[DatasetExample]:
    examples = read_data(written(folder, *records, name=name))
    assert all(isinstance(example, DatasetExample) for example in examples)
    return list(examples)


def ruler_record(**changes: Any) -> dict[str, Any]:
    text = "Memorize the numbers.\nthe number of mist is 123 . that of fog is 45 .\nWhich numbers are there?"
    return {"index": 3, "input": text, "outputs": ["123", "45"], "length": 30, **changes}


def longbench_record(dataset: str, **changes: Any) -> dict[str, Any]:
    record = {
        "input": "Who lives there?", "context": "A sailor lives there.", "answers": ["The sailor"],
        "dataset": dataset, "length": 4, "language": "en", "all_classes": None, "_id": "1",
    }  # fmt: skip
    return {**record, **changes}


def test_ruler_records_want_all_outputs_and_have_the_question_in_the_last_line(tmp_path: Path) -> None:
    (example,) = read(tmp_path, ruler_record(answer_prefix=" The numbers are"))
    assert example.messages[0]["content"] == ruler_record()["input"]
    assert example.document.endswith("of fog is 45 .")
    assert (example.answer, example.others) == ("123, 45", ())
    (reference,) = example.references
    assert [reference(text) for text in ("45 and 123.", "it is 123", "none")] == [1.0, 0.5, 0.0]
    assert example.answer_prefix == " The numbers are"


@pytest.mark.parametrize(
    ("name", "changes"), [("qa_1.jsonl", {}), ("qa_2/validation.jsonl", {}), ("data.jsonl", {"task": "qa_1"})]
)
def test_rulers_questions_want_one_of_the_outputs(tmp_path: Path, name: str, changes: dict[str, str]) -> None:
    (example,) = read(tmp_path, ruler_record(**changes), name=name)
    assert (example.answer, example.others) == ("123", ("45",))
    assert [example.references[0](text) for text in ("IT IS 45", "46")] == [1.0, 0.0]


def test_an_answers_prefix_stands_at_the_end_of_the_prompt(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    with_prefix, without = read(tmp_path, ruler_record(answer_prefix="the pin is"), ruler_record())
    long, short = tokenize(with_prefix, tokenizer), tokenize(without, tokenizer)
    prompt = long.turns[0].prompt_token_ids
    end = len(short.turns[0].prompt_token_ids)
    assert prompt[:end] == short.turns[0].prompt_token_ids
    assert tokenizer.decode(prompt[end:]).split() == ["the", "pin", "is"]
    assert long.num_document_tokens == short.num_document_tokens > 0


def test_longbench_records_are_scored_by_their_data_set(tmp_path: Path) -> None:
    (example,) = read(tmp_path, longbench_record("hotpotqa"))
    content = example.messages[0]["content"]
    assert content.startswith("A sailor lives there.\n\n")
    assert content.endswith("Question: Who lives there?")
    assert example.document == "A sailor lives there."
    assert example.references[0].score == "f1"
    scores = [read(tmp_path, longbench_record(name, all_classes=["a", "b"]))[0] for name in LONGBENCH]
    assert {each.references[0].score for each in scores} == {
        "f1", "rouge_l", "classification", "retrieval", "edit_similarity",
    }  # fmt: skip
    assert read(tmp_path, longbench_record("qasper_e"))[0].references[0].score == "f1"


def test_f1_counts_words_without_articles_case_and_punctuation() -> None:
    reference = Reference(score="f1", texts=("The old sailor", "a mill"))
    assert reference("old sailor!") == 1.0
    assert reference("Sailor of the mill") == pytest.approx(2 * 1 / (3 + 1))  # of the second answer
    assert reference("nobody") == reference("") == 0.0
    assert Reference(score="f1", texts=("北京大学",))("北京") == pytest.approx(4 / 6)


def test_classification_divides_by_the_labels_named_and_ignores_parts_of_the_right_one() -> None:
    reference = Reference(score="classification", texts=("city area",), classes=("city area", "area", "date"))
    assert [reference(text) for text in ("city area", "city area or date", "area", "")] == [1, 0.5, 0, 0]
    first = Reference(score="classification", texts=("date",), classes=("date", "area"), first_line=True)
    assert first("\ndate\nQuestion: which area?") == 1.0


def test_retrieval_is_the_share_of_numbers_that_are_right() -> None:
    reference = Reference(score="retrieval", texts=("Paragraph 12",))
    assert [reference(text) for text in ("12", "paragraph 12, not 1", "2", "none")] == [1, 0.5, 0, 0]


def test_rouge_l_follows_the_order_of_words_and_code_that_of_characters() -> None:
    rouge = Reference(score="rouge_l", texts=("the sailor painted the bridge",))
    assert rouge("the bridge the sailor painted") == pytest.approx(2 * 3 / 10)
    assert rouge("the sailor painted the bridge") == 1.0
    code = Reference(score="edit_similarity", texts=("return a",))
    assert code("\n# the sum\nreturn b\nmore") == pytest.approx(2 * 7 / 16)


def test_scbench_records_ask_in_turns_about_one_context(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    turns = [{"input": "Which pin?", "answer": "12"}, {"input": "Which names?", "answer": ["bob", "alice"]}]
    record = {"id": 0, "context": "the pin is 12 . bob and alice came .", "multi_turns": turns}
    (example,) = read(tmp_path, record, name="scbench_kv.jsonl")
    assert [m["role"] for m in example.messages] == ["user", "assistant", "user"]
    assert [m["content"] for m in example.messages[1:]] == ["12", "Which names?"]
    assert example.messages[0]["content"] == f"{record['context']}\n\nWhich pin?"
    assert [reference("bob") for reference in example.references] == [0.0, 0.5]
    conversation = tokenize(example, tokenizer)
    assert [turn.answers for turn in conversation.turns] == [("12",), ("bob, alice",)]
    (summary,) = read(tmp_path, record, name="scbench_summary.jsonl")
    assert summary.references[0].score == "rouge_l"
    turns[0]["task"] = "scbench_qa_eng"
    assert [r.score for r in read(tmp_path, record)[0].references] == ["f1", "contains_all"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "a", "label": "b"},
            "has the fields label, prompt; understood are own questions: .*SCBench",
        ),
        (["a"], "has the fields none; understood are own questions"),
        (ruler_record(outputs="123"), "outputs must be a list of at least one text; RULER: input"),
        ({"outputs": ["1"]}, "line 1 of .* has no input; RULER"),
        (longbench_record("hotpotqa", answers=[]), "answers must be a list of at least one text; LongBench"),
        (longbench_record("poems"), "dataset is 'poems'; known are narrativeqa, "),
        (longbench_record("trec"), "all_classes must be a list"),
        ({"context": "a", "multi_turns": []}, "at least one turn; SCBench"),
        ({"context": "a", "multi_turns": ["b"]}, "SCBench: context"),
        ({"context": "a", "multi_turns": [{"input": "b"}]}, "has no answer; SCBench"),
        (
            {"context": "a", "multi_turns": [{"input": "b", "answer": "A", "options": ["c"]}]},
            "options are not understood",
        ),
    ],
)
def test_other_records_are_refused_with_what_is_understood(
    tmp_path: Path, record: object, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_data(written(tmp_path, record))


def test_the_formats_own_scores_are_reported_beside_exact_match(tmp_path: Path) -> None:
    """The demo model's own questions as SCBench turns, one conversation shorter than the other."""
    records = []
    for seed in range(2):
        example = TASKS["third_turn"].example(num_tokens=256, seed=seed)
        contents = [message["content"] for message in example.messages]
        questions = [contents[0].removeprefix(example.document).strip(), *contents[2::2]]
        turns = [
            {"input": question, "answer": [*answer.split()]}
            for question, answer in zip(questions, [*contents[1::2], example.answer], strict=True)
        ]
        records.append({"id": seed, "context": example.document, "multi_turns": turns[seed:]})
    data = written(tmp_path, *records, name="scbench_kv.jsonl")
    arguments = ("--methods", "full,snapkv", "--budgets", "25%", "--max-new-tokens", "8", "--threads", "1")
    with pytest.raises(SystemExit) as caught:
        cli.main(
            ["eval", *arguments, "--settings", "aware,once", "--data", str(data), "--out", str(tmp_path)]
        )
    assert caught.value.code == 0
    cells = {
        (c["setting"], c["method"]): c for c in json.loads((tmp_path / "results.json").read_text())["cells"]
    }
    assert set(cells) == {(setting, method) for setting in ("aware", "once") for method in ("full", "snapkv")}
    scores = cells["aware", "full"]["scores"]
    assert len(scores["accuracy_by_turn"]) == 3
    lines = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    found = [
        turn["scores"]["contains_all"]
        for line in lines
        if (line["key"]["setting"], line["key"]["method"]) == ("aware", "full")
        for turn in line["turns"]
    ]
    assert len(found) == 5
    assert scores["named"] == {"contains_all": pytest.approx(sum(found) / 5)}
    assert scores["named"]["contains_all"] > 0.5
    table = (tmp_path / "results.md").read_text()
    assert (
        "| method | budget | kept | read | scbench_kv.jsonl | contains_all | NLL | agreement | n |" in table
    )
    assert "\ncontains_all: in %, the mean over all questions" in table
