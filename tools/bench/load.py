"""The load of one run: which conversations begin when, with which requests. It depends on a seed only.

closed    --concurrency conversations at a time; the next begins when one ends
poisson   conversations begin at random moments, --rate in a second on average
bursts    --burst conversations begin together; bursts come at random moments
even      conversations begin every 1 / --rate seconds
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.bench.config import Arrivals, BenchConfig
from kvferry.tools.bench.prompts import PromptMaker

_KIND = re.compile(r"(\d+):(\d+)(?:@(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Requests of one size, in tokens."""

    prompt_tokens: int
    answer_tokens: int
    weight: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens}:{self.answer_tokens}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request.

    Attributes: cancel_after: the client closes the stream after so many tokens; None: it reads all.
    """

    kind: Kind
    text: str
    cancel_after: int | None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Requests that are sent one after another.

    Attributes:
        document: index of the document that it begins with.
        start_s: when it begins, from the run's beginning; 0 in a closed loop.
    """

    questions: tuple[Question, ...]
    document: int | None
    start_s: float


@dataclass(frozen=True, kw_only=True)
class Load:
    conversations: tuple[Conversation, ...]
    documents: tuple[str, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.questions) for conversation in self.conversations)


def parse_mix(text: str) -> tuple[Kind, ...]:
    """Parse the kinds of `PROMPT:ANSWER[@WEIGHT],...`.

    Raises: ConfigurationError: the text has another form.
    """
    kinds = []
    for part in text.split(","):
        found = _KIND.fullmatch(part.strip())
        if found is None or int(found[1]) < 1 or int(found[2]) < 1 or (found[3] and not float(found[3])):
            raise ConfigurationError(
                f"--mix is {text!r}; it must be PROMPT:ANSWER[@WEIGHT], comma-separated, each above 0"
            )
        kinds.append(
            Kind(prompt_tokens=int(found[1]), answer_tokens=int(found[2]), weight=float(found[3] or 1))
        )
    return tuple(kinds)


def make_load(config: BenchConfig, prompts: PromptMaker, run: int) -> Load:
    """Make the load of a run. Other runs have other texts, so that no server has their KV yet."""
    chance = random.Random(f"{config.seed} {run}")
    kinds = shares(parse_mix(config.mix), config.conversations, chance)
    num_requests = config.conversations * config.turns
    cancelled = set(chance.sample(range(num_requests), round(config.cancel * num_requests)))
    starts = start_times(config.arrivals, config, chance)
    number = itertools.count()
    conversations = []
    for index, kind in enumerate(kinds):
        questions = tuple(
            Question(
                kind=kind,
                text=prompts.text(kind.prompt_tokens, chance),
                cancel_after=chance.randint(1, kind.answer_tokens) if next(number) in cancelled else None,
            )
            for _ in range(config.turns)
        )
        document = index % config.documents if config.documents else None
        conversations.append(Conversation(questions=questions, document=document, start_s=starts[index]))
    documents = tuple(prompts.text(config.document_tokens, chance) for _ in range(config.documents))
    return Load(conversations=tuple(conversations), documents=documents)


def shares(kinds: tuple[Kind, ...], number: int, chance: random.Random) -> list[Kind]:
    """Draw `number` kinds in random order, each as often as its weight says, to the nearest integer."""
    total = sum(kind.weight for kind in kinds)
    exact = [kind.weight / total * number for kind in kinds]
    counts = [int(value) for value in exact]
    by_rest = sorted(range(len(kinds)), key=lambda i: counts[i] - exact[i])
    for i in by_rest[: number - sum(counts)]:
        counts[i] += 1
    drawn = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    chance.shuffle(drawn)
    return drawn


def start_times(arrivals: Arrivals, config: BenchConfig, chance: random.Random) -> list[float]:
    """Return for each conversation the seconds from the run's beginning."""
    number = config.conversations
    if arrivals == "closed":
        return [0.0] * number
    if arrivals == "even":
        return [index / config.rate for index in range(number)]
    together = config.burst if arrivals == "bursts" else 1
    gaps = [chance.expovariate(config.rate / together) for _ in range(-(-number // together) - 1)]
    moments = [0.0, *itertools.accumulate(gaps)]
    return [moments[index // together] for index in range(number)]
