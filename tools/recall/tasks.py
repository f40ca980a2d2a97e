"""Evaluation tasks: a conversation of a wanted length and the one right answer to its last question.

`kvferry eval` calls `TASKS[name].example(num_tokens=..., seed=...)` for chat messages (or their token ids)
and the expected answer. Examples are drawn from a namespace of seeds that training never uses; with
`held_out` they also use entities and wordings that training never asks about.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypedDict

from kvferry.shared.errors import ConfigurationError
from kvferry.tools.recall import documents, materials
from kvferry.tools.recall.documents import HELD_OUT_POOL, TRAINING_POOL
from kvferry.tools.recall.materials import Builder
from kvferry.tools.recall.vocabulary import (
    ASSISTANT_ID,
    BOS_ID,
    END_ID,
    USER_ID,
    encode,
)

MIN_TOKENS = 256
"""Shortest prompt that every task fits into."""


class Message(TypedDict):
    """One chat message, as the OpenAI API and chat templates take it."""

    role: Literal["user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """A conversation that ends with a user's question, and its answer.

    Attributes:
        document: the text of the first message before its question.
        others: further right answers.
    """

    messages: tuple[Message, ...]
    answer: str
    document: str
    others: tuple[str, ...] = ()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The messages in the chat template, generation prompt included."""
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
class Task:
    """One kind of question; `description` is for tables."""

    name: str
    description: str
    build: Builder

    def example(
        self, *, num_tokens: int, seed: int, held_out: bool = False, depth: float | None = None
    ) -> Example:
        """Return the seed's example, with a prompt of num_tokens tokens or at most 12 fewer.

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


_ALL = (
    Task(name="single_needle", description="single needle", build=materials.single_needle),
    Task(name="multi_key_8", description="one of 8 facts", build=materials.multi_key(materials.eight)),
    Task(name="multi_key_dense", description="one of T/64 facts", build=materials.multi_key(materials.dense)),
    Task(
        name="multi_key_hard",
        description="hard grid, T/64 facts",
        build=materials.multi_key(materials.dense, hard=True),
    ),
    Task(
        name="third_turn",
        description="third turn, 8 facts",
        build=materials.multi_key(materials.eight, num_turns=3),
    ),
    Task(
        name="fifth_turn",
        description="fifth turn, 8 facts",
        build=materials.multi_key(materials.eight, num_turns=5),
    ),
    Task(name="mixed_turns", description="fourth turn, kinds mixed", build=materials.mixed_turns),
    Task(name="qa_facts", description="question about paragraphs", build=materials.qa_facts),
    Task(
        name="multi_value",
        description='two values, second says "also"',
        build=materials.multi_value(also=True),
    ),
    Task(
        name="multi_value_plain",
        description="two values, worded alike",
        build=materials.multi_value(also=False),
    ),
    Task(name="multi_query", description="two facts in one question", build=materials.multi_query),
    Task(
        name="distant_pair",
        description="two numbers, far apart",
        build=materials.distant_pair,
    ),
    Task(
        name="distant_values",
        description="two values of one number, far apart",
        build=materials.distant_values,
    ),
    Task(name="table", description="cell of a table", build=materials.table(cells=1)),
    Task(name="table_pair", description="two cells of a table", build=materials.table(cells=2)),
    Task(name="code_listing", description="variables of a listing, two hops", build=materials.listing),
    Task(name="variables_1_hop", description="variables, one hop", build=materials.variables(1)),
    Task(name="variables_2_hops", description="variables, two hops", build=materials.variables(2)),
    Task(name="frequent_word", description="most frequent word", build=materials.frequent_word),
    Task(name="common_words", description="two most frequent words", build=materials.common_words),
    Task(name="unknown", description="document does not say", build=materials.unknown),
    Task(name="small_talk", description="small talk after a document", build=materials.small_talk),
)
TASKS = {task.name: task for task in _ALL}
