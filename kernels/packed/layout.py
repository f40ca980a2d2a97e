"""Where everything of one packed layer lies in one run of bytes; computed from counts alone.

Prefill lays a layer out after allocating bits; decode computes the same layout from the counts that the
manifest repeats, and views its arena bytes with it. Kinds follow one another so that each can be shipped and
counted as one piece; every region starts at a multiple of `ALIGNMENT_BYTES`:

    codes:  head 0: key_words | values 2 | values 4 | values 8;  head 1: ...     uint8
    scales: head 0: key scales | key minima | value scales | value minima; ...   float32
    rows:   head 0: values 16; ...                                               float16 (zone B)
    index:  head 0: channels int16 | positions int32; ...

A head's tokens are sorted by V width 2, 4, 8, 16 and by position within a width; its channels by K width and
by number within a width. `key_words.py` and `value_rows.py` say how the codes lie. Any change of what is
said there or here is a new `LAYOUT_VERSION`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kvferry.kernels.packed.key_words import WIDTHS, key_code_bytes
from kvferry.kernels.packed.value_rows import value_row_bytes

LAYOUT_VERSION = 1
ALIGNMENT_BYTES = 16
Kind = Literal["codes", "scales", "rows", "index"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_NONE = (0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """What one KV head keeps, by width 2, 4, 8, 16.

    Attributes:
        channels: K channels of each width.
        tokens: tokens by the width of their V; K is kept of all of them.
    """

    channels: tuple[int, int, int, int]
    tokens: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if len(self.channels) != 4 or len(self.tokens) != 4 or min(*self.channels, *self.tokens) < 0:
            raise ValueError(f"a packed head has four counts of at least 0 each, not {self}")

    @property
    def num_channels(self) -> int:
        return sum(self.channels)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Region:
    """One tensor's place: bytes from the buffer's start, and its shape."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The region of a uint8 buffer as a typed tensor; writes go to the buffer."""
        return buffer[self.offset : self.offset + self.size_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """All regions of a layer.

    Attributes:
        heads: one entry a KV head.
        regions: for each head, its regions by the names of `PackedHead`.
        kinds: (offset, size in bytes, padding between regions included) of each kind; they tile the layer.
        size_bytes: of the whole layer, a multiple of ALIGNMENT_BYTES.
    """

    head_dim: int
    heads: tuple[HeadCounts, ...]
    regions: tuple[dict[str, Region], ...]
    kinds: dict[Kind, tuple[int, int]]
    size_bytes: int


def packed_layout(heads: Sequence[HeadCounts], head_dim: int) -> PackedLayout:
    """Lay out one layer.

    Raises:
        ValueError: a head has more channels than `head_dim`.
    """
    for head in heads:
        if head.num_channels > head_dim:
            raise ValueError(f"a packed head has {head.num_channels} channels; head_dim is {head_dim}")
    regions: tuple[dict[str, Region], ...] = tuple({} for _ in heads)
    kinds: dict[Kind, tuple[int, int]] = {}
    offset = 0
    for kind in KINDS:
        start = offset
        for head, placed in zip(heads, regions, strict=True):
            for name, shape, dtype in _shapes(kind, head, head_dim):
                placed[name] = Region(offset=offset, shape=shape, dtype=dtype)
                offset += -(-placed[name].size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        kinds[kind] = (start, offset - start)
    return PackedLayout(
        head_dim=head_dim, heads=tuple(heads), regions=regions, kinds=kinds, size_bytes=offset
    )


def max_packed_bytes(*, num_tokens: int, budget_tokens: int, num_kv_heads: int, head_dim: int) -> int:
    """A bound on `size_bytes` of a layer before its bits are allocated, for admission.

    Holds for every allocation in which each head's V has at most 16 B bits a channel, its K at most
    min(16 D, floor(16 B D / n)) bits a token summed over channels, where B = min(budget_tokens, num_tokens)
    and n is the number of tokens kept.
    """
    budget = min(budget_tokens, num_tokens)
    kept = min(num_tokens, 8 * budget)
    # V: 2 B D bytes, and up to a byte a row where D is no multiple of 4. K: 2 B D, and 7 padding tokens.
    codes_and_rows = 4 * budget * head_dim + kept + 14 * head_dim
    scales = 8 * (kept + head_dim)
    index = 4 * kept + 2 * head_dim
    regions = sum(len(_shapes(kind, HeadCounts(channels=_NONE, tokens=_NONE), head_dim)) for kind in KINDS)
    head_bytes = codes_and_rows + scales + index + regions * ALIGNMENT_BYTES
    return num_kv_heads * (-(-head_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def _shapes(kind: Kind, head: HeadCounts, head_dim: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of one head's regions of a kind, in their order."""
    coded_channels, coded_tokens = sum(head.channels[:3]), sum(head.tokens[:3])
    if kind == "codes":
        words = key_code_bytes(head.channels, head.num_tokens)
        values = [
            (f"values_{bits}", (count, value_row_bytes(bits, head_dim)), torch.uint8)
            for bits, count in zip(WIDTHS[:3], head.tokens[:3], strict=True)
        ]
        return [("key_words", (words,), torch.uint8), *values]
    if kind == "scales":
        return [
            ("key_scales", (coded_channels,), torch.float32),
            ("key_minima", (coded_channels,), torch.float32),
            ("value_scales", (coded_tokens,), torch.float32),
            ("value_minima", (coded_tokens,), torch.float32),
        ]
    if kind == "rows":
        return [("values_16", (head.tokens[3], head_dim), torch.float16)]
    return [
        ("channels", (head.num_channels,), torch.int16),
        ("positions", (head.num_tokens,), torch.int32),
    ]
