"""Greedy and forced answers to prepared turns, and their scores.

All contenders of a turn, and of other prompts' turns beside it, are stepped in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.tools.evaluation.conversation import Turn, contains, same_text
from kvferry.tools.evaluation.records import TurnScore
from kvferry.tools.evaluation.settings import PendingAnswer
from kvferry.tools.oracle import step_together


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
        self,
        pending: Sequence[PendingAnswer],
        turns: Sequence[Turn],
        full_tokens: Sequence[tuple[int, ...]],
    ) -> tuple[list[TurnScore], list[tuple[int, ...]]]:
        """Scores and greedy answers, one of each per prepared turn.

        Args: turns: each one's question. full_tokens: the full cache's greedy answer to it.
        """
        right = [turn.answer_token_ids for turn in turns]
        nlls, likeliest = forced(pending, right)
        # If every token of the right answer is the likeliest, greedy decoding gives exactly that answer.
        wrong = [i for i, tokens in enumerate(likeliest) if tokens != right[i]]
        answers = list(likeliest)
        for i, tokens in zip(wrong, self.greedy([pending[i] for i in wrong]), strict=True):
            answers[i] = tokens
        other = [i for i, tokens in enumerate(full_tokens) if tokens != right[i]]
        _, agreeing = forced([pending[i] for i in other], [full_tokens[i] for i in other])
        for i, tokens in zip(other, agreeing, strict=True):
            likeliest[i] = tokens
        scores = []
        for i, answer in enumerate(answers):
            text = self._tokenizer.decode(answer)
            reference = turns[i].reference
            same = [token == full for token, full in zip(likeliest[i], full_tokens[i], strict=True)]
            scores.append(
                TurnScore(
                    exact=any(same_text(text, its) for its in turns[i].answers),
                    contained=any(contains(text, its) for its in turns[i].answers),
                    nll=nlls[i],
                    agreement=sum(same) / len(same),
                    text=text,
                    scores={} if reference is None else {reference.score: reference(text)},
                    num_same=[*same, False].index(False),
                )
            )
        return scores, answers

    def greedy(self, pending: Sequence[PendingAnswer]) -> list[tuple[int, ...]]:
        """As `greedy`, with this scorer's limit."""
        return greedy(pending, eos_token_ids=self._eos_token_ids, max_new_tokens=self._max_new_tokens)


def greedy(
    pending: Sequence[PendingAnswer], *, eos_token_ids: tuple[int, ...], max_new_tokens: int
) -> list[tuple[int, ...]]:
    """The likeliest tokens up to an end token, or as many as an answer may have."""
    continuations = [a.continuation.fork() for a in pending]
    answers = [[int(a.logits.argmax())] for a in pending]
    for _ in range(max_new_tokens - 1):
        going = [i for i, answer in enumerate(answers) if answer[-1] not in eos_token_ids]
        if not going:
            break
        logits = step_together([continuations[i] for i in going], [answers[i][-1] for i in going])
        for i, token_id in zip(going, logits.argmax(-1).tolist(), strict=True):
            answers[i].append(token_id)
    return [tuple(answer) for answer in answers]


def forced(
    pending: Sequence[PendingAnswer], answers: Sequence[tuple[int, ...]]
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Feed given tokens as the answers: their mean negative log-likelihood, and the likeliest tokens."""
    continuations = [a.continuation.fork() for a in pending]
    rows = [[a.logits] for a in pending]
    for step in range(max((len(tokens) for tokens in answers), default=0) - 1):
        going = [i for i, tokens in enumerate(answers) if step + 1 < len(tokens)]
        logits = step_together([continuations[i] for i in going], [answers[i][step] for i in going])
        for i, row in zip(going, logits, strict=True):
            rows[i].append(row)
    nlls, likeliest = [], []
    for tokens, its in zip(answers, rows, strict=True):
        logits = torch.stack(its)  # [n, V]
        nlls.append(float(-logits.log_softmax(-1)[range(len(tokens)), list(tokens)].mean()))
        likeliest.append(tuple(logits.argmax(-1).tolist()))
    return nlls, likeliest
