"""Positions of training rows, some of them with gaps: short rows that teach long distances.

A row whose positions skip ahead between sentences has the distances of a document many times as long, at the
cost of a short one (positional skip-wise training, Zhu et al. 2024, https://arxiv.org/abs/2309.10400).
Positions never skip within a sentence, as in a document that is really long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.tools.recall.vocabulary import END_ID, WORD_IDS

_MAX_GAPS = 12
_SENTENCE_ENDS = torch.tensor([END_ID, WORD_IDS["."], WORD_IDS["?"]])


def draw_positions(token_ids: Tensor, *, share: float, longest: int, generator: torch.Generator) -> Tensor:
    """Draw positions of rows `[B, T]`: a share is stretched to up to `longest`, others are 0 .. T - 1.

    Returns: int64 `[B, T]`, strictly rising in every row and below max(longest, T).
    """
    num_tokens = token_ids.shape[1]
    steps = torch.ones_like(token_ids)
    steps[:, 0] = 0
    if share <= 0 or longest <= num_tokens:
        return steps.cumsum(1)
    for row, ids in zip(steps, token_ids, strict=True):
        after = 1 + torch.isin(ids[:-1], _SENTENCE_ENDS).nonzero().flatten()
        if len(after) == 0 or _uniform(generator) >= share:
            continue
        num_gaps = min(len(after), 1 + int(_MAX_GAPS * _uniform(generator)))
        at = after[torch.randperm(len(after), generator=generator)[:num_gaps]]
        # Exponential weights divide the skipped positions among the gaps as uniform cuts would.
        weights = -torch.rand(num_gaps, generator=generator).clamp_min(1e-6).log()
        # Short rows lack long distances, so long skips are more likely than short ones.
        skipped = int((longest - num_tokens) * _uniform(generator) ** 0.5)
        row[at] += (weights / weights.sum() * skipped).long()
    return steps.cumsum(1)


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))
