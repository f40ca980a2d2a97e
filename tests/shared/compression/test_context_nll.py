"""The estimate of a context's NLL is the code length that its equation gives, at any length."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.compression.curves import CHUNK_TOKENS, estimate_context_nll


def code_length(token_ids: list[int], vocab_size: int) -> float:
    """The equation with every count taken anew."""
    total = 0.0
    for i, token in enumerate(token_ids):
        seen = token_ids[:i]
        before = token_ids[i - 1] if i else None
        alone = (seen.count(token) + 1 / vocab_size) / (i + 1)
        pairs = Counter(zip([None, *seen], seen, strict=False))
        contexts = Counter([None, *seen][:i])
        total -= math.log((pairs[before, token] + alone) / (contexts[before] + 1))
    return total


@given(token_ids=st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_the_estimate_is_the_equations(token_ids: list[int]) -> None:
    expected = code_length(token_ids, 7) / len(token_ids)
    assert estimate_context_nll(token_ids, vocab_size=7) == pytest.approx(expected)


def test_one_token_costs_what_a_uniform_choice_does() -> None:
    assert estimate_context_nll([3], vocab_size=704) == pytest.approx(math.log(704))


def test_repetition_is_cheap_and_noise_dear() -> None:
    rng = random.Random(0)
    noise = [rng.randrange(50_000) for _ in range(3000)]
    repeated = noise[:20] * 150
    assert estimate_context_nll(repeated, vocab_size=50_000) < 1.0
    assert estimate_context_nll(noise, vocab_size=50_000) > 10.0


@pytest.mark.parametrize("num_chunks", [2, 5])
def test_a_longer_context_of_the_same_kind_costs_the_same(num_chunks: int) -> None:
    rng = random.Random(1)
    words = [rng.randrange(200) for _ in range(CHUNK_TOKENS * num_chunks + 17)]
    one = estimate_context_nll(words[:CHUNK_TOKENS], vocab_size=200)
    assert estimate_context_nll(words, vocab_size=200) == pytest.approx(one, rel=0.03)
