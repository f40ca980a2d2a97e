"""Hybrid sparse attention over packed K and V: RDKV's storage with the traffic of RocketKV's second stage.

A packed layer's tokens are stored in packed order, head by head, and each head has its own number of them;
new tokens follow as rows. Pages run over both. The receiver builds the page extremes from the packed keys;
the decode engine appends one row and attends once per layer and step: the extremes choose the tokens
(`kernels/hsa`), and only those tokens' codes are read. Heads are ragged, so each is handled by itself.

Legend, beside that of `kernels`: n_h packed tokens of head h, P page_size, k1 num_channels, k2 num_tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_attention, check_size, path_for
from kvferry.kernels.hsa import num_pages
from kvferry.kernels.hsa.torch_path import ChannelRows, rank_channels, select_tokens, update_page_extremes
from kvferry.kernels.packed.key_words import gather_key_codes, key_tiles
from kvferry.kernels.packed.layer import PackedHead, PackedLayer
from kvferry.kernels.packed.value_rows import add_value_products

TILE_BLOCKS = 8


def page_extremes(packed: PackedLayer, page_max: Tensor, page_min: Tensor, *, page_size: int) -> None:
    """Write the extremes of each head's keys, page by page, as attention reads them: after dequantisation.

    Args:
        page_max, page_min: out, floating `[H_kv, pages, D]`, pages >= ceil(n_h / P) for every head.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check_pages(packed, page_max, page_min, num_new=0, page_size=page_size)
    for h, head in enumerate(packed.heads):
        pages = num_pages(head.counts.num_tokens, page_size)
        # channels that were dropped are zero in every key
        page_max[h, :pages] = 0
        page_min[h, :pages] = 0
        channels = head.channels.long()
        highest = torch.full((len(channels), pages), -torch.inf, device=page_max.device)
        lowest = torch.full_like(highest, torch.inf)
        tiles = key_tiles(
            head.key_words, head.counts.channels, head.counts.num_tokens, max_blocks=TILE_BLOCKS
        )
        for start, codes in tiles:
            keys = _dequantised(head, codes)
            page = (torch.arange(codes.shape[1], device=codes.device) + start) // page_size
            index = page.expand(len(channels), -1)
            highest.scatter_reduce_(1, index, keys, "amax")
            lowest.scatter_reduce_(1, index, keys, "amin")
        page_max[h, :pages, channels] = highest.T.to(page_max.dtype)
        page_min[h, :pages, channels] = lowest.T.to(page_min.dtype)


def append_key(
    packed: PackedLayer, page_max: Tensor, page_min: Tensor, key: Tensor, *, num_new: int, page_size: int
) -> None:
    """Fold one new token's key into its page of each head, in place.

    Args:
        page_max, page_min: `[H_kv, pages, D]`, valid for n_h + num_new tokens.
        key: `[H_kv, D]`.
        num_new: new rows before this one.

    Raises:
        ValueError: shapes do not fit together, or the pages are full.
    """
    _check_pages(packed, page_max, page_min, num_new=num_new + 1, page_size=page_size)
    if key.shape != (page_max.shape[0], page_max.shape[2]):
        raise ValueError(f"key {tuple(key.shape)} must be [H_kv, D] of pages {tuple(page_max.shape)}")
    for h, head in enumerate(packed.heads):
        update_page_extremes(
            page_max[h : h + 1],
            page_min[h : h + 1],
            key[h : h + 1],
            position=head.counts.num_tokens + num_new,
            page_size=page_size,
        )


def attend(
    queries: Tensor,
    packed: PackedLayer,
    new_keys: Tensor,
    new_values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """`hsa.attend` over each head's packed tokens, dequantised, followed by the new rows.

    Args: as in `kernels`; m >= 1, the newest row last.
        page_max, page_min: `[H_kv, pages, D]`, valid for n_h + m tokens.
        num_channels: k1, 1 to D.
    """
    _check_pages(packed, page_max, page_min, num_new=new_keys.shape[1], page_size=page_size)
    check_attention(queries, new_keys, new_values, prefix="new_", rows="m")
    check_size("num_channels", num_channels, 1, queries.shape[2])
    check_size("num_tokens", num_tokens, 1)
    if (queries.shape[0], queries.shape[2]) != (page_max.shape[0], page_max.shape[2]):
        raise ValueError(
            f"queries {tuple(queries.shape)} must be [H_kv, G, D] of pages {tuple(page_max.shape)}"
        )
    path_for("packed_hsa", queries.device)
    output = torch.empty_like(queries)
    ranked = rank_channels(queries, num_channels=num_channels, scaling=scaling)
    for h, head in enumerate(packed.heads):
        length = head.counts.num_tokens + new_keys.shape[1]
        if length <= num_tokens:
            chosen = torch.arange(length, device=queries.device)
        else:
            extremes = page_max[h : h + 1], page_min[h : h + 1]
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
    """Attention of one head's queries float32 `[G, D]`, already scaled, to chosen tokens, int64 ascending:
    float32 `[G, D]`."""
    num_kept = head.counts.num_tokens
    kept, new = chosen[chosen < num_kept], chosen[chosen >= num_kept] - num_kept
    coded = sum(head.counts.channels[:3])
    permuted = queries[:, head.channels.long()]
    bias = permuted[:, :coded] @ head.key_minima.float()
    permuted[:, :coded] *= head.key_scales.float()
    codes = gather_key_codes(head.key_words, head.counts.channels, num_kept, kept)
    logits = torch.cat([permuted @ codes + bias[:, None], queries @ new_keys[new].float().T], dim=1)
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


def _dequantised(head: PackedHead, codes: Tensor) -> Tensor:
    """Keys of some tokens, float32 `[c, tokens]`; overwrites their codes."""
    coded = sum(head.counts.channels[:3])
    codes[:coded] = codes[:coded] * head.key_scales[:, None] + head.key_minima[:, None]
    return codes


def _check_pages(
    packed: PackedLayer, page_max: Tensor, page_min: Tensor, *, num_new: int, page_size: int
) -> None:
    check_size("page_size", page_size, 1)
    most = max(head.counts.num_tokens for head in packed.heads) + num_new
    fits = page_max.ndim == 3 and page_max.shape[0] == len(packed.heads)
    if not fits or page_max.shape != page_min.shape or page_max.shape[2] != packed.layout.head_dim:
        raise ValueError(
            f"page extremes {tuple(page_max.shape)} and {tuple(page_min.shape)} must both be "
            f"[{len(packed.heads)}, pages, {packed.layout.head_dim}]"
        )
    if page_max.shape[1] < num_pages(most, page_size):
        raise ValueError(
            f"{most} tokens need {num_pages(most, page_size)} pages; there are {page_max.shape[1]}"
        )
