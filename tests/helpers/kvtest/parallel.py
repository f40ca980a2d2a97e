"""A model in several ranks, and its tokens beside those of one: equal, or different at a tie in rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvferry.services.decode.ranks import DECODE_RANK
from kvferry.shared.model.parallel.model import ParallelModel, load_parallel_model
from kvferry.shared.sampling.params import SampledToken

TIE = 1e-3
"""Two tokens whose log probabilities differ by less are a tie: float32 sums of a few hundred terms, in
another order, through some layers."""


@contextmanager
def in_ranks(folder: Path, num_ranks: int, follower_class: str = DECODE_RANK) -> Iterator[ParallelModel]:
    """A model in so many ranks of decode or prefill, one thread each; no rank may be lost meanwhile."""
    lost: list[Exception] = []
    model = load_parallel_model(
        folder,
        name="m",
        num_ranks=num_ranks,
        on_lost=lost.append,
        device="cpu",
        num_threads=num_ranks,
        follower_class=follower_class,
    )
    try:
        yield model
    finally:
        model.close()
    assert not lost


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
