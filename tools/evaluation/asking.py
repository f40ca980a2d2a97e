"""Puts each turn's question to compressed prompts, as a setting says what their selection sees.

"aware": every turn's prompt is compressed whole, question included (RocketKV-MT selects afresh per turn).
"once": the first turn's prompt is; "agnostic": the document alone is. What comes after the selection is then
appended and attended densely, token by token. Prefill always attends to the full K and V. Scores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvferry.shared.oracle import CapturedPrompt, Continuation, OneProcessGenerator, step_together
from kvferry.tools.evaluation.compressor import Compressor
from kvferry.tools.evaluation.conversation import Conversation
from kvferry.tools.evaluation.experiment import Contender, Experiment, FirstToken, Setting

Prompt = tuple[int, ...]
Answers = Sequence[tuple[int, ...]]
"""One answer's tokens a contender."""


@dataclass(frozen=True)
class Asked:
    """A turn that is about to be answered: what comes next is decided by `logits` `[V]`."""

    continuation: Continuation
    logits: Tensor


class Asker(Protocol):
    """One conversation, asked turn by turn."""

    def ask(self, index: int, answers: Answers | None) -> list[Asked | None]:
        """Turn `index` for every contender; None where its budget cannot be met.

        Args: answers: to the turn before, where each contender's own are kept; None has the right ones.
        """
        ...


class Captures:
    """Prefilled prompts of one conversation: each distinct one is run once, from the turn before on."""

    def __init__(self, generator: OneProcessGenerator) -> None:
        self._generator = generator
        self._captured: dict[Prompt, CapturedPrompt] = {}

    def get(self, prompt: Prompt, earlier: Prompt | None) -> CapturedPrompt:
        if prompt not in self._captured:
            before = self._captured[earlier] if earlier is not None else None
            self._captured[prompt] = self._generator.capture(list(prompt), earlier=before)
        return self._captured[prompt]


class FreshSelection:
    """The setting "aware".

    Args: first_token: whence an answer's first token comes, see `EvalConfig.first_token`.
    """

    def __init__(
        self,
        compressor: Compressor,
        captures: Captures,
        conversation: Conversation,
        contenders: Sequence[Contender],
        *,
        first_token: FirstToken,
        max_new_tokens: int,
    ) -> None:
        self._compressor = compressor
        self._captures = captures
        self._conversation = conversation
        self._contenders = contenders
        self._first_token = first_token
        self._max_new_tokens = max_new_tokens
        self._prompts: list[Prompt] = []

    def ask(self, index: int, answers: Answers | None) -> list[Asked | None]:
        before = self._prompts
        self._prompts = _next_prompts(self._conversation, index, before, answers, len(self._contenders))
        asked = []
        for i, (contender, prompt) in enumerate(zip(self._contenders, self._prompts, strict=True)):
            captured = self._captures.get(prompt, before[i] if before else None)
            asked.append(self._asked(captured, contender))
        return asked

    def _asked(self, captured: CapturedPrompt, contender: Contender) -> Asked | None:
        """A prompt compressed whole; or, "refed", all but its last token, which is then fed as a new one."""
        if self._first_token == "prefill":
            continuation = self._compressor.compress(captured, contender, max_new_tokens=self._max_new_tokens)
            assert captured.logits is not None
            return None if continuation is None else Asked(continuation, captured.logits)
        continuation = self._compressor.compress(
            captured.prefix(len(captured.token_ids) - 1), contender, max_new_tokens=self._max_new_tokens + 1
        )
        return (
            None if continuation is None else Asked(continuation, continuation.step(captured.token_ids[-1]))
        )


class AppendedTurns:
    """Later turns appended to one selection: the settings "once" and "agnostic".

    Args:
        continuations: one a contender, with all tokens up to num_fed; None where its budget cannot be met.
        prompt: of the turn before the next one to be asked; None if that is the first.
    """

    def __init__(
        self,
        conversation: Conversation,
        continuations: Sequence[Continuation | None],
        num_fed: int,
        prompt: Prompt | None,
    ) -> None:
        self._conversation = conversation
        self._continuations = continuations
        self._num_fed = [num_fed] * len(continuations)
        self._prompts = [prompt] * len(continuations) if prompt is not None else []

    def ask(self, index: int, answers: Answers | None) -> list[Asked | None]:
        number = len(self._continuations)
        self._prompts = _next_prompts(self._conversation, index, self._prompts, answers, number)
        left = [list(p[fed:]) for p, fed in zip(self._prompts, self._num_fed, strict=True)]
        self._num_fed = [len(prompt) for prompt in self._prompts]
        rows: dict[int, Tensor] = {}
        while True:
            going = [i for i, c in enumerate(self._continuations) if c is not None and left[i]]
            if not going:
                break
            met = [c for i in going if (c := self._continuations[i]) is not None]
            logits = step_together(met, [left[i].pop(0) for i in going], dense=True)
            rows.update(zip(going, logits, strict=True))
        return [Asked(c, rows[i]) if c is not None else None for i, c in enumerate(self._continuations)]


class SelectedOnce:
    """The setting "once": the first turn as "aware", the others appended to what it selected."""

    def __init__(self, first: FreshSelection, conversation: Conversation) -> None:
        self._first = first
        self._conversation = conversation
        self._later: AppendedTurns | None = None

    def ask(self, index: int, answers: Answers | None) -> list[Asked | None]:
        if self._later is not None:
            return self._later.ask(index, answers)
        asked = self._first.ask(index, answers)
        prompt = self._conversation.turns[0].prompt_token_ids
        # What a turn's answer adds stays on its fork: these go on from the end of the prompt.
        continuations = [a.continuation if a is not None else None for a in asked]
        self._later = AppendedTurns(self._conversation, continuations, len(prompt), prompt)
        return asked


def make_asker(
    setting: Setting,
    compressor: Compressor,
    captures: Captures,
    conversation: Conversation,
    contenders: Sequence[Contender],
    experiment: Experiment,
) -> Asker:
    """The asker of a setting."""
    first = conversation.turns[0].prompt_token_ids
    last = conversation.turns[-1].prompt_token_ids
    num_fed = conversation.num_document_tokens if setting == "agnostic" else len(first)
    num_later = len(last) - num_fed if setting != "aware" else 0
    if experiment.answers == "own":
        num_later += (len(conversation.turns) - 1) * experiment.max_new_tokens
    max_new_tokens = experiment.max_new_tokens + num_later
    if setting == "agnostic":
        document = captures.get(first, None).prefix(num_fed)
        continuations = [
            compressor.compress(document, contender, max_new_tokens=max_new_tokens)
            for contender in contenders
        ]
        return AppendedTurns(conversation, continuations, num_fed, None)
    fresh = FreshSelection(
        compressor,
        captures,
        conversation,
        contenders,
        first_token=experiment.first_token,
        max_new_tokens=max_new_tokens,
    )
    return fresh if setting == "aware" else SelectedOnce(fresh, conversation)


def _next_prompts(
    conversation: Conversation, index: int, before: Sequence[Prompt], answers: Answers | None, number: int
) -> list[Prompt]:
    if index == 0 or answers is None:
        return [conversation.turns[index].prompt_token_ids] * number
    return [
        conversation.next_prompt(index, prompt, answer)
        for prompt, answer in zip(before, answers, strict=True)
    ]
