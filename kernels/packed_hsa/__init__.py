"""Hybrid sparse attention over packed K and V: RDKV's storage with the traffic of RocketKV's second stage.

A packed layer's tokens are stored in packed order, head by head, and each head has its own number of them;
new tokens follow as rows. Pages run over both, and their extremes are codes of 8 bits (`PageCodes`). The
receiver builds them from the packed keys; the decode engine appends one row and attends once per layer and
step: the extremes choose the tokens (`kernels/hsa`), and only those tokens' codes are read. Heads are ragged,
so each is handled by itself.

Legend, beside that of `kernels`: n_h packed tokens of head h, P page_size, k1 num_channels, k2 num_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_attention, check_size, path_for
from kvferry.kernels.hsa import num_pages, update_page_extremes
from kvferry.kernels.hsa.torch_path import ChannelRows, rank_channels, select_tokens
from kvferry.kernels.packed.key_words import gather_key_codes, key_tiles
from kvferry.kernels.packed.layer import PackedHead, PackedLayer
from kvferry.kernels.packed.value_rows import add_value_products

TILE_BLOCKS = 8

_LARGEST = 255


@dataclass(frozen=True)
class PageCodes:
    """Page extremes as codes: Kmax and Kmin of a page's channel c are `low_c + step_c * code`.

    A channel's codes divide the range of its packed keys, so an extreme is off by half a step at most. Keys
    of new tokens outside that range count as its ends, and those of a dropped channel as zero.

    Attributes:
        highest, lowest: uint8 `[H_kv, pages, D]`.
        low, step: float32 `[H_kv, D]`.
    """

    highest: Tensor
    lowest: Tensor
    low: Tensor
    step: Tensor

    def encode(self, head: int, channels: Tensor, keys: Tensor) -> Tensor:
        """Encode some channels' keys. Args: channels int64 `[c]`; keys float32 `[c, n]`. Returns: uint8."""
        step = self.step[head, channels, None]
        codes = (keys - self.low[head, channels, None]) / step.where(step > 0, torch.inf)
        return codes.round_().clamp_(0, _LARGEST).to(torch.uint8)


