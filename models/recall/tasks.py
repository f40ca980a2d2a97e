"""Evaluation tasks: a conversation of a wanted length and the one right answer to its last question.

The seam to `kvferry eval`: `TASKS[name].example(num_tokens=..., seed=...)` gives chat messages (or their
token ids) and the expected answer. Examples are drawn from a namespace of seeds that training never uses;
with `held_out` also from entities and wordings that training never asks about. Runs no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from kvferry.models.recall import documents, questions
from kvferry.models.recall.documents import HELD_OUT_POOL, TRAINING_POOL, EntityPool, Fact
from kvferry.models.recall.questions import Question
from kvferry.models.recall.small_talk import SMALL_TALK
from kvferry.models.recall.vocabulary import (
    ASSISTANT_ID,
    BOS_ID,
    DIGIT_ATTRIBUTES,
    END_ID,
    USER_ID,
    encode,
)
from kvferry.shared.errors import ConfigurationError

MIN_TOKENS = 256
"""Shortest prompt that every task fits into."""

_NUM_FACTS = 8


class Message(TypedDict):
    """One chat message, as the OpenAI API and chat templates take it."""

    role: Literal["user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """A conversation that ends with a user's question, and its answer.

    Attributes:
        document: what the first message says before its question.
    """

    messages: tuple[Message, ...]
    answer: str
    document: str

    @property
    def prompt_token_ids(self) -> list[int]:
        """What the chat template makes of the messages, generation prompt included."""
        ids = [BOS_ID]
        for message in self.messages:
            role = USER_ID if message["role"] == "user" else ASSISTANT_ID
            ids += [role, *encode(message["content"]), END_ID]
        return [*ids, ASSISTANT_ID]

    @property
    def answer_token_ids(self) -> list[int]:
        """The answer and the end token that must follow it."""
        return [*encode(self.answer), END_ID]


@dataclass(frozen=True, kw_only=True)
class _Material:
    """What a task puts into a conversation: sentences that keep their order within a list, and the turns."""

    statements: list[list[str]]
    turns: list[Question]


_Builder = Callable[[random.Random, int, EntityPool, bool], _Material]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of question; `description` is for tables."""

    name: str
    description: str
    build: _Builder

    def example(
        self, *, num_tokens: int, seed: int, held_out: bool = False, depth: float | None = None
    ) -> Example:
        """The seed's example, with a prompt of num_tokens tokens or at most 12 fewer.

        Args:
            depth: where in the filler all statements stand together, 0 its start to 1 its end; None scatters
                them. The same seed has the same statements and filler at every depth.

        Raises:
            ConfigurationError: num_tokens is too small for the task, or depth is outside 0 to 1.
        """
        if depth is not None and not 0 <= depth <= 1:
            raise ConfigurationError(f"depth is {depth}; it must be 0 to 1")
        if num_tokens < MIN_TOKENS:
            raise ConfigurationError(f"num_tokens is {num_tokens}; tasks need at least {MIN_TOKENS}")
        split = "held_out" if held_out else "standard"
        rng = random.Random(f"evaluation/{split}/{self.name}/{num_tokens}/{seed}")
        material = self.build(rng, num_tokens, HELD_OUT_POOL if held_out else TRAINING_POOL, held_out)
        turns = material.turns
        used = 3 + documents.count_words(turns[-1].text) + 1  # <bos>, <user>, <end>, <assistant>
        used += sum(4 + documents.count_words(f"{t.text} {t.answer}") for t in turns[:-1])
        used += sum(documents.count_words(s) for sentences in material.statements for s in sentences)
        filler = documents.fill(rng, num_tokens - used)
        if depth is None:
            sentences = documents.interleave(rng, *material.statements, filler)
        else:
            before = round(depth * len(filler))
            statements = documents.interleave(rng, *material.statements)
            sentences = [*filler[:before], *statements, *filler[before:]]
        document = " ".join(sentences)
        messages: list[Message] = []
        for i, turn in enumerate(turns):
            content = turn.text if i else f"{document} {turn.text}"
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": turn.answer})
        return Example(messages=tuple(messages[:-1]), answer=turns[-1].answer, document=document)


def _with_digits(facts: list[Fact]) -> Fact:
    """A fact whose value is digits: those cannot be guessed."""
    return next((f for f in facts if f.attribute in DIGIT_ATTRIBUTES), facts[0])


def _statements(
    rng: random.Random, facts: list[Fact], held_out: bool, *, also: bool = True
) -> list[list[str]]:
    return [fact.statements(rng, held_out=held_out, also=also) for fact in facts]


