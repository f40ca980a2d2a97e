"""The contents of documents: filler sentences, facts, variable assignments, repeated words.

`tasks.py` asks questions about them for evaluation, `conversations.py` for training. Lengths are counted in
words; one word is one token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.tools.recall.vocabulary import (
    ADJECTIVES,
    ADVERBS,
    DIGIT_ATTRIBUTES,
    DIGITS,
    HELD_OUT_ADJECTIVES,
    HELD_OUT_NOUNS,
    INTRANSITIVE_VERBS,
    NAME_ATTRIBUTES,
    NAMES,
    NOUNS,
    PERSONS,
    PREPOSITIONS,
    THINGS,
    TIMES,
    TRANSITIVE_VERBS,
    VARIABLES,
    WORD_ATTRIBUTES,
    WORD_VALUES,
)

FACT_TEMPLATES = (
    "the {a} of the {e} is {v} .",
    "remember that the {a} of the {e} is {v} .",
    "note : the {a} of the {e} is {v} .",
)
TRAINING_FACT_TEMPLATES = (
    *FACT_TEMPLATES,
    "and the {a} of the {e} is {v} .",
    "please note that the {a} of the {e} is {v} .",
    "here is one more : the {a} of the {e} is {v} .",
    "then the {a} of the {e} was {v} .",
)
"""Those of the tasks and more, so that a wording that training never saw reads as one of many."""

HELD_OUT_FACT_TEMPLATES = (
    "we all know that the {a} of the {e} is {v} .",
    "the {a} of the {e} is now {v} .",
    "please remember this : the {a} of the {e} is {v} .",
)
ALSO_TEMPLATE = "the {a} of the {e} is also {v} ."
"""A further value of a fact that has one already."""

_ATTRIBUTES = DIGIT_ATTRIBUTES * 2 + WORD_ATTRIBUTES + NAME_ATTRIBUTES


@dataclass(frozen=True, kw_only=True)
class Fact:
    """An attribute of an entity, with its values in the order in which the document gives them."""

    attribute: str
    entity: str
    values: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.attribute, self.entity

    def fill(self, template: str, value: str = "") -> str:
        return template.format(a=self.attribute, e=self.entity, v=value)

    def statements(
        self, rng: random.Random, *, templates: Sequence[str] = FACT_TEMPLATES, also: bool = True
    ) -> list[str]:
        """Write one sentence per value. With `also` the sentence of a second value says so."""
        return [
            self.fill(ALSO_TEMPLATE if also and i else rng.choice(templates), value)
            for i, value in enumerate(self.values)
        ]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Variables that are set to one another: the first has the value, each later one names the one before."""

    variables: tuple[str, ...]
    value: str

    def statements(self) -> list[str]:
        sources = (self.value, *self.variables)
        return [f"set {v} = {sources[i]} ." for i, v in enumerate(self.variables)]

    def trace(self, hops: int) -> str:
        """Write the variable `hops` assignments away from the value, step by step down to the value."""
        return " = ".join((*reversed(self.variables[:hops]), self.value))


