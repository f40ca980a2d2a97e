"""Descriptors and scratch memory of the HSA kernel; see `kernels/descriptors.py` for what a table is.

Page extremes of a head are stored channel by channel, because a step reads only the highest-ranked channels:
page p of channel c is at `offset + c * channel_stride + p`. The stride is a multiple of 16 bytes. Pages of
one token have no extremes: their keys are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.descriptors import ROW_FIELDS
from kvferry.kernels.split_workspace import SplitWorkspace, split_workspace

FIELDS = ROW_FIELDS + 6
MAX_OFFSET, MIN_OFFSET, CHANNEL_STRIDE, PAGE_SIZE, NUM_CHANNELS, NUM_TOKENS = range(ROW_FIELDS, FIELDS)
"""Columns: Kmax and Kmin of the first page and channel, elements between channels, P, k1, k2."""
MAX_PAGES = 8192
"""Pages of one head: one program selects among all of them."""
BLOCK_PAGES = 128
"""Pages that one program scores."""


@dataclass(frozen=True, kw_only=True)
class PageSizes:
    """Whether a batch has pages of one token, and larger ones; each kind has its own launch."""

    one: bool
    more: bool

    @classmethod
    def of(cls, page_sizes: Iterable[int]) -> PageSizes:
        """Args: page_sizes: P of every sequence and layer."""
        found = {page_size == 1 for page_size in page_sizes}
        return cls(one=True in found, more=False in found)


@dataclass(frozen=True, kw_only=True)
class HsaScratch:
    """What the three launches pass to one another.

    Attributes:
        scores: float32 `[heads, G, max_pages]`, logits of pages in units of log2.
        partial: float32 `[heads, blocks, G, 2]`, maximum and sum of each block of pages.
        tokens: int32 `[heads, max_tokens]`, chosen rows, the newest last.
        counts: int32 `[heads]`, how many there are.
        splits: of the attention over them.
    """

    scores: Tensor
    partial: Tensor
    tokens: Tensor
    counts: Tensor
    splits: SplitWorkspace


def hsa_scratch(
    *,
    num_heads: int,
    group_size: int,
    head_dim: int,
    max_pages: int,
    max_tokens: int,
    num_splits: int,
    device: torch.device,
) -> HsaScratch:
    """Args: num_heads: (sequence, KV head) pairs; max_pages, max_tokens: the most that any of them has."""
    blocks = -(-max_pages // BLOCK_PAGES)
    return HsaScratch(
        scores=torch.empty(num_heads, group_size, max_pages, dtype=torch.float32, device=device),
        partial=torch.empty(num_heads, blocks, group_size, 2, dtype=torch.float32, device=device),
        tokens=torch.empty(num_heads, max_tokens, dtype=torch.int32, device=device),
        counts=torch.empty(num_heads, dtype=torch.int32, device=device),
        splits=split_workspace(
            num_heads=num_heads,
            num_slots=num_heads * num_splits,
            group_size=group_size,
            head_dim=head_dim,
            device=device,
        ),
    )
