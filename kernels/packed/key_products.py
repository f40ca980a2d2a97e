"""Products of queries with one head's K codes, tile by tile; the codes stay in the order in which they lie.

The torch path of `trizone` calls it at every step. `key_words.py` says how the codes lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.packed.key_words import BLOCK_TOKENS, WIDTHS, block_groups
from kvferry.kernels.packed.tiles import as_floats, field_floats, field_scales, tile_rows


@dataclass(frozen=True, kw_only=True)
class KeyTile:
    """Views of some neighbouring blocks' words.

    Attributes:
        start, stop: tokens, those of padding left out.
        lanes: R of these blocks.
        parts: of each width that has channels: the width, its first channel in packed order, and its bytes
            `[blocks, c_w, w R]`, or its float16 values `[blocks, c_16, 8 R]`.
    """

    start: int
    stop: int
    lanes: int
    parts: tuple[tuple[int, int, Tensor], ...]


def view_key_tiles(words: Tensor, num_channels: Sequence[int], num_tokens: int) -> tuple[KeyTile, ...]:
    """One head's words as tiles of at most `TILE_ELEMENTS` codes, or of one block. Args: as `key_tiles`."""
    tiles, start, byte = [], 0, 0
    block_bits = sum(w * c for w, c in zip(WIDTHS, num_channels, strict=True))
    max_blocks = tile_rows(BLOCK_TOKENS * sum(num_channels))
    for num_blocks, lanes in block_groups(num_tokens):
        blocks = words[byte : byte + num_blocks * lanes * block_bits].view(num_blocks, lanes * block_bits)
        byte += num_blocks * lanes * block_bits
        for tile in torch.split(blocks, max_blocks):
            stop = min(start + len(tile) * 8 * lanes, num_tokens)
            parts = tuple(_view_parts(tile, num_channels, lanes))
            tiles.append(KeyTile(start=start, stop=stop, lanes=lanes, parts=parts))
            start = stop
    return tuple(tiles)


def _view_parts(blocks: Tensor, num_channels: Sequence[int], lanes: int) -> Iterator[tuple[int, int, Tensor]]:
    """`KeyTile.parts` of blocks uint8 `[num_blocks, block bytes]`."""
    byte, channel = 0, 0
    for width, count in zip(WIDTHS, num_channels, strict=True):
        segment = blocks[:, byte : byte + count * width * lanes]
        if count and width == 16:
            yield width, channel, segment.view(torch.float16).view(len(blocks), count, 8 * lanes)
        elif count:
            yield width, channel, segment.view(len(blocks), count, width * lanes)
        byte += count * width * lanes
        channel += count


def write_key_products(weights: Tensor, tiles: Sequence[KeyTile], bias: Tensor, products: Tensor) -> None:
    """`weights @ codes + bias` of one head, a tile at a time.

    Codes become float32 in the order in which they lie: it is the few products that are put into the tokens'
    order, not the codes.

    Args: weights float32 `[G, c]`, channels in their packed order; bias float32 `[G, 1]`; products float32
        `[G, n]`, out.
    """
    wide_bias = bias.view(-1, 1, 1, 1, 1, 1)
    for tile in tiles:
        num_tokens = tile.stop - tile.start
        target = products[:, tile.start : tile.stop]
        if not tile.parts:
            target.copy_(bias)
        for i, (width, channel, words) in enumerate(tile.parts):
            num_blocks, count, _ = words.shape
            lying = _part_products(weights[:, channel : channel + count], words, width, tile.lanes)
            if num_blocks * 8 * tile.lanes > num_tokens:
                if width < 8:
                    lying = lying * field_scales(width, words.device)
                torch.add(lying.flatten(1)[:, :num_tokens], target if i else bias, out=target)
                continue
            wide = target.view(lying.shape)
            if width < 8:
                scales = field_scales(width, words.device)
                torch.addcmul(wide if i else wide_bias, lying, scales, out=wide)
            else:
                torch.add(lying, wide if i else wide_bias, out=wide)


def _part_products(weights: Tensor, words: Tensor, width: int, lanes: int) -> Tensor:
    """Products of one width in the tokens' order, of which their memory has another; of 2 and 4 bits to be
    multiplied by `field_scales`.

    Returns: float32 `[G, blocks, w / 2, bytes of a word, fields of a byte, R]`; of 16 bits with its halves in
        the last dimension alone.
    """
    num_blocks, count, row = words.shape
    group_size, per_byte = weights.shape[0], max(8 // width, 1)
    floats = as_floats(words) if width >= 8 else field_floats(words, width).view(-1, count, row)
    products = torch.bmm(weights.expand(per_byte * num_blocks, -1, -1), floats)
    if width == 16:
        return products.view(num_blocks, group_size, 1, 1, 1, row).transpose(0, 1)
    lying = products.view(per_byte, num_blocks, group_size, width // 2, lanes, 2)
    return lying.permute(2, 1, 3, 5, 0, 4)
