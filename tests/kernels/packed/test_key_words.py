"""K words lie as the module documents, read here bit by bit, and come back whole."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kvtest.packed import GROUP_BOUNDARIES, group_of

from kvferry.kernels.packed.key_words import (
    BLOCK_TOKENS,
    GROUP_TOKENS,
    LANES,
    WIDTHS,
    block_runs,
    groups_of,
    groups_of_block,
    key_code_bytes,
    key_tiles,
    num_groups,
    pack_key_words,
)

COUNTS = st.tuples(*[st.integers(0, 4)] * 4)
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 255, 256, 300]))


def make_codes(counts, num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    coded = [
        torch.randint(0, 2**w, (c, num_tokens), generator=generator).to(torch.uint8)
        for w, c in zip(WIDTHS[:3], counts[:3], strict=True)
    ]
    return [*coded, torch.randn(counts[3], num_tokens, generator=generator).half()]


def read_code(words, counts, num_tokens, width_index, channel, token):
    """One code by the formula of the module's docstring, from the 16-bit words; its bits for width 16."""
    word_bytes = words.tolist()
    full, rest = divmod(num_tokens, BLOCK_TOKENS)
    block, inside = divmod(token, BLOCK_TOKENS)
    lanes = LANES if block < full else -(-rest // 8)
    block_words = sum(c * w // 2 for c, w in zip(counts, WIDTHS, strict=True))  # times lanes
    start = block * block_words * LANES
    start += lanes * sum(counts[i] * WIDTHS[i] // 2 for i in range(width_index))
    width = WIDTHS[width_index]
    start += channel * lanes * width // 2
    per_word = 16 // width
    row, r = divmod(inside, lanes)
    j, f = divmod(row, per_word)
    index = start + j * lanes + r
    word = word_bytes[2 * index] | word_bytes[2 * index + 1] << 8
    return word >> (f * width) & ((1 << width) - 1)


@pytest.mark.parametrize("num_tokens", [1, 7, 9, 128, 141])
def test_words_lie_as_documented(num_tokens):
    counts = (3, 2, 1, 2)
    codes = make_codes(counts, num_tokens)
    words = pack_key_words(codes, num_tokens)
    assert words.numel() == key_code_bytes(counts, num_tokens)
    bits = [*codes[:3], codes[3].view(torch.int16).int() & 0xFFFF]
    for i, rows in enumerate(bits):
        for channel, row in enumerate(rows.tolist()):
            read = [read_code(words, counts, num_tokens, i, channel, t) for t in range(num_tokens)]
            assert read == row


@given(counts=COUNTS, num_tokens=LENGTHS, max_blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_codes_come_back_tile_by_tile(counts, num_tokens, max_blocks, seed):
    codes = make_codes(counts, num_tokens, seed)
    words = pack_key_words(codes, num_tokens)
    expected = torch.cat([part.float() for part in codes])
    tiles = list(key_tiles(words, counts, num_tokens, max_blocks=max_blocks))
    sizes = [tile.shape[1] for _, tile in tiles]
    assert [start for start, _ in tiles] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert max(sizes) <= max_blocks * BLOCK_TOKENS
    assert torch.equal(torch.cat([tile for _, tile in tiles], dim=1), expected)


@given(num_tokens=st.integers(0, 2000))
def test_padding_is_less_than_eight_tokens(num_tokens):
    covered = sum(blocks * 8 * lanes for blocks, lanes in block_runs(num_tokens))
    assert num_tokens <= covered < num_tokens + 8
    assert key_code_bytes((1, 0, 0, 0), num_tokens) * 8 == covered * 2


def test_no_channels_and_no_tokens_take_no_bytes():
    assert pack_key_words(make_codes((0, 0, 0, 0), 9), 9).numel() == 0
    assert pack_key_words(make_codes((1, 1, 1, 1), 0), 0).numel() == 0


@given(num_tokens=st.integers(0, 1000))
@example(num_tokens=64)
@example(num_tokens=65)
@example(num_tokens=193)
def test_groups_are_halves_of_blocks(num_tokens):
    every = torch.arange(num_tokens)
    groups = groups_of(every, num_tokens).tolist()
    assert groups == [group_of(token, num_tokens) for token in range(num_tokens)]
    assert sorted(set(groups)) == list(range(num_groups(num_tokens)))
    assert num_groups(num_tokens) == -(-num_tokens // 64)
    assert num_groups(num_tokens) == sum(n * groups_of_block(lanes) for n, lanes in block_runs(num_tokens))
    sizes = [groups.count(group) for group in range(num_groups(num_tokens))]
    assert max(sizes, default=0) <= GROUP_TOKENS == 64
    some = every[::7]
    assert torch.equal(groups_of(some, num_tokens), groups_of(every, num_tokens)[some])


def test_groups_of_some_lengths():
    sizes = {
        length: groups_of(torch.arange(length), length).bincount().tolist() for length in GROUP_BOUNDARIES
    }
    assert sizes == {
        1: [1], 8: [8], 9: [9], 63: [63], 64: [64], 65: [36, 29], 72: [36, 36], 127: [64, 63], 128: [64, 64],
        129: [64, 64, 1], 191: [64, 64, 63], 192: [64, 64, 64], 193: [64, 64, 36, 29],
        256: [64, 64, 64, 64], 300: [64, 64, 64, 64, 44],
    }  # fmt: skip
