"""An example as a model's tokens: the prompt of every turn, its right answer, and where the document ends.

Earlier turns contain the right answers, as in SCBench, so that every method gets the same prompts; or, with
`Conversation.next_prompt`, the answers given. Works with any chat model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.shared.errors import UnsupportedModel
from kvferry.shared.model.question import Question, find_question
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.answer_scores import Reference
from kvferry.tools.evaluation.public_formats import DatasetExample
from kvferry.tools.recall.tasks import Example


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question.

    Attributes:
        prompt_token_ids: the conversation up to the assistant's answer.
        answer_token_ids: the right answer and an end token.
        answers: its text, then those of other right answers.
        reference: of a public format, what the answer is scored against.
        max_new_tokens: the longest answer, if the example has one.
        question: as a router finds it in the prompt, whatever the answers before it.
    """

    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]
    answers: tuple[str, ...]
    reference: Reference | None = None
    max_new_tokens: int | None = None
    question: Question | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """All turns of an example; each prompt starts with the one before it.

    Attributes:
        num_document_tokens: tokens at the start of the first prompt that are the same for every question.
        num_before_last_question: tokens of the last prompt before its last question.
    """

    turns: tuple[Turn, ...]
    num_document_tokens: int
    num_before_last_question: int

    def longest_answer(self, max_new_tokens: int) -> int:
        """Return the most tokens that any answer may have. Args: max_new_tokens: of turns that do not say."""
        return max(turn.max_new_tokens or max_new_tokens for turn in self.turns)

    def next_prompt(self, index: int, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, ...]:
        """Return turn `index`'s prompt after another answer to the turn before it.

        Args:
            prompt: of the turn before.
            answer: its tokens; a final end token may be missing, for example if the answer was cut off.

        Raises: UnsupportedModel: the chat template changes the answer when a question follows.
        """
        before = self.turns[index - 1]
        start = len(before.prompt_token_ids)
        right = before.answer_token_ids
        rest = self.turns[index].prompt_token_ids[start:]
        if rest[: len(right)] != right:
            raise UnsupportedModel(
                "the chat template changes answers when a question follows; take --answers right"
            )
        end = right[-1]
        body = answer[:-1] if answer and answer[-1] == end else answer
        return (*prompt, *body, end, *rest[len(right) :])


def tokenize(example: Example, tokenizer: ChatTokenizer) -> Conversation:
    """Render an example with a model's chat template.

    Raises:
        UnsupportedModel: the template changes earlier turns when later ones come.
    """
    answers = [m["content"] for m in example.messages if m["role"] == "assistant"] + [example.answer]
    references = example.references if isinstance(example, DatasetExample) else (None,) * len(answers)
    prefix = _encode(tokenizer, example.answer_prefix) if isinstance(example, DatasetExample) else []
    longest = example.max_new_tokens or None if isinstance(example, DatasetExample) else None
    turns: list[Turn] = []
    for i, answer in enumerate(answers):
        messages = [{"role": m["role"], "content": m["content"]} for m in example.messages[: 2 * i + 1]]
        prompt = tuple(tokenizer.render(messages))
        if turns and prompt[: len(turns[-1].prompt_token_ids)] != turns[-1].prompt_token_ids:
            raise UnsupportedModel(
                "the chat template rewrites earlier turns; only single questions can be asked"
            )
        ids, end = _encode(tokenizer, answer), tokenizer.eos_token_ids[:1]
        is_last, reference = i + 1 == len(answers), references[i]
        question = find_question(tokenizer, messages, prompt)
        if is_last:
            prompt = (*prompt, *prefix)
            question = question and replace(question, num_after=question.num_after + len(prefix))
        right = reference.right if reference is not None else (answer, *(example.others if is_last else ()))
        turns.append(
            Turn(
                prompt_token_ids=prompt,
                answer_token_ids=(*ids, *end),
                answers=right,
                reference=reference,
                max_new_tokens=longest,
                question=question,
            )
        )
    alone = tokenizer.render([{"role": "user", "content": example.document}])
    num_document_tokens = _common_prefix(alone, turns[0].prompt_token_ids)
    earlier = [{"role": m["role"], "content": m["content"]} for m in example.messages[:-1]]
    unasked = tokenizer.render([*earlier, {"role": "user", "content": ""}]) if earlier else alone
    return Conversation(
        turns=tuple(turns),
        num_document_tokens=num_document_tokens,
        num_before_last_question=_common_prefix(unasked, turns[-1].prompt_token_ids),
    )


def _encode(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Return a text's tokens without those that the tokenizer adds."""
    return [t for t in tokenizer.encode(text) if not tokenizer.is_silent(t)] if text else []


def same_text(text: str, other: str) -> bool:
    return _normal(text) == _normal(other)


def contains(text: str, answer: str) -> bool:
    """Return whether a text contains an answer, as RULER scores it."""
    return f" {_normal(answer)} " in f" {_normal(text)} "


def _normal(text: str) -> str:
    return " ".join(text.lower().split())


def _common_prefix(a: list[int], b: tuple[int, ...]) -> int:
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)
