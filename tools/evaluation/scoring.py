"""Answers of asked turns, greedy and forced, and what they score.

All contenders of a turn are stepped in one batch. Compresses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.oracle import step_together
from kvferry.tools.evaluation.asking import Asked
from kvferry.tools.evaluation.conversation import Turn, contains, same_text
from kvferry.tools.evaluation.records import TurnScore


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
        self, asked: Sequence[Asked], turn: Turn, full_tokens: tuple[int, ...]
    ) -> tuple[list[TurnScore], list[tuple[int, ...]]]:
        """Scores and greedy answers, one of each an asked turn.

        Args: full_tokens: what the full cache answers, greedily.
        """
        right = turn.answer_token_ids
        nlls, likeliest = forced(asked, right)
        # An answer whose every token is the likeliest is what greedy decoding gives.
        wrong = [a for a, tokens in zip(asked, likeliest, strict=True) if tokens != right]
        wrong_tokens = iter(self.greedy(wrong))
        answers = [tokens if tokens == right else next(wrong_tokens) for tokens in likeliest]
        if full_tokens != right:
            _, likeliest = forced(asked, full_tokens)
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

    def greedy(self, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        """The likeliest tokens up to an end token, or as many as an answer may have."""
        continuations = [a.continuation.fork() for a in asked]
        answers = [[int(a.logits.argmax())] for a in asked]
        for _ in range(self._max_new_tokens - 1):
            going = [i for i, answer in enumerate(answers) if answer[-1] not in self._eos_token_ids]
            if not going:
                break
            logits = step_together([continuations[i] for i in going], [answers[i][-1] for i in going])
            for i, token_id in zip(going, logits.argmax(-1).tolist(), strict=True):
                answers[i].append(token_id)
        return [tuple(answer) for answer in answers]


def forced(asked: Sequence[Asked], tokens: tuple[int, ...]) -> tuple[list[float], list[tuple[int, ...]]]:
    """Given tokens as the answer: their mean negative log-likelihood, and the likeliest in their places."""
    continuations = [a.continuation.fork() for a in asked]
    rows = [torch.stack([a.logits for a in asked])]
    rows += [step_together(continuations, [token_id] * len(asked)) for token_id in tokens[:-1]]
    logits = torch.stack(rows, 1)  # [B, n, V]
    nlls = -logits.log_softmax(-1)[:, range(len(tokens)), list(tokens)].mean(1)
    return nlls.tolist(), [tuple(row) for row in logits.argmax(-1).tolist()]
