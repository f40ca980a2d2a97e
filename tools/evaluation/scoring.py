"""Greedy and forced answers to prepared turns, and their scores.

All contenders of a turn are stepped in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.oracle import step_together
from kvferry.tools.evaluation.conversation import Turn, contains, same_text
from kvferry.tools.evaluation.records import TurnScore
from kvferry.tools.evaluation.settings import PendingAnswer


class AnswerScorer:
    """Scores answers.

    Args: max_new_tokens: the longest answer.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, *, eos_token_ids: tuple[int, ...], max_new_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_new_tokens = max_new_tokens

    def score(
        self, pending: Sequence[PendingAnswer], turn: Turn, full_tokens: tuple[int, ...]
    ) -> tuple[list[TurnScore], list[tuple[int, ...]]]:
        """Scores and greedy answers, one of each per prepared turn.

        Args: full_tokens: the full cache's greedy answer.
        """
        right = turn.answer_token_ids
        nlls, likeliest = forced(pending, right)
        # If every token of the right answer is the likeliest, greedy decoding gives exactly that answer.
        wrong = [a for a, tokens in zip(pending, likeliest, strict=True) if tokens != right]
        wrong_tokens = iter(self.greedy(wrong))
        answers = [tokens if tokens == right else next(wrong_tokens) for tokens in likeliest]
        if full_tokens != right:
            _, likeliest = forced(pending, full_tokens)
        scores = []
        for nll, answer, tokens in zip(nlls, answers, likeliest, strict=True):
            text = self._tokenizer.decode(answer)
            agreeing = [token == full for token, full in zip(tokens, full_tokens, strict=True)]
            scores.append(
                TurnScore(
                    exact=same_text(text, turn.answer),
                    contained=contains(text, turn.answer),
                    nll=nll,
                    agreement=sum(agreeing) / len(agreeing),
                    text=text,
                )
            )
        return scores, answers

    def greedy(self, pending: Sequence[PendingAnswer]) -> list[tuple[int, ...]]:
        """The likeliest tokens up to an end token, or as many as an answer may have."""
        continuations = [a.continuation.fork() for a in pending]
        answers = [[int(a.logits.argmax())] for a in pending]
        for _ in range(self._max_new_tokens - 1):
            going = [i for i, answer in enumerate(answers) if answer[-1] not in self._eos_token_ids]
            if not going:
                break
            logits = step_together([continuations[i] for i in going], [answers[i][-1] for i in going])
            for i, token_id in zip(going, logits.argmax(-1).tolist(), strict=True):
                answers[i].append(token_id)
        return [tuple(answer) for answer in answers]


def forced(
    pending: Sequence[PendingAnswer], tokens: tuple[int, ...]
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Feed given tokens as the answer: their mean negative log-likelihood, and the likeliest tokens."""
    continuations = [a.continuation.fork() for a in pending]
    rows = [torch.stack([a.logits for a in pending])]
    rows += [step_together(continuations, [token_id] * len(pending)) for token_id in tokens[:-1]]
    logits = torch.stack(rows, 1)  # [B, n, V]
    nlls = -logits.log_softmax(-1)[:, range(len(tokens)), list(tokens)].mean(1)
    return nlls.tolist(), [tuple(row) for row in logits.argmax(-1).tolist()]
