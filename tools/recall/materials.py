"""What the evaluation tasks put into a conversation: statements for the document, and questions with answers.

One builder per task. `tasks.py` names them, adds filler up to the wanted length and makes messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.tools.recall import documents, questions
from kvferry.tools.recall.documents import EntityPool, Fact
from kvferry.tools.recall.questions import Question
from kvferry.tools.recall.small_talk import SMALL_TALK
from kvferry.tools.recall.vocabulary import DIGIT_ATTRIBUTES, NAME_ATTRIBUTES, WORD_ATTRIBUTES

_NUM_FACTS = 8
_NUM_PROFILES = 5
_NUM_MIXED_FACTS = 4


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a task puts into a conversation: sentences that keep their order within a list, and the turns."""

    statements: list[list[str]]
    turns: list[Question]


Builder = Callable[[random.Random, int, EntityPool, bool], Material]


def _with_digits(facts: list[Fact]) -> Fact:
    """Return a fact whose value is digits, which cannot be guessed; the first fact if there is none."""
    return next((f for f in facts if f.attribute in DIGIT_ATTRIBUTES), facts[0])


def _statements(
    rng: random.Random, facts: list[Fact], held_out: bool, *, also: bool = True
) -> list[list[str]]:
    templates = documents.HELD_OUT_FACT_TEMPLATES if held_out else documents.FACT_TEMPLATES
    return [fact.statements(rng, templates=templates, also=also) for fact in facts]


def _wordings(held_out: bool) -> tuple[str, ...]:
    return questions.HELD_OUT_SINGLE_TEMPLATES if held_out else questions.SINGLE_TEMPLATES