def page_extremes(packed: PackedLayer, pages: PageCodes, *, page_size: int) -> None:
    """Write the ranges and the extremes of each head's keys, page by page, as attention reads them: after
    dequantisation.

    Args:
        pages: out, pages >= ceil(n_h / P) for every head.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check_pages(packed, pages, num_new=0, page_size=page_size)
    # channels that were dropped are zero in every key
    pages.low.zero_()
    pages.step.zero_()
    for h, head in enumerate(packed.heads):
        count = num_pages(head.counts.num_tokens, page_size)
        pages.highest[h, :count] = 0
        pages.lowest[h, :count] = 0
        if not count:
            continue
        channels = head.channels.long()
        highest = torch.full((len(channels), count), -torch.inf, device=channels.device)
        lowest = torch.full_like(highest, torch.inf)
        tiles = key_tiles(
            head.key_words, head.counts.channels, head.counts.num_tokens, max_blocks=TILE_BLOCKS
        )
        for start, codes in tiles:
            tokens = torch.arange(start, start + codes.shape[1], device=codes.device)
            keys = head.dequantise_keys(codes, tokens)
            index = (tokens // page_size).expand(len(channels), -1)
            highest.scatter_reduce_(1, index, keys, "amax")
            lowest.scatter_reduce_(1, index, keys, "amin")
        low = lowest.amin(1)
        pages.low[h, channels] = low
        pages.step[h, channels] = (highest.amax(1) - low) / _LARGEST
        pages.highest[h, :count, channels] = pages.encode(h, channels, highest).T
        pages.lowest[h, :count, channels] = pages.encode(h, channels, lowest).T


def append_key(packed: PackedLayer, pages: PageCodes, key: Tensor, *, num_new: int, page_size: int) -> None:
    """Fold one new token's key into its page of each head, in place.

    Args:
        pages: valid for n_h + num_new tokens.
        key: `[H_kv, D]`.
        num_new: new rows before this one.

    Raises:
        ValueError: shapes do not fit together, or the pages are full.
    """
    _check_pages(packed, pages, num_new=num_new + 1, page_size=page_size)
    if key.shape != (pages.highest.shape[0], pages.highest.shape[2]):
        raise ValueError(f"key {tuple(key.shape)} must be [H_kv, D] of pages {tuple(pages.highest.shape)}")
    every = torch.arange(key.shape[1], device=key.device)
    for h, head in enumerate(packed.heads):
        update_page_extremes(
            pages.highest[h : h + 1],
            pages.lowest[h : h + 1],
            pages.encode(h, every, key[h].float()[:, None]).T,
            position=head.counts.num_tokens + num_new,
            page_size=page_size,
        )


def attend(
    queries: Tensor,
    packed: PackedLayer,
    new_keys: Tensor,
    new_values: Tensor,
    pages: PageCodes,
    *,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """Run `hsa.attend` over each head's packed tokens, dequantised, followed by the new rows.

    Args: as in `kernels`; m >= 1, the newest row last.
        pages: valid for n_h + m tokens.
        num_channels: k1, 1 to D.
    """
    _check_pages(packed, pages, num_new=new_keys.shape[1], page_size=page_size)
    check_attention(queries, new_keys, new_values, prefix="new_", rows="m")
    check_size("num_channels", num_channels, 1, queries.shape[2])
    check_size("num_tokens", num_tokens, 1)
    if (queries.shape[0], queries.shape[2]) != (pages.highest.shape[0], pages.highest.shape[2]):
        raise ValueError(
            f"queries {tuple(queries.shape)} must be [H_kv, G, D] of pages {tuple(pages.highest.shape)}"
        )
    path_for("packed_hsa", queries.device)
    output = torch.empty_like(queries)
    ranked = rank_channels(queries, num_channels=num_channels, scaling=scaling)
    # a logit is q (low + step * code); q * low is the same for all pages, so it changes no softmax
    steps = pages.step.gather(1, ranked.channels)
    ranked = replace(ranked, queries=ranked.queries * steps[:, None])
    for h, head in enumerate(packed.heads):
        length = head.counts.num_tokens + new_keys.shape[1]
        if length <= num_tokens:
            chosen = torch.arange(length, device=queries.device)
        else:
            extremes = pages.highest[h : h + 1], pages.lowest[h : h + 1]
            chosen = select_tokens(
                ranked.heads(h, h + 1),
                *extremes,
                length=length,
                page_size=page_size,
                num_tokens=num_tokens,
                rows=ChannelRows.of(*extremes),
            )[0]
            chosen = chosen.sort().values
        output[h] = _attend_to(queries[h].float() * scaling, head, chosen, new_keys[h], new_values[h])
    return output


def _attend_to(
    queries: Tensor, head: PackedHead, chosen: Tensor, new_keys: Tensor, new_values: Tensor
) -> Tensor:
    """Attend with one head's queries float32 `[G, D]`, already scaled, to chosen tokens, int64 ascending:
    float32 `[G, D]`."""
    num_kept = head.counts.num_tokens
    kept, new = chosen[chosen < num_kept], chosen[chosen >= num_kept] - num_kept
    codes = gather_key_codes(head.key_words, head.counts.channels, num_kept, kept)
    kept_logits = queries[:, head.channels.long()] @ head.dequantise_keys(codes, kept)
    logits = torch.cat([kept_logits, queries @ new_keys[new].float().T], dim=1)
    probabilities = logits.softmax(dim=-1)
    attended = probabilities[:, len(kept) :] @ new_values[new].float()
    return _add_values(head, kept, probabilities[:, : len(kept)], attended)


def _add_values(head: PackedHead, kept: Tensor, probabilities: Tensor, output: Tensor) -> Tensor:
    """Add tokens' values. Args: kept int64 `[k]`, ascending; probabilities `[G, k]`, output `[G, D]`."""
    coded = kept[kept < sum(head.counts.tokens[:3])]
    output += (probabilities[:, : len(coded)] @ head.value_minima[coded].float())[:, None]
    scaled = probabilities[:, : len(coded)] * head.value_scales[coded]
    start, first = 0, 0
    for width, rows in zip((2, 4, 8), (head.values_2, head.values_4, head.values_8), strict=True):
        inside = coded[(coded >= first) & (coded < first + len(rows))] - first
        stop = start + len(inside)
        add_value_products(scaled[:, start:stop], rows[inside], width, output)
        start, first = stop, first + len(rows)
    return output.addmm_(probabilities[:, start:], head.values_16[kept[start:] - first].float())


def _check_pages(packed: PackedLayer, pages: PageCodes, *, num_new: int, page_size: int) -> None:
    check_size("page_size", page_size, 1)
    num_heads, head_dim = len(packed.heads), packed.layout.head_dim
    most = max(head.counts.num_tokens for head in packed.heads) + num_new
    shape = pages.highest.shape
    fits = len(shape) == 3 and (shape[0], shape[2]) == (num_heads, head_dim) and pages.lowest.shape == shape
    if not fits or {pages.low.shape, pages.step.shape} != {(num_heads, head_dim)}:
        raise ValueError(
            f"page extremes {tuple(shape)} and {tuple(pages.lowest.shape)} must both be "
            f"[{num_heads}, pages, {head_dim}], their ranges {tuple(pages.low.shape)} and "
            f"{tuple(pages.step.shape)} without pages"
        )
    if shape[1] < num_pages(most, page_size):
        raise ValueError(f"{most} tokens need {num_pages(most, page_size)} pages; there are {shape[1]}")
