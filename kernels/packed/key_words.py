"""K codes as bytes: channels sorted by width, packed along tokens in 16-bit words, block by block.

One head's n tokens are cut into blocks of `BLOCK_TOKENS` = 8 R tokens, R = `LANES` = 16; the rest is one
shorter block with R = ceil(rest / 8), so that padding is at most 7 tokens. In a block the channels follow one
another in their packed order, widths 2, 4, 8, 16; a channel of width w takes R w / 2 words, and with F = 16 /
w fields a word

    token (j F + f) R + r  of the block lies in  word j R + r  of the channel,  bits f w .. (f + 1) w - 1

for j < w / 2, f < F, r < R. Words are little-endian: fields 0 .. F/2 - 1 are the low byte. A width of 16 is
the float16 value itself. Padding tokens are written as zeros; readers ignore them.

Codes below 16 bits have a scale and a minimum for each channel and *group* of tokens. A block has eight rows
i = j F + f of R tokens; rows 0 .. 3 are one group and rows 4 .. 7 another, and the rest is a single one if it
has at most `GROUP_TOKENS` = 64 tokens. So there are ceil(n / 64) groups, and row i of block b is in group

    min(2 b + floor(i / 4), ceil(n / 64) - 1)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

WIDTHS = (2, 4, 8, 16)
LANES = 16
BLOCK_TOKENS = 8 * LANES
GROUP_TOKENS = BLOCK_TOKENS // 2


def block_runs(num_tokens: int) -> list[tuple[int, int]]:
    """List runs of equal blocks as (number of blocks, R): the full ones, if any, then the short one, if
    any."""
    full, rest = divmod(num_tokens, BLOCK_TOKENS)
    runs = [(full, LANES)] if full else []
    return [*runs, (1, -(-rest // 8))] if rest else runs


def num_groups(num_tokens: int) -> int:
    return -(-num_tokens // GROUP_TOKENS)


def groups_of_block(lanes: int) -> int:
    """Count the groups of a block of R = lanes; of two, each has 4 R tokens, padding included."""
    return num_groups(8 * lanes)


def groups_of(tokens: Tensor, num_tokens: int) -> Tensor:
    """Return the group of each token. Args: tokens int64, below `num_tokens`. Returns: int64."""
    full, rest = divmod(num_tokens, BLOCK_TOKENS)
    block = tokens // BLOCK_TOKENS
    row = tokens % BLOCK_TOKENS // torch.where(block < full, LANES, -(-rest // 8))
    return (2 * block + row // 4).clamp(max=num_groups(num_tokens) - 1)


def key_code_bytes(num_channels: Sequence[int], num_tokens: int) -> int:
    """Count the bytes of one head's K words. Args: num_channels: of each width in `WIDTHS`."""
    two, four, eight, sixteen = num_channels
    return -(-num_tokens // 8) * (2 * two + 4 * four + 8 * eight + 16 * sixteen)


def key_blocks(words: Tensor, num_channels: Sequence[int], num_tokens: int) -> list[tuple[Tensor, int]]:
    """View one head's words as runs of equal blocks: uint8 `[num_blocks, block bytes]`, and their R."""
    lane_bytes = key_code_bytes(num_channels, 8)
    runs, byte = [], 0
    for num_blocks, lanes in block_runs(num_tokens):
        size = num_blocks * lanes * lane_bytes
        runs.append((words[byte : byte + size].view(num_blocks, lanes * lane_bytes), lanes))
        byte += size
    return runs


def pack_key_words(codes: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Pack one head's K words.

    Args: codes: for each width in `WIDTHS`, `[c_w, n]`: uint8 codes, and float16 values for 16.
    Returns: uint8 `[key_code_bytes]`.
    """
    pieces, start = [], 0
    for num_blocks, lanes in block_runs(num_tokens):
        covered = num_blocks * 8 * lanes
        stop = min(start + covered, num_tokens)
        segments = []
        for width, rows in zip(WIDTHS, codes, strict=True):
            padded = rows.new_zeros(rows.shape[0], covered)
            padded[:, : stop - start] = rows[:, start:stop]
            segments.append(_pack_width(padded, width, num_blocks, lanes))
        pieces.append(torch.cat(segments, dim=1).flatten())
        start = stop
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.uint8, device=codes[0].device)


def key_tiles(
    words: Tensor, num_channels: Sequence[int], num_tokens: int, *, max_blocks: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield one head's codes, at most `max_blocks` blocks at a time.

    Args: words uint8 `[key_code_bytes]`.
    Yields: the tile's first token, and float32 `[c, tokens of the tile]` as `unpack_key_blocks` gives them,
        without padding tokens.
    """
    start = 0
    for blocks, lanes in key_blocks(words, num_channels, num_tokens):
        for tile in torch.split(blocks, max_blocks):
            codes = unpack_key_blocks(tile, num_channels, lanes)
            yield start, codes[:, : num_tokens - start]
            start += codes.shape[1]


def gather_key_codes(words: Tensor, num_channels: Sequence[int], num_tokens: int, tokens: Tensor) -> Tensor:
    """Gather some tokens' codes; only the words that contain them are read.

    Args: words uint8 `[key_code_bytes]`; tokens int64 `[k]`, ascending.
    Returns: float32 `[c, k]`, channels in their packed order; 16-bit channels come as their values.
    """
    # a head that keeps nothing has no blocks
    gathered, start = [torch.zeros(sum(num_channels), 0, device=words.device)], 0
    for blocks, lanes in key_blocks(words, num_channels, num_tokens):
        stop = start + len(blocks) * 8 * lanes
        inside = tokens[(tokens >= start) & (tokens < stop)] - start
        gathered.append(_gather_from_blocks(blocks, num_channels, lanes, inside))
        start = stop
    return torch.cat(gathered, dim=1)


def _gather_from_blocks(blocks: Tensor, num_channels: Sequence[int], lanes: int, tokens: Tensor) -> Tensor:
    """Gather codes. Args: blocks uint8 `[num_blocks, block bytes]`; tokens counted from the blocks' first."""
    block, within = tokens // (8 * lanes), tokens % (8 * lanes)
    codes = torch.empty(sum(num_channels), len(tokens), dtype=torch.float32, device=blocks.device)
    byte, channel = 0, 0
    for width, count in zip(WIDTHS, num_channels, strict=True):
        fields = 16 // width
        word = within // (fields * lanes) * lanes + within % lanes
        shift = within // lanes % fields * width
        segment = blocks[:, byte : byte + count * width * lanes]
        byte += count * width * lanes
        if count == 0:
            continue
        if width == 16:
            found = segment.view(torch.float16).view(len(blocks), count, -1)[block, :, word].float()
        else:
            octets = segment.view(torch.int16).view(len(blocks), count, -1)[block, :, word].int()
            found = ((octets >> shift[:, None]) & ((1 << width) - 1)).float()
        codes[channel : channel + count] = found.T
        channel += count
    return codes


def half_tiles(
    words: Tensor, num_channels: Sequence[int], num_tokens: int, *, max_blocks: int
) -> Iterator[Tensor]:
    """Yield only the 16-bit channels of `key_tiles`: float32 `[c_16, tokens of the tile]`, without
    padding."""
    count, start = num_channels[3], 0
    for blocks, lanes in key_blocks(words, num_channels, num_tokens) if count else ():
        for tile in torch.split(blocks[:, blocks.shape[1] - 16 * count * lanes :], max_blocks):
            halves = unpack_key_blocks(tile, (0, 0, 0, count), lanes)
            yield halves[:, : num_tokens - start]
            start += halves.shape[1]


def unpack_key_blocks(blocks: Tensor, num_channels: Sequence[int], lanes: int) -> Tensor:
    """Unpack some blocks' codes to float32, channels in packed order; 16-bit channels come as their values.

    Args: blocks uint8 `[num_blocks, block bytes]`, all of R = lanes.
    Returns: float32 `[c, num_blocks * 8 R]`, the last block's padding tokens included.
    """
    num_blocks = blocks.shape[0]
    codes = torch.empty(sum(num_channels), num_blocks * 8 * lanes, dtype=torch.float32, device=blocks.device)
    byte, channel = 0, 0
    for width, count in zip(WIDTHS, num_channels, strict=True):
        if count == 0:
            continue
        segment = blocks[:, byte : byte + count * width * lanes]
        target = codes[channel : channel + count]
        if width == 16:
            halves = segment.view(torch.float16).view(num_blocks, count, 8, lanes)
            target.view(count, num_blocks, 8, lanes).copy_(halves.permute(1, 0, 2, 3))
        else:
            per_byte = 8 // width
            octets = segment.view(num_blocks, count, width // 2, lanes, 2).permute(1, 0, 2, 4, 3)
            fields = target.view(count, num_blocks, width // 2, 2, per_byte, lanes)
            for p in range(per_byte):
                fields[:, :, :, :, p].copy_((octets >> (width * p)) & ((1 << width) - 1))
        byte += count * width * lanes
        channel += count
    return codes


def _pack_width(rows: Tensor, width: int, num_blocks: int, lanes: int) -> Tensor:
    """Pack one width: `[c, num_blocks * 8 R]` -> uint8 `[num_blocks, c * width * R]`."""
    count = rows.shape[0]
    if width == 16:
        halves = rows.view(count, num_blocks, 8, lanes).permute(1, 0, 2, 3).contiguous()
        return halves.view(torch.uint8).view(num_blocks, count * width * lanes)
    per_byte = 8 // width
    fields = rows.view(count, num_blocks, width // 2, 2, per_byte, lanes)
    octets = torch.zeros_like(fields[:, :, :, :, 0])
    for p in range(per_byte):
        octets |= fields[:, :, :, :, p] << (width * p)
    return octets.permute(1, 0, 2, 4, 3).reshape(num_blocks, count * width * lanes)