def single_needle(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
    facts = documents.draw_facts(rng, _numbers(pool), 1)
    return Material(
        statements=_statements(rng, facts, held_out),
        turns=[questions.ask_single(rng, facts[0], templates=_wordings(held_out))],
    )


def multi_key(num_facts: Callable[[int], int], *, hard: bool = False, num_turns: int = 1) -> Builder:
    def build(rng: random.Random, num_tokens: int, pool: EntityPool, held_out: bool) -> Material:
        count = num_facts(num_tokens)
        if hard:
            pool = documents.hard_grid(rng, pool, count)
        facts = documents.draw_facts(rng, pool, count)
        target = _with_digits(facts)
        others = [f for f in facts if f is not target]
        asked = [*rng.sample(others, num_turns - 1), target]
        return Material(
            statements=_statements(rng, facts, held_out),
            turns=[questions.ask_single(rng, f, templates=_wordings(held_out)) for f in asked],
        )

    return build


def multi_value(*, also: bool) -> Builder:
    def build(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
        facts = documents.draw_facts(rng, pool, _NUM_FACTS)
        target = _with_digits(facts)
        second = target.values[0]
        while second == target.values[0]:
            second = documents.draw_value(rng, target.attribute)
        several = Fact(attribute=target.attribute, entity=target.entity, values=(target.values[0], second))
        facts = [f for f in facts if f is not target]
        return Material(
            statements=_statements(rng, [*facts, several], held_out, also=also),
            turns=[questions.ask_several(rng, several)],
        )

    return build


def multi_query(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
    facts = documents.draw_facts(rng, pool, _NUM_FACTS)
    first, second = rng.sample(facts, 2)
    return Material(
        statements=_statements(rng, facts, held_out), turns=[questions.ask_pair(rng, first, second)]
    )


def _numbers(pool: EntityPool) -> EntityPool:
    """Return the pool's entities with attributes whose values are four digits."""
    return EntityPool(adjectives=pool.adjectives, nouns=pool.nouns, attributes=DIGIT_ATTRIBUTES)


def distant_pair(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
    """Ask for two facts of four digits each in one answer of 9 tokens; six other facts are between them."""
    first, second, *others = documents.draw_facts(rng, _numbers(pool), _NUM_FACTS)
    statements = _statements(rng, [first, *others, second], held_out)
    asked = (first, second) if rng.random() < 0.5 else (second, first)
    return Material(
        statements=[[sentence for of_fact in statements for sentence in of_fact]],
        turns=[questions.ask_pair(rng, *asked)],
    )


def distant_values(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
    """Ask for both values of one fact, four digits each, in one answer of 9 tokens; others are between."""
    target, *others = documents.draw_facts(rng, _numbers(pool), _NUM_FACTS, several=1.0)
    others = [Fact(attribute=fact.attribute, entity=fact.entity, values=fact.values[:1]) for fact in others]
    (first, second), *rest = _statements(rng, [target, *others], held_out)
    between = [sentence for of_fact in rest for sentence in of_fact]
    return Material(statements=[[first, *between, second]], turns=[questions.ask_several(rng, target)])


def table(*, cells: int) -> Builder:
    """Write a table in one piece, with a row `- pin of red castle : 4 2 7 1 .` for each fact; one or two
    cells are asked for. Training has no such rows."""

    def build(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
        facts = documents.draw_facts(rng, _numbers(pool), _NUM_FACTS)
        rows = [f"- {fact.attribute} of {fact.entity} : {fact.values[0]} ." for fact in facts]
        asked = rng.sample(facts, cells)
        turn = (
            questions.ask_pair(rng, *asked)
            if cells == 2
            else questions.ask_single(rng, *asked, templates=_wordings(held_out))
        )
        return Material(statements=[[" ".join(rows)]], turns=[turn])

    return build


def listing(rng: random.Random, _: int, __: EntityPool, ___: bool) -> Material:
    """Write a program in one piece: mixed assignments of six chains of variables; trace one over two hops."""
    chains = documents.draw_chains(rng, 6)
    lines = documents.interleave(rng, *(chain.statements() for chain in chains))
    return Material(statements=[[" ".join(lines)]], turns=[questions.ask_variable(rng, chains[0], 2)])


def variables(hops: int) -> Builder:
    def build(rng: random.Random, _: int, __: EntityPool, ___: bool) -> Material:
        chains = documents.draw_chains(rng, 4)
        # The first chain is always of full length, so that the hops asked for exist.
        return Material(
            statements=[c.statements() for c in chains], turns=[questions.ask_variable(rng, chains[0], hops)]
        )

    return build


def frequent_word(rng: random.Random, _: int, __: EntityPool, ___: bool) -> Material:
    word, sentences = documents.draw_sayings(rng)
    return Material(statements=[sentences], turns=[questions.ask_saying(rng, word)])


def unknown(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
    facts = documents.draw_facts(rng, pool, _NUM_FACTS)
    absent = documents.absent_fact(rng, pool, facts)
    assert absent is not None  # eight facts cannot fill a pool
    return Material(
        statements=_statements(rng, facts, held_out),
        turns=[questions.ask_single(rng, absent, templates=_wordings(held_out))],
    )


def small_talk(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
    facts = documents.draw_facts(rng, pool, _NUM_FACTS)
    talk = rng.choice(SMALL_TALK)
    prompt = rng.choice(talk.held_out_prompts if held_out else talk.prompts)
    return Material(
        statements=_statements(rng, facts, held_out),
        turns=[
            questions.ask_single(rng, facts[0], templates=_wordings(held_out)),
            Question(text=prompt, answer=talk.reply),
        ],
    )


def common_words(rng: random.Random, _: int, __: EntityPool, ___: bool) -> Material:
    """Ask for two words that were said often, the more frequent one first."""
    words, sentences = documents.draw_common_sayings(rng)
    return Material(statements=[sentences], turns=[questions.ask_common(rng, words)])


def qa_facts(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
    """Write short paragraphs, each about one entity; the question is about one, the others distract."""
    entities: dict[str, None] = {}
    while len(entities) < _NUM_PROFILES:
        entities[pool.entity(rng)] = None
    profiles = []
    for entity in entities:
        attributes = [rng.choice(kind) for kind in (DIGIT_ATTRIBUTES, WORD_ATTRIBUTES, NAME_ATTRIBUTES)]
        rng.shuffle(attributes)
        facts = [Fact(attribute=a, entity=entity, values=(documents.draw_value(rng, a),)) for a in attributes]
        profiles.append(facts)
    asked = rng.choice(rng.choice(profiles))
    paragraphs = [
        " ".join(s for sentences in _statements(rng, facts, held_out) for s in sentences)
        for facts in profiles
    ]
    return Material(
        statements=[[paragraph] for paragraph in paragraphs],
        turns=[questions.ask_single(rng, asked, templates=_wordings(held_out))],
    )


def mixed_turns(rng: random.Random, _: int, pool: EntityPool, held_out: bool) -> Material:
    """Make four turns about one document: on a fact, a variable, a repeated word, and another fact."""
    facts = documents.draw_facts(rng, pool, _NUM_MIXED_FACTS)
    target = _with_digits(facts)
    other = rng.choice([f for f in facts if f is not target])
    chains = documents.draw_chains(rng, 2)
    word, sayings = documents.draw_sayings(rng)
    return Material(
        statements=[*_statements(rng, facts, held_out), *(c.statements() for c in chains), sayings],
        turns=[
            questions.ask_single(rng, other, templates=_wordings(held_out)),
            questions.ask_variable(rng, chains[0], 0),
            questions.ask_saying(rng, word),
            questions.ask_single(rng, target, templates=_wordings(held_out)),
        ],
    )


def eight(_: int) -> int:
    return _NUM_FACTS


def dense(num_tokens: int) -> int:
    return max(4, num_tokens // 64)
