"""Training data: conversations about documents, as token ids with a mark on every answer token.

A conversation is a document of filler and facts, then several turns of questions, so that every row teaches
multi-turn chat. Every row is drawn from its own seed. Evaluation draws from another namespace of seeds
(`tasks.py`), so that the two never share a conversation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall import documents, questions
from kvferry.tools.recall.documents import TRAINING_POOL, WIDE_POOL, Chain, Fact
from kvferry.tools.recall.questions import Question
from kvferry.tools.recall.small_talk import DOCUMENT_PROMPTS, DOCUMENT_REPLY, SMALL_TALK
from kvferry.tools.recall.vocabulary import (
    ASSISTANT_ID,
    BOS_ID,
    DIGITS,
    END_ID,
    PAD_ID,
    SYSTEM_ID,
    USER_ID,
    encode,
)

_TURN_TOKENS = 17
"""Tokens of a question and its answer, about."""

_MAX_FACTS = 64
_SYSTEM_PROMPTS = ("you are a helpful assistant .", "read the document and answer the question .")


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Probabilities, in [0, 1], of what a conversation contains.

    Attributes:
        question_share: range of the part of a row that is questions and answers.
        fact_share: range of the part of a document that is facts.
        hard: documents whose facts come from a small grid of near-duplicates.
        several: documents in which a part of the facts has two values; the part differs by document.
        plain: of those documents, the ones whose second values do not say "also".
        few_digits: documents whose values use two to five digits only, so that no digit identifies a value.
        pair, unknown, small_talk: questions for two facts, for an absent fact, and small talk.
        chains, sayings: documents with variable chains, and with one or two frequent words.
        wide: documents that also use entities and wordings other than those of the tasks.
        introduced: documents given in a separate turn before the first question.
        two_parts: rows whose document is given in two parts, with questions between them.
    """

    question_share: tuple[float, float] = (0.15, 0.45)
    fact_share: tuple[float, float] = (0.02, 0.7)
    hard: float = 0.3
    several: float = 0.15
    plain: float = 0.3
    few_digits: float = 0.0
    pair: float = 0.15
    unknown: float = 0.08
    small_talk: float = 0.03
    chains: float = 0.25
    sayings: float = 0.1
    wide: float = 0.0
    introduced: float = 0.15
    two_parts: float = 0.1

    def __post_init__(self) -> None:
        for name in ("question_share", "fact_share"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ConfigurationError(f"{name} is {(low, high)}; allowed is 0 < low <= high <= 1")
        for name, value in vars(self).items():
            if isinstance(value, float) and not 0 <= value <= 1:
                raise ConfigurationError(f"{name} is {value}; allowed is 0 to 1")

    @classmethod
    def from_json(cls, fields: dict[str, object]) -> Mixture:
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})  # type: ignore[arg-type]


class _Row:
    """Token ids and answer weights, message by message."""

    def __init__(self) -> None:
        self.token_ids = [BOS_ID]
        self.is_answer = [0]

    def add(self, role: int, text: str) -> None:
        ids = encode(text)
        self.token_ids += [role, *ids, END_ID]
        if role == ASSISTANT_ID:
            self.is_answer += [0, *([1] * (len(ids) + 1))]
        else:
            self.is_answer += [0] * (len(ids) + 2)

    def add_turn(self, question: Question, before: str = "") -> None:
        self.add(USER_ID, f"{before} {question.text}".strip())
        self.add(ASSISTANT_ID, question.answer)


@dataclass(frozen=True)
class _Said:
    """The words that a document says most often, the most frequent first."""

    words: tuple[str, ...]


def _sayings(rng: random.Random) -> tuple[tuple[str, ...], list[str]]:
    """Draw the one or two words that are said often, and sentences that say them and others."""
    if rng.random() < 0.5:
        return documents.draw_common_sayings(rng, rng.randint(4, 6))
    word, sentences = documents.draw_sayings(rng, rng.randint(3, 6))
    return (word,), sentences


def _ask_said(rng: random.Random, said: _Said) -> Question:
    if len(said.words) == 1:
        return questions.ask_saying(rng, *said.words)
    return questions.ask_common(rng, (said.words[0], said.words[1]))


