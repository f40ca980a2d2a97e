"""The layout of one packed layer in one run of bytes, computed from counts alone.

Prefill computes it after allocating bits; decode computes the same layout from the counts in the manifest and
views its arena bytes with it. Kinds follow one another, so that each is shipped and counted as one piece;
every region starts at a multiple of `ALIGNMENT_BYTES`:

    codes:  head 0: key_words | values 2 | values 4 | values 8;  head 1: ...     uint8
    scales: head 0: key scales | key minima | value scales | value minima; ...   float16, K's group by group
    rows:   head 0: values 16; ...                                               float16 (zone B)
    index:  head 0: channels int16 | positions uint16, int32 if T > 65536; ...

A head's tokens are sorted by V width 2, 4, 8, 16 and by position within a width; its channels by K width and
by number within a width. `key_words.py` and `value_rows.py` define the order of the codes. Any change to
these definitions is a new `LAYOUT_VERSION`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import Region
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.packed.key_words import WIDTHS, key_code_bytes, num_groups
from kvferry.kernels.packed.value_rows import value_row_bytes

LAYOUT_VERSION = 3
"""2: scales and minima in float16, positions in 16 bits where these suffice.
3: K's scales and minima for each group of tokens."""
MAX_SHORT_POSITIONS = 1 << 16
Kind = Literal["codes", "scales", "rows", "index"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_REGIONS_PER_HEAD = 11
ENTRY_REGIONS = (
    "key_words", "channels", "key_scales", "key_minima", "value_scales", "value_minima",
    *(f"values_{width}" for width in WIDTHS),
)  # fmt: skip
"""The regions whose offsets kernels are given."""
OFFSET_BYTES = 2
"""The unit of these offsets: the regions are read as int16 or float16."""


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """How many channels and tokens one KV head has, by width 2, 4, 8, 16.

    Attributes:
        channels: K channels of each width.
        tokens: tokens by the width of their V; all of them have K.
    """

    channels: tuple[int, int, int, int]
    tokens: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if len(self.channels) != 4 or len(self.tokens) != 4 or min(*self.channels, *self.tokens) < 0:
            raise ValueError(f"a packed head has four counts of at least 0 each, not {self}")

    @cached_property
    def num_channels(self) -> int:
        return sum(self.channels)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.tokens)


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """All regions of a layer.

    Attributes:
        num_tokens: T, the range of positions.
        heads: one entry a KV head.
        regions: for each head, its regions by the names of `PackedHead`.
        kinds: (offset, size in bytes with the padding between regions) of each kind; they tile the layer.
        size_bytes: of the whole layer, a multiple of ALIGNMENT_BYTES.
    """

    head_dim: int
    num_tokens: int
    heads: tuple[HeadCounts, ...]
    regions: tuple[dict[str, Region], ...]
    kinds: dict[Kind, tuple[int, int]]
    size_bytes: int

    @cached_property
    def entries(self) -> Tensor:
        """Each head as a row for kernels, with offsets from the start of the layer; see `packed_entries`."""
        rows = []
        for counts, regions in zip(self.heads, self.regions, strict=True):
            offsets = [regions[name].offset // OFFSET_BYTES for name in ENTRY_REGIONS]
            rows.append([0, *counts.channels, *counts.tokens, *offsets, 0])
        return torch.tensor(rows, dtype=torch.int64)


def packed_layout(heads: Sequence[HeadCounts], head_dim: int, *, num_tokens: int) -> PackedLayout:
    """Lay out one layer. Recent layouts are cached: each end of a transfer needs one several times.

    Args: num_tokens: T, of the prompt or segment before packing.
    Raises:
        ValueError: a head has more channels than `head_dim`.
    """
    return _packed_layout(tuple(heads), head_dim, num_tokens)


@lru_cache(maxsize=64)
def _packed_layout(heads: tuple[HeadCounts, ...], head_dim: int, num_tokens: int) -> PackedLayout:
    shapes = []
    for head in heads:
        if head.num_channels > head_dim:
            raise ValueError(f"a packed head has {head.num_channels} channels; head_dim is {head_dim}")
        shapes.append(_head_shapes(head, head_dim, num_tokens))
    regions: tuple[dict[str, Region], ...] = tuple([{} for _ in heads])
    kinds: dict[Kind, tuple[int, int]] = {}
    offset = 0
    for kind in KINDS:
        start = offset
        for of_head, placed in zip(shapes, regions, strict=True):
            for name, shape, dtype in of_head[kind]:
                placed[name] = Region(offset=offset, shape=shape, dtype=dtype)
                size_bytes = math.prod(shape) * dtype.itemsize
                offset += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        kinds[kind] = (start, offset - start)
    return PackedLayout(
        head_dim=head_dim,
        num_tokens=num_tokens,
        heads=heads,
        regions=regions,
        kinds=kinds,
        size_bytes=offset,
    )


def position_dtype(num_tokens: int) -> torch.dtype:
    """Return the dtype of positions in a prompt or segment of so many tokens."""
    return torch.uint16 if num_tokens <= MAX_SHORT_POSITIONS else torch.int32


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The most that a layer may take if its bits are not known on the host.

    Attributes: tokens: retained in a head; size_bytes: of the layer, a multiple of ALIGNMENT_BYTES.
    """

    tokens: int
    size_bytes: int


def packed_bound(*, num_tokens: int, budget_tokens: int, num_kv_heads: int, head_dim: int) -> Bound:
    """Bound a layer's size before its bits are allocated, for admission and for its memory.

    Holds for every allocation in which each head's V has at most 16 B bits a channel, its K at most
    min(16 D, floor(16 B D / n)) bits a token summed over channels, where B = min(budget_tokens, num_tokens)
    and n is the number of tokens retained; whether K's scales and minima are within these bits or beside
    them.
    """
    budget = min(budget_tokens, num_tokens)
    retained = min(num_tokens, 8 * budget)
    # V: 2 B D bytes, and up to a byte a row where D is no multiple of 4. K: 2 B D, and 7 padding tokens.
    codes_and_rows = 4 * budget * head_dim + retained + 14 * head_dim
    # 8 B tokens leave each K channel 2 bits, so all of them may have scales for each group of as many tokens
    scales = 4 * (retained + num_groups(retained) * head_dim)
    index = position_dtype(num_tokens).itemsize * retained + 2 * head_dim
    head_bytes = codes_and_rows + scales + index + _REGIONS_PER_HEAD * ALIGNMENT_BYTES
    size_bytes = num_kv_heads * (-(-head_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return Bound(tokens=retained, size_bytes=size_bytes)


def _head_shapes(
    head: HeadCounts, head_dim: int, num_tokens: int
) -> dict[Kind, list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """Return names, shapes and dtypes of one head's regions by kind, in their order."""
    coded_channels, coded_tokens = sum(head.channels[:3]), sum(head.tokens[:3])
    key_headers = (num_groups(head.num_tokens), coded_channels)
    codes: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("key_words", (key_code_bytes(head.channels, head.num_tokens),), torch.uint8)
    ]
    for bits, count in zip(WIDTHS[:3], head.tokens[:3], strict=True):
        codes.append((f"values_{bits}", (count, value_row_bytes(bits, head_dim)), torch.uint8))
    return {
        "codes": codes,
        "scales": [
            ("key_scales", key_headers, torch.float16),
            ("key_minima", key_headers, torch.float16),
            ("value_scales", (coded_tokens,), torch.float16),
            ("value_minima", (coded_tokens,), torch.float16),
        ],
        "rows": [("values_16", (head.tokens[3], head_dim), torch.float16)],
        "index": [
            ("channels", (head.num_channels,), torch.int16),
            ("positions", (head.num_tokens,), position_dtype(num_tokens)),
        ],
    }
