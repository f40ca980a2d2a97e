"""Positions with gaps: rising, in range, sentences whole, and long distances among them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tools.recall.conversations import Mixture, draw_batch
from kvferry.tools.recall.positions import draw_positions
from kvferry.tools.recall.vocabulary import END_ID, WORD_IDS

ENDS = [END_ID, WORD_IDS["."], WORD_IDS["?"]]


@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 4),
    num_tokens=st.integers(1, 200),
    longest=st.integers(1, 9000),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_positions_rise_stay_in_range_and_skip_between_sentences_only(
    seed: int, num_rows: int, num_tokens: int, longest: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, 40, (num_rows, num_tokens), generator=generator)
    positions = draw_positions(token_ids, share=share, longest=longest, generator=generator)
    assert positions.shape == token_ids.shape
    assert (positions[:, 0] == 0).all()
    steps = positions.diff(dim=1)
    assert (steps >= 1).all()
    assert positions.max() < max(longest, num_tokens)
    assert torch.isin(token_ids[:, :-1][steps > 1], torch.tensor(ENDS)).all()


def test_a_share_of_the_rows_reaches_across_the_whole_context() -> None:
    token_ids, _ = draw_batch("0", 200, 128, Mixture())
    generator = torch.Generator().manual_seed(1)
    last = draw_positions(token_ids[:, :-1], share=0.5, longest=8192, generator=generator)[:, -1]
    stretched = last > 127
    assert 70 <= stretched.sum() <= 130  # 7 standard deviations are 50
    assert last.max() > 7000
    assert 4700 < last[stretched].float().mean() < 6300  # two thirds of the way: 5504


def test_positions_follow_from_the_generator() -> None:
    token_ids, _ = draw_batch("0", 8, 128, Mixture())
    drawn = [
        draw_positions(token_ids, share=0.7, longest=8192, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    ]
    assert drawn[0].equal(drawn[1])


def test_where_nothing_can_be_skipped_positions_are_plain() -> None:
    token_ids = torch.full((2, 50), WORD_IDS["the"])
    positions = draw_positions(token_ids, share=1.0, longest=8192, generator=torch.Generator().manual_seed(0))
    assert positions.equal(torch.arange(50).expand(2, 50))