class _Part:
    """A document, or one of its parts, and the questions that it allows.

    At most a share of `num_tokens` is for questions: asking for the same thing twice would teach the model to
    copy its first answer.
    """

    def __init__(self, rng: random.Random, num_tokens: int, mixture: Mixture) -> None:
        for_questions = max(2 * _TURN_TOKENS, int(num_tokens * rng.uniform(*mixture.question_share)))
        self.facts, statements = self._facts(rng, num_tokens - for_questions, mixture)
        self.chains: list[Chain] = []
        self.words: tuple[str, ...] = ()
        lists = [statements]
        room = num_tokens > 150
        if room and rng.random() < mixture.chains:
            self.chains = documents.draw_chains(rng, rng.randint(1, 4))
            lists += [chain.statements() for chain in self.chains]
        if room and rng.random() < mixture.sayings:
            self.words, sayings = _sayings(rng)
            lists.append(sayings)
        num_questions = len(self.facts) + sum(len(c.variables) for c in self.chains) + bool(self.words)
        num_words = num_tokens - min(for_questions, _TURN_TOKENS * (num_questions + 1))
        used = sum(documents.count_words(s) for sentences in lists for s in sentences)
        lists.append(documents.fill(rng, num_words - used))
        self.text = " ".join(documents.interleave(rng, *lists))

    @staticmethod
    def _facts(rng: random.Random, num_words: int, mixture: Mixture) -> tuple[list[Fact], list[str]]:
        most = max(2, min(_MAX_FACTS, int(num_words * rng.uniform(*mixture.fact_share) / 13)))
        count = rng.randint(max(2, most // 2), most)
        wide = rng.random() < mixture.wide
        pool = WIDE_POOL if wide else TRAINING_POOL
        if rng.random() < mixture.hard:
            pool = documents.hard_grid(rng, pool, count)
        several = rng.random() if rng.random() < mixture.several else 0.0
        few = rng.random() < mixture.few_digits
        digits = rng.sample(DIGITS, rng.randint(2, 5)) if few else DIGITS
        facts = documents.draw_facts(rng, pool, count, several=several, digits=digits)
        also = rng.random() >= mixture.plain
        templates = documents.TRAINING_FACT_TEMPLATES if wide else documents.FACT_TEMPLATES
        statements = (f.statements(rng, templates=templates, also=also) for f in facts)
        return facts, documents.interleave(rng, *statements)


class _QuestionSource:
    """Draws questions about parts; nothing is asked again before everything has been asked once."""

    def __init__(self, rng: random.Random, parts: list[_Part], mixture: Mixture) -> None:
        self._rng, self._parts, self._mixture = rng, parts, mixture

    def questions(self) -> Iterator[Question]:
        while True:
            yield from self._round()

    def _round(self) -> Iterator[Question]:
        rng, mixture = self._rng, self._mixture
        facts = [f for part in self._parts for f in part.facts]
        things: list[Fact | tuple[Chain, int] | _Said] = [*facts]
        things += [(c, hops) for part in self._parts for c in part.chains for hops in range(len(c.variables))]
        things += [_Said(part.words) for part in self._parts if part.words]
        rng.shuffle(things)
        while things:
            thing = things.pop()
            if rng.random() < mixture.small_talk:
                yield _talk(rng)
            if rng.random() < mixture.unknown:
                absent = documents.absent_fact(rng, TRAINING_POOL, facts)
                if absent is not None:
                    yield self._single(absent)
            if isinstance(thing, _Said):
                yield _ask_said(rng, thing)
            elif isinstance(thing, tuple):
                yield questions.ask_variable(rng, *thing)
            elif len(thing.values) > 1:
                yield questions.ask_several(rng, thing)
            elif things and _is_single(things[-1]) and rng.random() < mixture.pair:
                yield questions.ask_pair(rng, thing, cast(Fact, things.pop()))
            else:
                yield self._single(thing)

    def _single(self, fact: Fact) -> Question:
        wide = self._rng.random() < self._mixture.wide
        templates = questions.TRAINING_SINGLE_TEMPLATES if wide else questions.SINGLE_TEMPLATES
        return questions.ask_single(self._rng, fact, templates=templates)


def _is_single(thing: object) -> bool:
    return isinstance(thing, Fact) and len(thing.values) == 1


def _talk(rng: random.Random) -> Question:
    talk = rng.choice(SMALL_TALK)
    return Question(text=rng.choice(talk.prompts), answer=talk.reply)


def draw_conversation(rng: random.Random, num_tokens: int, mixture: Mixture) -> tuple[list[int], list[int]]:
    """Draw one row: token ids of num_tokens + 1 tokens, and 1 for each token of an answer, 0 elsewhere."""
    row = _Row()
    if rng.random() < 0.05:
        row.add(SYSTEM_ID, rng.choice(_SYSTEM_PROMPTS))
    while rng.random() < min(0.5, 5 * mixture.small_talk):
        row.add_turn(_talk(rng))
    num_parts = 2 if rng.random() < mixture.two_parts else 1
    parts: list[_Part] = []
    for index in range(num_parts):
        end = (index + 1) * num_tokens // num_parts
        parts.append(_Part(rng, max(60, end - len(row.token_ids)), mixture))
        _write_part(row, rng, parts[-1], _QuestionSource(rng, parts, mixture), mixture, end)
    return row.token_ids[: num_tokens + 1], row.is_answer[: num_tokens + 1]


def _write_part(
    row: _Row, rng: random.Random, part: _Part, source: _QuestionSource, mixture: Mixture, end: int
) -> None:
    """Append a document and questions until the row is `end` tokens long."""
    before = part.text
    if rng.random() < mixture.introduced:
        row.add_turn(Question(text=rng.choice(DOCUMENT_PROMPTS), answer=DOCUMENT_REPLY), before)
        before = ""
    for question in source.questions():
        row.add_turn(question, before)
        before = ""
        if len(row.token_ids) > end:
            return


def draw_batch(seed: str, num_rows: int, num_tokens: int, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Draw a batch of rows: token ids int64 and answer marks bool, both `[num_rows, num_tokens + 1]`.

    Args:
        seed: names the batch; the same seed gives the same batch on every machine.
    """
    token_ids = torch.full((num_rows, num_tokens + 1), PAD_ID)
    is_answer = torch.zeros((num_rows, num_tokens + 1), dtype=torch.bool)
    for i in range(num_rows):
        ids, marks = draw_conversation(random.Random(f"training/{seed}/{i}"), num_tokens, mixture)
        token_ids[i, : len(ids)] = torch.tensor(ids)
        is_answer[i, : len(marks)] = torch.tensor(marks, dtype=torch.bool)
    return token_ids, is_answer
