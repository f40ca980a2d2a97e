"""Questions about the contents of a document, each with its one right answer.

Used by training conversations and evaluation tasks, so that both use the same language. Held-out wordings are
only used by evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall.documents import Chain, Fact

UNKNOWN_ANSWER = "i do not know ."

SINGLE_TEMPLATES = (
    "what is the {a} of the {e} ?",
    "tell me the {a} of the {e} .",
    "please give me the {a} of the {e} .",
    "what was the {a} of the {e} ?",
    "can you tell me the {a} of the {e} ?",
    "do you know the {a} of the {e} ?",
)
TRAINING_SINGLE_TEMPLATES = (
    *SINGLE_TEMPLATES,
    "question : what is the {a} of the {e} ?",
    "now tell me the {a} of the {e} .",
    "what is the {a} of the {e} now ?",
    "and the {a} of the {e} ?",
    "do you remember the {a} of the {e} ?",
    "say the {a} of the {e} .",
    "could you read the {a} of the {e} ?",
)
"""Those of the tasks and more, as with facts."""

HELD_OUT_SINGLE_TEMPLATES = (
    "i need to know the {a} of the {e} .",
    "please answer : what is the {a} of the {e} ?",
    "give me the {a} of the {e} .",
)
_SEVERAL_TEMPLATES = (
    "what are the {n} values of the {a} of the {e} ?",
    "tell me the {n} values of the {a} of the {e} .",
)
_PAIR_TEMPLATES = (
    "what are the {a} of the {e} and the {b} of the {f} ?",
    "tell me the {a} of the {e} and the {b} of the {f} .",
)
_VARIABLE_TEMPLATES = ("what is the value of {v} ?", "tell me the value of {v} .")
_SAYING_TEMPLATES = ("what word was said most often ?", "which word was said most ?")
_COMMON_TEMPLATES = ("which two were said most often ?", "tell me the two that were said most often .")

_NUMBER_WORDS = {2: "two", 3: "three"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and its complete answer."""

    text: str
    answer: str


def ask_single(rng: random.Random, fact: Fact, *, templates: Sequence[str] = SINGLE_TEMPLATES) -> Question:
    """Ask for a fact's only value; the answer may be that the document does not give it."""
    template = rng.choice(templates)
    return Question(text=fact.fill(template), answer=fact.values[0] if fact.values else UNKNOWN_ANSWER)


def ask_several(rng: random.Random, fact: Fact) -> Question:
    """Ask for all values of a fact in the document's order; the question states how many there are."""
    number = _NUMBER_WORDS.get(len(fact.values))
    if number is None:
        raise ConfigurationError(
            f"a fact with {len(fact.values)} values cannot be asked for several; 2 or 3 can"
        )
    template = rng.choice(_SEVERAL_TEMPLATES).replace("{n}", number)
    return Question(text=fact.fill(template), answer=" , ".join(fact.values))


def ask_pair(rng: random.Random, first: Fact, second: Fact) -> Question:
    """Ask for the bare values of two facts, in the order in which they are asked for."""
    text = rng.choice(_PAIR_TEMPLATES).format(
        a=first.attribute, e=first.entity, b=second.attribute, f=second.entity
    )
    return Question(text=text, answer=f"{first.values[0]} , {second.values[0]}")


def ask_variable(rng: random.Random, chain: Chain, hops: int) -> Question:
    """Ask for a variable's value, answered step by step: for z, two hops away from it, `y = x = 4 2`."""
    text = rng.choice(_VARIABLE_TEMPLATES).format(v=chain.variables[hops])
    return Question(text=text, answer=chain.trace(hops))


def ask_saying(rng: random.Random, word: str) -> Question:
    """Ask for the word that was said most often."""
    return Question(text=rng.choice(_SAYING_TEMPLATES), answer=word)


def ask_common(rng: random.Random, words: tuple[str, str]) -> Question:
    """Ask for the two words that were said most often, the more frequent one first."""
    return Question(text=rng.choice(_COMMON_TEMPLATES), answer=" , ".join(words))
