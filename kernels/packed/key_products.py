"""Plans the products of queries with one head's K codes as tiles, for the torch path of `trizone`.

`key_words.py` defines the order of the codes. Codes below 16 bits become float32 in that order: the few
products are reordered, not the codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.packed.key_words import BLOCK_TOKENS, WIDTHS, key_blocks
from kvferry.kernels.packed.tiles import Tiles, field_scales, scratch, tile_rows

Blocks = tuple[Tensor, int]
"""Some neighbouring blocks, uint8 `[num_blocks, block bytes]`, and their R."""


def padded_tokens(num_tokens: int) -> int:
    """Tokens, padding included; `plan_key_products` computes products for padding too."""
    return -(-num_tokens // 8) * 8


def plan_key_products(
    tiles: Tiles,
    words: Tensor,
    num_channels: Sequence[int],
    num_tokens: int,
    *,
    weights: Tensor,
    bias: Tensor,
    products: Tensor,
) -> None:
    """Plan `products = weights @ codes + bias` of one head.

    Args:
        words, num_channels, num_tokens: as `key_words.key_tiles`.
        weights: float32 `[G, c]`, channels in their packed order; bias float32 `[G, 1]`: read at each run.
        products: float32 `[G, padded_tokens]`, out; undefined for padding.
    """
    if not any(num_channels):
        if num_tokens:
            tiles.reserve(0)
            empty = tiles.floats(0, num_tokens)
            tiles.then(torch.addmm, bias, weights, empty, out=products[:, :num_tokens])
        return
    start = 0
    for run in _runs(words, num_channels, num_tokens):
        run_tokens = 0
        for blocks, lanes in run:
            run_tokens += len(blocks) * 8 * lanes
        tiles.reserve(sum(num_channels) * run_tokens)
        target = products[:, start : start + run_tokens]
        addend, byte, channel = bias, 0, 0
        for width, count in zip(WIDTHS, num_channels, strict=True):
            if count:
                segments = [
                    (blocks[:, byte * lanes : (byte + count * width) * lanes], lanes) for blocks, lanes in run
                ]
                of_width = weights[:, channel : channel + count]
                plan = _plan_halves if width == 16 else _plan_fields
                plan(tiles, segments, width, of_width, addend, target)
                addend = target
            byte += count * width
            channel += count
        start += run_tokens


def _runs(words: Tensor, num_channels: Sequence[int], num_tokens: int) -> list[list[Blocks]]:
    """A head's blocks in runs that fit into a tile."""
    left = max_blocks = tile_rows(BLOCK_TOKENS * sum(num_channels))
    runs: list[list[Blocks]] = [[]]
    for group, lanes in key_blocks(words, num_channels, num_tokens):
        blocks = group
        while len(blocks):
            if not left:
                runs.append([])
                left = max_blocks
            runs[-1].append((blocks[:left], lanes))
            blocks, left = blocks[left:], left - len(blocks[:left])
    return runs if runs[0] else []


def _plan_fields(
    tiles: Tiles, segments: Sequence[Blocks], width: int, weights: Tensor, addend: Tensor, target: Tensor
) -> None:
    """One width below 16 bits. Args: segments: its bytes of each block; others as `_plan_halves`."""
    (group_size, count), per_byte, start = weights.shape, 8 // width, 0
    scales = field_scales(width, weights.device)
    for blocks, lanes in segments:
        num_blocks, row = len(blocks), width * lanes
        fields = tiles.fields(blocks.view(num_blocks, count, row), width)
        products = scratch("products", (per_byte * num_blocks, group_size, row), weights.device)
        # [fields of a byte, blocks, G, w / 2, R, bytes of a word]
        ordered = products.view(per_byte, num_blocks, group_size, width // 2, lanes, 2).permute(
            2, 1, 3, 5, 0, 4
        )
        part = target[:, start : start + num_blocks * 8 * lanes].view(ordered.shape)
        base = part if addend is target else addend.view(-1, *[1] * 5)
        of_fields = weights.expand(per_byte * num_blocks, -1, -1)
        tiles.then(torch.bmm, of_fields, fields.flatten(0, 1), out=products)
        tiles.then(torch.addcmul, base, ordered, scales, out=part)
        start += num_blocks * 8 * lanes


def _plan_halves(
    tiles: Tiles, segments: Sequence[Blocks], width: int, weights: Tensor, addend: Tensor, target: Tensor
) -> None:
    """16 bits, which are in the tokens' order.

    Args: segments: their bytes of each block; weights `[G, c_w]`; addend: added to the products, the target
        itself or one column; target `[G, tokens of the blocks]`, out.
    """
    count, start = weights.shape[1], 0
    floats = tiles.floats(count, target.shape[1])
    for blocks, lanes in segments:
        halves = blocks.view(torch.float16).view(len(blocks), count, 8 * lanes)
        stop = start + len(blocks) * 8 * lanes
        tiles.convert(halves.transpose(0, 1), floats[:, start:stop].view(count, len(blocks), 8 * lanes))
        start = stop
    tiles.then(torch.addmm, addend, weights, floats, out=target)
