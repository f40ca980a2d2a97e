"""Settings of an evaluation: which part of a conversation the selection sees.

aware     every turn's whole prompt is compressed, question included (RocketKV-MT selects again per turn)
once      the first turn's prompt is compressed; later turns are appended to it
agnostic  the document alone is compressed, before any question

Tokens after the selection are appended one by one and attend densely. Prefill always attends to the full K
and V. `scoring.py` scores the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvferry.shared.model.question import Question
from kvferry.tools.evaluation.compressor import Compressor
from kvferry.tools.evaluation.conversation import Conversation
from kvferry.tools.evaluation.experiment import Contender, Experiment, FirstToken, Setting
from kvferry.tools.oracle import CapturedPrompt, Continuation, OneProcessGenerator, step_together

Prompt = tuple[int, ...]
Answers = Sequence[tuple[int, ...]]
"""The tokens of one answer per contender."""


@dataclass(frozen=True)
class PendingAnswer:
    """A turn whose prompt is ready: `logits` `[V]` decide the answer's first token."""

    continuation: Continuation
    logits: Tensor


class TurnSetting(Protocol):
    """One conversation in a setting, turn by turn."""

    def next_turn(self, index: int, answers: Answers | None) -> list[PendingAnswer | None]:
        """Prepare turn `index` for every contender; None where a budget cannot be met.

        Args: answers: each contender's answers to the previous turn; None puts the right ones there.
        """
        ...


class Captures:
    """Prefilled prompts of one conversation: each distinct one is run once, continuing the turn before it.

    Args: document: a capture that the first prompt continues, if other conversations are about it, too.
    """

    def __init__(self, generator: OneProcessGenerator, document: CapturedPrompt | None = None) -> None:
        self._generator = generator
        self._document = document
        self._captured: dict[Prompt, CapturedPrompt] = {}

    def get(self, prompt: Prompt, earlier: Prompt | None, question: Question | None) -> CapturedPrompt:
        """Capture a prompt. Args: earlier: that of the turn before; question: where the prompt has it."""
        if prompt not in self._captured:
            before = self._captured[earlier] if earlier is not None else self._document
            captured = self._generator.capture(list(prompt), earlier=before, question=question)
            if earlier is None and before is not None:
                captured = captured.joined(before)
            self._captured[prompt] = captured
        return self._captured[prompt]

    def first_tokens(self, captured: CapturedPrompt, num_tokens: int) -> CapturedPrompt:
        """Return the capture of a prompt's first tokens."""
        return self._generator.first_tokens(captured, num_tokens)


class FreshSelection:
    """The setting "aware".

    Args: first_token: where an answer's first token comes from, see `EvalConfig.first_token`.
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

    def next_turn(self, index: int, answers: Answers | None) -> list[PendingAnswer | None]:
        before = self._prompts
        self._prompts = _next_prompts(self._conversation, index, before, answers, len(self._contenders))
        pending = []
        for i, (contender, prompt) in enumerate(zip(self._contenders, self._prompts, strict=True)):
            question = self._conversation.turns[index].question
            captured = self._captures.get(prompt, before[i] if before else None, question)
            pending.append(self._pending(captured, contender))
        return pending

    def _pending(self, captured: CapturedPrompt, contender: Contender) -> PendingAnswer | None:
        """Compress a whole prompt; with "refed", all but its last token, which is then fed as a new token."""
        if self._first_token == "prefill":
            continuation = self._compressor.compress(captured, contender, max_new_tokens=self._max_new_tokens)
            assert captured.logits is not None
            return None if continuation is None else PendingAnswer(continuation, captured.logits)
        continuation = self._compressor.compress(
            self._captures.first_tokens(captured, len(captured.token_ids) - 1),
            contender,
            max_new_tokens=self._max_new_tokens + 1,
        )
        return (
            None
            if continuation is None
            else PendingAnswer(continuation, continuation.step(captured.token_ids[-1]))
        )


class AppendedTurns:
    """Later turns appended to one selection: the settings "once" and "agnostic".

    Args:
        continuations: one per contender, with all tokens up to num_fed; None where a budget cannot be met.
        prompt: of the previous turn; None before the first.
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

    def next_turn(self, index: int, answers: Answers | None) -> list[PendingAnswer | None]:
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
        return [
            PendingAnswer(c, rows[i]) if c is not None else None for i, c in enumerate(self._continuations)
        ]


class SelectedOnce:
    """The setting "once": the first turn as "aware", the others appended to what it selected."""

    def __init__(self, first: FreshSelection, conversation: Conversation) -> None:
        self._first = first
        self._conversation = conversation
        self._later: AppendedTurns | None = None

    def next_turn(self, index: int, answers: Answers | None) -> list[PendingAnswer | None]:
        if self._later is not None:
            return self._later.next_turn(index, answers)
        pending = self._first.next_turn(index, answers)
        prompt = self._conversation.turns[0].prompt_token_ids
        # An answer's tokens stay on its fork; these continue from the end of the prompt.
        continuations = [a.continuation if a is not None else None for a in pending]
        self._later = AppendedTurns(self._conversation, continuations, len(prompt), prompt)
        return pending


def make_setting(
    setting: Setting,
    compressor: Compressor,
    captures: Captures,
    conversation: Conversation,
    contenders: Sequence[Contender],
    experiment: Experiment,
) -> TurnSetting:
    """Make the `TurnSetting` of a setting."""
    longest = conversation.longest_answer(experiment.max_new_tokens)
    first = conversation.turns[0].prompt_token_ids
    last = conversation.turns[-1].prompt_token_ids
    num_fed = conversation.num_document_tokens if setting == "agnostic" else len(first)
    num_later = len(last) - num_fed if setting != "aware" else 0
    if experiment.answers == "own":
        num_later += (len(conversation.turns) - 1) * longest
    max_new_tokens = longest + num_later
    if setting == "agnostic":
        whole = captures.get(first, None, conversation.turns[0].question)
        document = captures.first_tokens(whole, num_fed)
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
