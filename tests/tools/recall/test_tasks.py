"""Evaluation examples can be answered from their documents, and training never sees them."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import pairwise

import pytest

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall.conversations import Mixture, draw_batch, draw_conversation
from kvferry.tools.recall.questions import (
    HELD_OUT_SINGLE_TEMPLATES,
    SINGLE_TEMPLATES,
    TRAINING_SINGLE_TEMPLATES,
    UNKNOWN_ANSWER,
)
from kvferry.tools.recall.small_talk import SMALL_TALK
from kvferry.tools.recall.tasks import MIN_TOKENS, TASKS, Example
from kvferry.tools.recall.vocabulary import (
    ASSISTANT_ID,
    END_ID,
    HELD_OUT_ADJECTIVES,
    HELD_OUT_NOUNS,
    USER_ID,
    decode,
)

RECALL = (
    "single_needle",
    "multi_key_8",
    "multi_key_dense",
    "multi_key_hard",
    "third_turn",
    "fifth_turn",
    "qa_facts",
    "mixed_turns",
)


def document_of(example: Example) -> str:
    return example.messages[0]["content"]


def key_of(question: str) -> str:
    """`pin of the red barn` of a question that asks for it."""
    words = question.split(" the ", 1)[1]
    return words.removesuffix(" ?").removesuffix(" .")


@pytest.mark.covering(2)
@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("num_tokens", [MIN_TOKENS, 513, 1500])
@pytest.mark.parametrize("name", TASKS)
def test_prompt_is_as_long_as_asked_or_a_little_shorter(name: str, num_tokens: int, held_out: bool) -> None:
    for seed in range(10):
        example = TASKS[name].example(num_tokens=num_tokens, seed=seed, held_out=held_out)
        assert num_tokens - 12 <= len(example.prompt_token_ids) <= num_tokens


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("name", RECALL)
def test_document_states_the_answer_once(name: str, held_out: bool) -> None:
    for seed in range(30):
        example = TASKS[name].example(num_tokens=700, seed=seed, held_out=held_out)
        key = key_of(example.messages[-1]["content"].rsplit(" . ", 1)[-1])
        stated = [s for s in document_of(example).split(" . ") if f"the {key} is " in s]
        assert len(stated) == 1
        assert stated[0].endswith((f" is {example.answer}", f" is now {example.answer}"))


@pytest.mark.parametrize("name", ["multi_value", "multi_value_plain"])
def test_two_values_stand_in_the_documents_order(name: str) -> None:
    for seed in range(30):
        example = TASKS[name].example(num_tokens=700, seed=seed)
        first, second = example.answer.split(" , ")
        document = document_of(example)
        assert f" {first} ." in document
        assert f" {second} ." in document[document.index(f" {first} .") + 1 :]
        assert (f"is also {second} ." in document) is (name == "multi_value")


def test_both_facts_of_a_query_are_stated() -> None:
    for seed in range(30):
        example = TASKS["multi_query"].example(num_tokens=700, seed=seed)
        question = example.messages[-1]["content"].rsplit(" . ", 1)[-1]
        keys = key_of(question).split(" and the ")
        for key, answer in zip(keys, example.answer.split(" , "), strict=True):
            assert f"the {key} is {answer} ." in document_of(example)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("name", ["distant_pair", "distant_values"])
def test_long_answers_are_two_numbers_with_other_facts_between_them(name: str, held_out: bool) -> None:
    for seed in range(30):
        example = TASKS[name].example(num_tokens=700, seed=seed, held_out=held_out)
        assert re.fullmatch(r"\d \d \d \d , \d \d \d \d", example.answer)
        assert 6 <= len(example.answer.split()) <= 12
        stated = re.findall(r"(\d \d \d \d) \.", document_of(example))
        assert len(stated) in (8, 9)
        values = {stated[0], stated[-1]}
        assert values == set(example.answer.split(" , "))
        if name == "distant_values":
            assert example.answer == f"{stated[0]} , {stated[-1]}"


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(("name", "cells"), [("table", 1), ("table_pair", 2)])
def test_a_tables_cells_are_stated_in_one_piece(name: str, cells: int, held_out: bool) -> None:
    for seed in range(30):
        example = TASKS[name].example(num_tokens=700, seed=seed, held_out=held_out)
        (rows,) = re.findall(r"(?:- [a-z ]+ : \d \d \d \d \. ?)+", document_of(example))
        cell = dict(re.findall(r"- ([a-z ]+) : (\d \d \d \d) \.", rows))
        assert len(cell) == 8
        values = example.answer.split(" , ")
        assert len(values) == cells
        asked = [key for key, value in cell.items() if value in values]
        question = example.messages[-1]["content"].removeprefix(example.document)
        assert all(key.split(" of ")[1] in question for key in asked)
        assert len(example.answer.split()) == (4 if cells == 1 else 9)


def test_a_listing_is_in_one_piece_and_answers_have_six_tokens() -> None:
    for seed in range(30):
        example = TASKS["code_listing"].example(num_tokens=700, seed=seed)
        (lines,) = re.findall(r"(?:set \w+ = [\w ]+ \. ?)+", document_of(example))
        assert lines.count("set ") >= 8
        assert re.fullmatch(r"\w+ = \w+ = \d \d", example.answer)


@pytest.mark.parametrize(
    ("name", "hops"), [("variables_1_hop", 1), ("variables_2_hops", 2), ("code_listing", 2)]
)
def test_variables_take_the_hops_of_their_task(name: str, hops: int) -> None:
    example = TASKS[name].example(num_tokens=700, seed=3)
    asked = example.messages[-1]["content"].split()[-2]
    steps = [asked, *example.answer.split(" = ")]
    assert len(steps) == hops + 2
    for left, right in pairwise(steps):
        assert f"set {left} = {right} ." in document_of(example)


def test_common_words_are_the_two_said_most() -> None:
    for seed in range(30):
        example = TASKS["common_words"].example(num_tokens=700, seed=seed)
        said = Counter(re.findall(r"said (\w+) \.", document_of(example)))
        (first, most), (second, more), (_, others) = said.most_common(3)
        assert example.answer == f"{first} , {second}"
        assert most > more > others


def test_paragraphs_state_three_facts_of_one_entity_side_by_side() -> None:
    example = TASKS["qa_facts"].example(num_tokens=700, seed=1)
    facts = re.findall(r"the [a-z ]+? of the (\w+ \w+) is ", document_of(example))
    assert len(facts) == 15
    assert all(len(set(facts[i : i + 3])) == 1 for i in range(0, 15, 3))
    assert len(set(facts)) == 5


def test_turns_of_a_mixed_conversation_are_each_of_another_kind() -> None:
    example = TASKS["mixed_turns"].example(num_tokens=700, seed=5)
    asked = [m["content"] for m in example.messages if m["role"] == "user"]
    assert len(asked) == 4
    variable = asked[1].split()[-2]
    assert f"set {variable} = {example.messages[3]['content']} ." in example.document
    said = Counter(re.findall(r"said (\w+) \.", example.document))
    assert example.messages[5]["content"] == said.most_common(1)[0][0]


def test_unknown_fact_is_not_stated() -> None:
    for seed in range(30):
        example = TASKS["unknown"].example(num_tokens=700, seed=seed)
        assert example.answer == UNKNOWN_ANSWER
        assert f"the {key_of(example.messages[-1]['content'].rsplit(' . ', 1)[-1])} is" not in document_of(
            example
        )


def test_same_seed_gives_the_same_example_and_others_differ() -> None:
    task = TASKS["multi_key_8"]
    assert task.example(num_tokens=512, seed=4) == task.example(num_tokens=512, seed=4)
    texts = {document_of(task.example(num_tokens=512, seed=s)) for s in range(50)}
    assert len(texts) == 50


def test_too_short_a_prompt_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_tokens is 100"):
        TASKS["single_needle"].example(num_tokens=100, seed=0)


def test_training_asks_about_no_held_out_entity_or_wording() -> None:
    mixture = Mixture(unknown=0.3, pair=0.3, several=0.3, small_talk=0.2, wide=0.5)
    held_out_talk = {p for t in SMALL_TALK for p in t.held_out_prompts}
    openings = {t.split("{a}")[0] for t in HELD_OUT_SINGLE_TEMPLATES}
    assert not openings & {t.split("{a}")[0] for t in TRAINING_SINGLE_TEMPLATES}
    assert set(TRAINING_SINGLE_TEMPLATES) > set(SINGLE_TEMPLATES)
    for seed in range(30):
        ids, _ = draw_conversation(random.Random(f"t{seed}"), 1000, mixture)
        for message in decode(ids).split("<|user|> ")[1:]:
            content = message.split(" <|end|>")[0]
            question = content.rsplit(" . ", 1)[-1]
            assert content not in held_out_talk
            assert not question.startswith(tuple(openings))
            if re.search(r"^[^.]* the [a-z ]+ of the \w+ \w+( now)? [.?]$", question):
                assert not set(question.split()) & (HELD_OUT_ADJECTIVES | HELD_OUT_NOUNS)


def test_training_asks_every_kind_of_question_and_in_every_wording() -> None:
    mixture = Mixture(unknown=0.1, pair=0.3, several=0.3, small_talk=0.1, chains=0.5, sayings=0.5, wide=0.5)
    asked = " ".join(decode(draw_conversation(random.Random(f"t{s}"), 600, mixture)[0]) for s in range(60))
    for opening in {t.split("{a}")[0] for t in TRAINING_SINGLE_TEMPLATES}:
        assert opening in asked
    for said in (
        "which two were said most often ?",
        "what word was said most often ?",
        "the value of",
        "the two values of",
    ):
        assert said in asked


def test_training_and_evaluation_draw_different_documents() -> None:
    """Same numbers as seeds, disjoint streams."""
    token_ids, _ = draw_batch("0/0", 4, 512, Mixture())
    trained = {s for row in token_ids.tolist() for s in decode(row).split(" . ")}
    for name, task in TASKS.items():
        evaluated = set(document_of(task.example(num_tokens=512, seed=0)).split(" . "))
        assert len(evaluated & trained) <= 2, name


@pytest.mark.parametrize("num_tokens", [64, 257, 1024])
def test_answer_marks_cover_answers_and_nothing_else(num_tokens: int) -> None:
    for seed in range(10):
        ids, marks = draw_conversation(random.Random(seed), num_tokens, Mixture(small_talk=0.1))
        assert len(ids) == len(marks) == num_tokens + 1
        speaker = None
        for token, mark, before in zip(ids, marks, [0, *ids], strict=False):
            speaker = ASSISTANT_ID if before == ASSISTANT_ID else speaker
            if before == END_ID or token == USER_ID:
                speaker = None
            assert mark == (speaker == ASSISTANT_ID), decode(ids)


def test_batches_follow_from_their_seed() -> None:
    first, again, other = (draw_batch(s, 3, 200, Mixture()) for s in ("1/7", "1/7", "1/8"))
    assert first[0].equal(again[0])
    assert first[1].equal(again[1])
    assert not first[0].equal(other[0])
    assert first[0].shape == first[1].shape == (3, 201)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_stands_at_the_depth_asked_for(depth: float) -> None:
    for seed in range(10):
        example = TASKS["single_needle"].example(num_tokens=1000, seed=seed, depth=depth)
        before = example.document[: example.document.index(f"is {example.answer} .")]
        place = len(before.split()) / len(example.document.split())
        assert abs(place - depth) < 0.04
        scattered = TASKS["single_needle"].example(num_tokens=1000, seed=seed)
        assert scattered.answer == example.answer


def test_the_first_message_is_the_document_and_a_question() -> None:
    for name, task in TASKS.items():
        example = task.example(num_tokens=400, seed=0)
        assert example.messages[0]["content"].startswith(f"{example.document} "), name
        assert example.document.endswith(" ."), name
