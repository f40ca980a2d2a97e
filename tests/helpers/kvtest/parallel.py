"""Tokens of several ranks beside those of one: equal, or different at a tie within rounding."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.shared.sampling.params import SampledToken

TIE = 1e-3
"""Two tokens whose log probabilities differ by less are a tie: float32 sums of a few hundred terms, in
another order, through some layers."""


def same_or_tied(tokens: Sequence[int], expected: Sequence[SampledToken]) -> int:
    """Check greedy tokens against those of one rank, which have `top_logprobs`.

    Returns: how many are equal; after a tie the two go different ways and are not compared.
    """
    assert len(tokens) == len(expected)
    for number, (token, of_one) in enumerate(zip(tokens, expected, strict=True)):
        if token == of_one.token_id:
            continue
        best = dict(of_one.top_logprobs)
        assert token in best, (number, token, of_one)
        assert best[of_one.token_id] - best[token] < TIE, (number, token, of_one)
        return number
    return len(tokens)
