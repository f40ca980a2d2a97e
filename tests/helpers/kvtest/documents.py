"""Prompts in the demo model's own words: a document of filler and facts, and questions about the facts.

A small generator for the end-to-end tests only; seeded, so that every run sends the same prompts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ADJECTIVES = (
    *("red", "blue", "green", "yellow", "black", "white", "silver", "golden"),
    *("purple", "orange", "old", "young", "small", "large", "quiet", "loud"),
)
NOUNS = (
    *("lighthouse", "castle", "bridge", "tower", "garden", "library", "museum"),
    *("station", "harbor", "market", "temple", "school", "mill", "barn"),
)
PERSONS = ("baker", "farmer", "teacher", "sailor", "doctor", "painter", "singer", "writer", "soldier")
VERBS = ("watched", "followed", "painted", "repaired", "cleaned", "visited", "admired", "found", "moved")
ATTRIBUTES = ("access code", "pin", "serial number", "magic number")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and the questions that it answers: (question, answer)."""

    text: str
    questions: tuple[tuple[str, str], ...]

    def turns(self, number: int) -> list[str]:
        """Return what is said in so many turns: first the text with a question, then a question each."""
        first, *others = (question for question, _ in self.questions[:number])
        return [f"{self.text} {first}", *others]


def make_document(seed: int, *, num_words: int, num_facts: int = 8) -> Document:
    """Filler sentences with `num_facts` four-digit facts among them: `num_words` words or slightly more."""
    rng = random.Random(seed)
    entities = rng.sample([f"{a} {n}" for a in ADJECTIVES for n in NOUNS], num_facts)
    facts, questions = [], []
    for entity in entities:
        attribute = rng.choice(ATTRIBUTES)
        digits = " ".join(rng.choice("0123456789") for _ in range(4))
        facts.append(f"the {attribute} of the {entity} is {digits} .")
        questions.append((f"what is the {attribute} of the {entity} ?", digits))
    sentences = list(facts)
    while sum(len(s.split()) for s in sentences) < num_words:
        person, verb = rng.choice(PERSONS), rng.choice(VERBS)
        sentences.append(
            f"the {rng.choice(ADJECTIVES)} {person} {verb} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} ."
        )
    rng.shuffle(sentences)
    return Document(text=" ".join(sentences), questions=tuple(questions))