def _single_needle(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> _Material:
    digits = EntityPool(adjectives=pool.adjectives, nouns=pool.nouns, attributes=DIGIT_ATTRIBUTES)
    facts = documents.draw_facts(rng, digits, 1)
    return _Material(
        statements=_statements(rng, facts, held_out),
        turns=[questions.ask_single(rng, facts[0], held_out=held_out)],
    )


def _multi_key(num_facts: Callable[[int], int], *, hard: bool = False, num_turns: int = 1) -> _Builder:
    def build(rng: random.Random, num_tokens: int, pool: EntityPool, held_out: bool) -> _Material:
        count = num_facts(num_tokens)
        if hard:
            pool = documents.hard_grid(rng, pool, count)
        facts = documents.draw_facts(rng, pool, count)
        target = _with_digits(facts)
        others = [f for f in facts if f is not target]
        asked = [*rng.sample(others, num_turns - 1), target]
        return _Material(
            statements=_statements(rng, facts, held_out),
            turns=[questions.ask_single(rng, f, held_out=held_out) for f in asked],
        )

    return build


def _multi_value(*, also: bool) -> _Builder:
    def build(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> _Material:
        facts = documents.draw_facts(rng, pool, _NUM_FACTS)
        target = _with_digits(facts)
        second = target.values[0]
        while second == target.values[0]:
            second = documents.draw_value(rng, target.attribute)
        several = Fact(attribute=target.attribute, entity=target.entity, values=(target.values[0], second))
        facts = [f for f in facts if f is not target]
        return _Material(
            statements=_statements(rng, [*facts, several], held_out, also=also),
            turns=[questions.ask_several(rng, several)],
        )

    return build


def _multi_query(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> _Material:
    facts = documents.draw_facts(rng, pool, _NUM_FACTS)
    first, second = rng.sample(facts, 2)
    return _Material(
        statements=_statements(rng, facts, held_out), turns=[questions.ask_pair(rng, first, second)]
    )


def _variables(hops: int) -> _Builder:
    def build(rng: random.Random, _: int, __: EntityPool, ___: bool) -> _Material:
        chains = documents.draw_chains(rng, 4)
        # The first chain is always of full length, so that the hops asked for exist.
        return _Material(
            statements=[c.statements() for c in chains], turns=[questions.ask_variable(rng, chains[0], hops)]
        )

    return build


def _frequent_word(rng: random.Random, _: int, __: EntityPool, ___: bool) -> _Material:
    word, sentences = documents.draw_sayings(rng)
    return _Material(statements=[sentences], turns=[questions.ask_saying(rng, word)])


def _unknown(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> _Material:
    facts = documents.draw_facts(rng, pool, _NUM_FACTS)
    absent = documents.absent_fact(rng, pool, facts)
    assert absent is not None  # eight facts cannot fill a pool
    return _Material(
        statements=_statements(rng, facts, held_out),
        turns=[questions.ask_single(rng, absent, held_out=held_out)],
    )


def _small_talk(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> _Material:
    facts = documents.draw_facts(rng, pool, _NUM_FACTS)
    talk = rng.choice(SMALL_TALK)
    prompt = rng.choice(talk.held_out_prompts if held_out else talk.prompts)
    return _Material(
        statements=_statements(rng, facts, held_out),
        turns=[
            questions.ask_single(rng, facts[0], held_out=held_out),
            Question(text=prompt, answer=talk.reply),
        ],
    )


def _eight(_: int) -> int:
    return _NUM_FACTS


def _dense(num_tokens: int) -> int:
    return max(4, num_tokens // 64)


_ALL = (
    Task(name="single_needle", description="single needle", build=_single_needle),
    Task(name="multi_key_8", description="one of 8 facts", build=_multi_key(_eight)),
    Task(name="multi_key_dense", description="one of T/64 facts", build=_multi_key(_dense)),
    Task(name="multi_key_hard", description="hard grid, T/64 facts", build=_multi_key(_dense, hard=True)),
    Task(name="third_turn", description="third turn, 8 facts", build=_multi_key(_eight, num_turns=3)),
    Task(name="multi_value", description='two values, second says "also"', build=_multi_value(also=True)),
    Task(name="multi_value_plain", description="two values, worded alike", build=_multi_value(also=False)),
    Task(name="multi_query", description="two facts in one question", build=_multi_query),
    Task(name="variables_1_hop", description="variables, one hop", build=_variables(1)),
    Task(name="variables_2_hops", description="variables, two hops", build=_variables(2)),
    Task(name="frequent_word", description="most frequent word", build=_frequent_word),
    Task(name="unknown", description="document does not say", build=_unknown),
    Task(name="small_talk", description="small talk after a document", build=_small_talk),
)
TASKS = {task.name: task for task in _ALL}
