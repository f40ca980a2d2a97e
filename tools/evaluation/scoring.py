"""Greedy and forced answers to prepared turns, and their scores.

All contenders of a turn, and of other prompts' turns beside it, are stepped in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.conversation import Turn, contains, same_text
from kvferry.tools.evaluation.records import TurnScore
from kvferry.tools.evaluation.settings import PendingAnswer
from kvferry.tools.oracle import step_together


@dataclass(frozen=True, kw_only=True)
class FullAnswer:
    """The full cache's greedy answer. `logprobs`: float32 `[n, V]`, before each of its n tokens."""

    tokens: tuple[int, ...]
    logprobs: Tensor


@dataclass(kw_only=True)
class Forced:
    """What a cache makes of given tokens.

    Attributes:
        nlls: of each token, in nats.
        likeliest: the token that it would take instead, after the same tokens before it.
        kl: of each token, in nats, from the full cache's distribution to this one; empty if not asked for.
    """

    nlls: list[float]
    likeliest: list[int]
    kl: list[float]


class AnswerScorer:
    """Scores answers.

    Args: max_new_tokens: the longest answer where the example does not say.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, *, eos_token_ids: tuple[int, ...], max_new_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_new_tokens = max_new_tokens

    def score(
        self, pending: Sequence[PendingAnswer], turns: Sequence[Turn], full: Sequence[FullAnswer]
    ) -> tuple[list[TurnScore], list[tuple[int, ...]]]:
        """Return scores and greedy answers, one of each per prepared turn.

        Args: turns: each one's question. full: the full cache's greedy answer to it.
        """
        compared = forced(pending, [answer.tokens for answer in full], [answer.logprobs for answer in full])
        # If every token of the full cache's answer is the likeliest, greedy decoding gives exactly that one.
        answers = [answer.tokens for answer in full]
        other = [i for i, found in enumerate(compared) if tuple(found.likeliest) != answers[i]]
        later = self._greedy([pending[i] for i in other], [turns[i] for i in other])
        for i, tokens in zip(other, later, strict=True):
            answers[i] = tokens
        right = [turn.answer_token_ids for turn in turns]
        unseen = [i for i, tokens in enumerate(right) if tokens != full[i].tokens]
        nlls = [fmean(found.nlls) for found in compared]
        by_right = forced([pending[i] for i in unseen], [right[i] for i in unseen])
        for i, found in zip(unseen, by_right, strict=True):
            nlls[i] = fmean(found.nlls)
        scores = []
        for i, answer in enumerate(answers):
            text = self._tokenizer.decode(answer)
            reference = turns[i].reference
            same = [
                token == wanted for token, wanted in zip(compared[i].likeliest, full[i].tokens, strict=True)
            ]
            scores.append(
                TurnScore(
                    exact=any(same_text(text, right) for right in turns[i].answers),
                    contained=any(contains(text, right) for right in turns[i].answers),
                    nll=nlls[i],
                    agreement=sum(same) / len(same),
                    text=text,
                    scores={} if reference is None else {reference.score: reference(text)},
                    num_same=[*same, False].index(False),
                    kl=tuple(float(f"{kl:.3g}") for kl in compared[i].kl),
                    tokens=answer,
                )
            )
        return scores, answers

    def full(self, pending: Sequence[PendingAnswer], turns: Sequence[Turn]) -> list[FullAnswer]:
        """Return greedy answers with their distributions."""
        rows: list[list[Tensor]] = [[a.logits] for a in pending]
        answers = self._greedy(pending, turns, rows)
        return [
            FullAnswer(tokens=tokens, logprobs=torch.stack(row).log_softmax(-1))
            for tokens, row in zip(answers, rows, strict=True)
        ]

    def _greedy(
        self,
        pending: Sequence[PendingAnswer],
        turns: Sequence[Turn],
        rows: Sequence[list[Tensor]] | None = None,
    ) -> list[tuple[int, ...]]:
        longest = [turn.max_new_tokens or self._max_new_tokens for turn in turns]
        return greedy(pending, eos_token_ids=self._eos_token_ids, max_new_tokens=longest, rows=rows)


def greedy(
    pending: Sequence[PendingAnswer],
    *,
    eos_token_ids: tuple[int, ...],
    max_new_tokens: Sequence[int],
    rows: Sequence[list[Tensor]] | None = None,
) -> list[tuple[int, ...]]:
    """Return the likeliest tokens up to an end token, or as many as each answer may have.

    Args: rows: lists that get the float32 logits `[V]` before each answer's second and later tokens.
    """
    continuations = [a.continuation.fork() for a in pending]
    answers = [[int(a.logits.argmax())] for a in pending]
    while True:
        going = [
            i
            for i, answer in enumerate(answers)
            if answer[-1] not in eos_token_ids and len(answer) < max_new_tokens[i]
        ]
        if not going:
            return [tuple(answer) for answer in answers]
        logits = step_together([continuations[i] for i in going], [answers[i][-1] for i in going])
        for i, row in zip(going, logits, strict=True):
            answers[i].append(int(row.argmax()))
            if rows is not None:
                rows[i].append(row)


def forced(
    pending: Sequence[PendingAnswer],
    answers: Sequence[tuple[int, ...]],
    full: Sequence[Tensor] | None = None,
) -> list[Forced]:
    """Feed given tokens as the answers and return what each cache makes of them.

    Args: full: log-probabilities `[n, V]` of the full cache over the same tokens, to compare with.
    """
    found = [Forced(nlls=[], likeliest=[], kl=[]) for _ in pending]
    for i, logits in _feed(pending, answers):
        logprobs, step = logits.log_softmax(-1), len(found[i].nlls)
        found[i].nlls.append(-float(logprobs[answers[i][step]]))
        found[i].likeliest.append(int(logits.argmax()))
        if full is not None:
            wanted = full[i][step]
            found[i].kl.append(max(0.0, float((wanted.exp() * (wanted - logprobs)).sum())))
    return found


def _feed(
    pending: Sequence[PendingAnswer], answers: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the float32 logits `[V]` before each token of each answer, with the answer's number."""
    continuations = [a.continuation.fork() for a in pending]
    yield from enumerate(a.logits for a in pending)
    for step in range(max((len(tokens) for tokens in answers), default=0) - 1):
        going = [i for i, tokens in enumerate(answers) if step + 1 < len(tokens)]
        logits = step_together([continuations[i] for i in going], [answers[i][step] for i in going])
        yield from zip(going, logits, strict=True)
