"""Plans the products of queries with one head's K as tiles, for the torch path of `trizone`.

`key_words.py` defines the order of the codes. Codes below 16 bits become float32 in that order and are
multiplied by the queries times their group's scales: the few products are reordered, not the codes. A block's
codes are multiplied by the queries of both of its groups; each product belongs to one group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed.key_words import BLOCK_TOKENS, WIDTHS, key_blocks, num_groups
from kvferry.kernels.packed.tiles import Tiles, field_scales, scratch, tile_rows

Blocks = tuple[Tensor, int]
"""Some neighbouring blocks, uint8 `[num_blocks, block bytes]`, and their R."""


def padded_tokens(num_tokens: int) -> int:
    """Count tokens including padding; `plan_key_products` computes products for padding too."""
    return -(-num_tokens // 8) * 8


def plan_key_products(
    tiles: Tiles,
    words: Tensor,
    num_channels: Sequence[int],
    num_tokens: int,
    *,
    scales: Tensor,
    minima: Tensor,
    queries: Tensor,
    products: Tensor,
) -> None:
    """Plan `products = queries @ K` of one head, K being `s code + min` of each channel and group.

    Args:
        words, num_channels, num_tokens: as `key_words.key_tiles`.
        scales, minima: float16 `[groups, c]`, of the channels below 16 bits.
        queries: float32 `[G, c]`, channels in their packed order: read at each run.
        products: float32 `[G, padded_tokens]`, out; undefined for padding.
    """
    if not any(num_channels):
        if num_tokens:
            tiles.reserve(0)
            empty = tiles.floats(0, num_tokens)
            tiles.then(torch.mm, queries, empty, out=products[:, :num_tokens])
        return
    start = group = 0
    for run in _runs(words, num_channels, num_tokens):
        run_tokens = sum(len(blocks) * 8 * lanes for blocks, lanes in run)
        last = group + sum(len(blocks) * _groups_of_block(lanes) for blocks, lanes in run)
        tiles.reserve(sum(num_channels) * run_tokens + 2 * (last - group) * scales.shape[1])
        target = products[:, start : start + run_tokens]
        weights, addend = _plan_headers(tiles, scales[group:last], minima[group:last], queries)
        byte, channel = 0, 0
        for width, count in zip(WIDTHS, num_channels, strict=True):
            of_width = slice(channel, channel + count)
            if count:
                segments = [
                    (blocks[:, byte * lanes : (byte + count * width) * lanes], lanes) for blocks, lanes in run
                ]
                if width < 16:
                    _plan_fields(tiles, segments, width, weights[..., of_width], addend, target)
                else:
                    _plan_halves(tiles, segments, queries[:, of_width], addend, target)
                addend = target
            byte += count * width
            channel += count
        start, group = start + run_tokens, last


def _groups_of_block(lanes: int) -> int:
    """Count the groups of a block, whether or not its last lane has padding."""
    return num_groups(8 * lanes)


def _runs(words: Tensor, num_channels: Sequence[int], num_tokens: int) -> list[list[Blocks]]:
    """Divide a head's blocks into runs that fit into a tile with their scales and minima."""
    headers = 2 * num_groups(BLOCK_TOKENS) * sum(num_channels[:3])
    left = max_blocks = tile_rows(BLOCK_TOKENS * sum(num_channels) + headers)
    runs: list[list[Blocks]] = [[]]
    for of_lanes, lanes in key_blocks(words, num_channels, num_tokens):
        blocks = of_lanes
        while len(blocks):
            if not left:
                runs.append([])
                left = max_blocks
            runs[-1].append((blocks[:left], lanes))
            blocks, left = blocks[left:], left - len(blocks[:left])
    return runs if runs[0] else []


def _plan_headers(tiles: Tiles, scales: Tensor, minima: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Plan the products of a run's scales and minima with the queries.

    Returns: float32 `[groups, G, c]`, the queries times each group's scales; `[G, groups]`, what its minima
        add to the products of its tokens.
    """
    (groups, coded), group_size = scales.shape, len(queries)
    weights = scratch("weighted queries", (groups, group_size, coded), queries.device)
    sums = scratch("sums of minima", (group_size, groups), queries.device)
    of_scales, of_minima = tiles.floats(groups, coded), tiles.floats(groups, coded)
    tiles.convert(scales, of_scales)
    tiles.convert(minima, of_minima)
    tiles.then(torch.mul, queries[:, :coded], of_scales[:, None], out=weights)
    tiles.then(torch.mm, queries[:, :coded], of_minima.T, out=sums)
    return weights, sums


def _plan_fields(
    tiles: Tiles, segments: Sequence[Blocks], width: int, weights: Tensor, addend: Tensor, target: Tensor
) -> None:
    """Plan the products of one width below 16 bits.

    Args: segments: its bytes of each block; weights `[groups, G, c_w]`; addend: added to the products, the
        target itself or a number for each group `[G, groups]`; target `[G, tokens of the blocks]`, out.
    """
    (_, group_size, count), per_byte, start, group = weights.shape, 8 // width, 0, 0
    scales = field_scales(width, weights.device)
    for blocks, lanes in segments:
        num_blocks, row, halves = len(blocks), width * lanes, _groups_of_block(lanes)
        fields = tiles.fields(blocks.view(num_blocks, count, row), width)
        products = scratch("products", (per_byte, num_blocks, halves * group_size, row), weights.device)
        last = group + num_blocks * halves
        of_blocks = weights[group:last].view(num_blocks, halves * group_size, count)
        for codes, out in zip(fields.unbind(), products.unbind(), strict=True):
            tiles.then(torch.bmm, of_blocks, codes, out=out)
        # [fields of a byte, blocks, groups, G, w / 2, R, bytes of a word]; each group has its own rows: at
        # width 2 the words' low or high bytes, at others the first or second half of the words
        if width == 2:
            parts = products.view(per_byte, num_blocks, halves, group_size, 1, lanes, halves, 2 // halves)
            of_groups = parts.diagonal(0, 2, 6)
        else:
            words = width // 2 // halves
            parts = products.view(per_byte, num_blocks, halves, group_size, halves, words, lanes, 2)
            of_groups = parts.diagonal(0, 2, 4)
        # [G, blocks, groups, words, bytes of a word, fields of a byte, R]
        ordered = of_groups.permute(2, 1, 6, 3, 5, 0, 4)
        part = target[:, start : start + num_blocks * 8 * lanes].view(ordered.shape)
        base = part
        if addend is not target:
            base = addend[:, group:last].view(group_size, num_blocks, halves, 1, 1, 1, 1)
        tiles.then(torch.addcmul, base, ordered, scales, out=part)
        start, group = start + num_blocks * 8 * lanes, last


def _plan_halves(
    tiles: Tiles, segments: Sequence[Blocks], queries: Tensor, addend: Tensor, target: Tensor
) -> None:
    """Plan the products of 16 bits, which are in the tokens' order. Args: queries `[G, c_w]`; others as
    `_plan_fields`."""
    count, start = queries.shape[1], 0
    floats = tiles.floats(count, target.shape[1])
    for blocks, lanes in segments:
        halves = blocks.view(torch.float16).view(len(blocks), count, 8 * lanes)
        stop = start + len(blocks) * 8 * lanes
        tiles.convert(halves.transpose(0, 1), floats[:, start:stop].view(count, len(blocks), 8 * lanes))
        start = stop
    if addend is target:
        tiles.then(torch.addmm, target, queries, floats, out=target)
    else:
        # no channel has minima
        tiles.then(torch.mm, queries, floats, out=target)