@dataclass(frozen=True, kw_only=True)
class EntityPool:
    """Where facts' entities come from."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    attributes: tuple[str, ...] = _ATTRIBUTES

    def __post_init__(self) -> None:
        assert all((self.adjectives, self.nouns, self.attributes))

    @property
    def num_keys(self) -> int:
        return len(self.adjectives) * len(self.nouns) * len(set(self.attributes))

    def entity(self, rng: random.Random) -> str:
        return f"{rng.choice(self.adjectives)} {rng.choice(self.nouns)}"


TRAINING_POOL = EntityPool(
    adjectives=tuple(a for a in ADJECTIVES if a not in HELD_OUT_ADJECTIVES),
    nouns=tuple(n for n in NOUNS if n not in HELD_OUT_NOUNS),
)
WIDE_POOL = EntityPool(
    adjectives=(*TRAINING_POOL.adjectives, *ADVERBS, *TRANSITIVE_VERBS, *WORD_VALUES),
    nouns=(*TRAINING_POOL.nouns, *PERSONS, *THINGS, *TIMES, *WORD_VALUES),
)
"""Training alone draws from it: what is matched must not depend on which words usually name entities."""

HELD_OUT_POOL = EntityPool(
    adjectives=tuple(sorted(HELD_OUT_ADJECTIVES)),
    nouns=tuple(sorted(HELD_OUT_NOUNS)),
)


def hard_grid(rng: random.Random, pool: EntityPool, num_facts: int) -> EntityPool:
    """Make a small adjective x noun x attribute grid, whose facts are near-duplicates of one another."""
    side = max(2, int(num_facts**0.5) + 1)
    kinds = sorted(set(pool.attributes))
    return EntityPool(
        adjectives=tuple(rng.sample(pool.adjectives, min(side, len(pool.adjectives)))),
        nouns=tuple(rng.sample(pool.nouns, min(side, len(pool.nouns)))),
        attributes=tuple(rng.sample(kinds, min(len(kinds), rng.choice((1, 2, 4))))),
    )


def draw_value(rng: random.Random, attribute: str, *, digits: Sequence[str] = DIGITS) -> str:
    """Draw four of `digits`, a word or a name, depending on the attribute."""
    if attribute in DIGIT_ATTRIBUTES:
        return " ".join(rng.choice(digits) for _ in range(4))
    return rng.choice(WORD_VALUES if attribute in WORD_ATTRIBUTES else NAMES)


def draw_facts(
    rng: random.Random,
    pool: EntityPool,
    num_facts: int,
    *,
    several: float = 0.0,
    max_values: int = 2,
    digits: Sequence[str] = DIGITS,
) -> list[Fact]:
    """Draw facts with distinct keys; a share `several` of them has 2 to `max_values` distinct values.

    Args: digits: that values are made of, two or more.

    Returns fewer than `num_facts` if the pool has too few free keys.
    """
    facts: dict[tuple[str, str], Fact] = {}
    for _ in range(10 * num_facts):
        if len(facts) == num_facts:
            break
        key = rng.choice(pool.attributes), pool.entity(rng)
        if key in facts:
            continue
        wanted = rng.randint(2, max_values) if rng.random() < several else 1
        values: dict[str, None] = {}
        while len(values) < wanted:
            values[draw_value(rng, key[0], digits=digits)] = None
        facts[key] = Fact(attribute=key[0], entity=key[1], values=tuple(values))
    return list(facts.values())


def absent_fact(rng: random.Random, pool: EntityPool, facts: Sequence[Fact]) -> Fact | None:
    """Draw a key that no fact has; half of the time it differs from one only in its attribute or in one word.

    None if the pool is so full that ten tries find no free key.
    """
    taken = {f.key for f in facts}
    for _ in range(10):
        attribute, entity = rng.choice(pool.attributes), pool.entity(rng)
        if facts and rng.random() < 0.5:
            near = rng.choice(facts)
            adjective, noun = near.entity.split()
            changed = rng.randrange(3)
            entity = (
                near.entity,
                f"{adjective} {rng.choice(pool.nouns)}",
                f"{rng.choice(pool.adjectives)} {noun}",
            )[changed]
            attribute = attribute if changed == 0 else near.attribute
        if (attribute, entity) not in taken:
            return Fact(attribute=attribute, entity=entity, values=())
    return None


def draw_chains(rng: random.Random, num_chains: int, max_hops: int = 2) -> list[Chain]:
    """Draw chains over disjoint variables of up to `max_hops` hops, the first with exactly that many."""
    lengths = [max_hops + 1] + [rng.randint(1, max_hops + 1) for _ in range(num_chains - 1)]
    names = rng.sample(VARIABLES, min(sum(lengths), len(VARIABLES)))
    chains = []
    for length in lengths:
        if len(names) < length:
            break
        variables, names = tuple(names[:length]), names[length:]
        chains.append(Chain(variables=variables, value=f"{rng.choice(DIGITS)} {rng.choice(DIGITS)}"))
    return chains


def draw_sayings(rng: random.Random, num_words: int = 5) -> tuple[str, list[str]]:
    """Draw sentences that say words, one at least twice as often as any other: (that word, sentences)."""
    words = rng.sample(WORD_VALUES, num_words)
    counts = [rng.randint(4, 6)] + [rng.randint(1, 2) for _ in words[1:]]
    sentences = [
        f"{rng.choice(NAMES)} said {w} ." for w, n in zip(words, counts, strict=True) for _ in range(n)
    ]
    rng.shuffle(sentences)
    return words[0], sentences


def draw_common_sayings(rng: random.Random, num_words: int = 6) -> tuple[tuple[str, str], list[str]]:
    """Draw sentences that say words, two of them often: those two, the more frequent first, and sentences."""
    words = rng.sample(WORD_VALUES, num_words)
    counts = [rng.randint(6, 7), rng.randint(4, 5)] + [rng.randint(1, 2) for _ in words[2:]]
    sentences = [
        f"{rng.choice(NAMES)} said {w} ." for w, n in zip(words, counts, strict=True) for _ in range(n)
    ]
    rng.shuffle(sentences)
    return (words[0], words[1]), sentences


def filler(rng: random.Random) -> str:
    """Write one sentence that answers nothing."""
    c, kind = rng.choice, rng.random()
    if kind < 0.30:
        return f"the {c(ADJECTIVES)} {c(PERSONS)} {c(TRANSITIVE_VERBS)} the {c(ADJECTIVES)} {c(NOUNS)} ."
    if kind < 0.50:
        return (
            f"every {c(TIMES)} the {c(PERSONS)} {c(INTRANSITIVE_VERBS)} {c(PREPOSITIONS)} the {c(NOUNS)} "
            f"and {c(INTRANSITIVE_VERBS)} {c(ADVERBS)} ."
        )
    if kind < 0.65:
        return (
            f"{c(NAMES)} {c(TRANSITIVE_VERBS)} the {c(NOUNS)} because the {c(PERSONS)} "
            f"{c(INTRANSITIVE_VERBS)} {c(ADVERBS)} ."
        )
    if kind < 0.80:
        return f"there was some {c(THINGS)} {c(PREPOSITIONS)} the {c(ADJECTIVES)} {c(NOUNS)} ."
    if kind < 0.90:
        return f"the {c(NOUNS)} is {c(ADJECTIVES)} and the {c(THINGS)} are {c(ADJECTIVES)} ."
    return (
        f"in the {c(TIMES)} {c(NAMES)} and {c(NAMES)} {c(INTRANSITIVE_VERBS)} {c(PREPOSITIONS)} "
        f"the {c(ADJECTIVES)} {c(NOUNS)} ."
    )


def fill(rng: random.Random, num_words: int) -> list[str]:
    """Write filler sentences of `num_words` words or up to 12 fewer."""
    sentences: list[str] = []
    while num_words > 12:
        sentences.append(filler(rng))
        num_words -= count_words(sentences[-1])
    return sentences


def count_words(text: str) -> int:
    return text.count(" ") + 1 if text else 0


def interleave(rng: random.Random, *ordered: Sequence[str]) -> list[str]:
    """Merge lists at random; each keeps its own order."""
    slots = [i for i, sentences in enumerate(ordered) for _ in sentences]
    rng.shuffle(slots)
    iterators = [iter(sentences) for sentences in ordered]
    return [next(iterators[i]) for i in slots]
