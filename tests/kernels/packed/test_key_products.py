"""Products with packed K are those of dequantised keys, whatever the widths, the tokens and the tiles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.packed import GROUP_BOUNDARIES, group_of

from kvferry.kernels.packed import tiles
from kvferry.kernels.packed.key_products import padded_tokens, plan_key_products
from kvferry.kernels.packed.key_words import WIDTHS, pack_key_words


def make(counts, num_tokens, seed):
    """Words, scales and minima `[groups, c]`, and the keys that they stand for, float32 `[c, n]`."""
    generator = torch.Generator().manual_seed(seed)
    codes = [
        torch.randint(0, 2**width, (count, num_tokens), generator=generator).to(torch.uint8)
        if width < 16
        else torch.randn(count, num_tokens, generator=generator).half()
        for width, count in zip(WIDTHS, counts, strict=True)
    ]
    keys, coded = torch.cat([part.float() for part in codes]), sum(counts[:3])
    shape = (2, -(-num_tokens // 64), coded)
    scales, minima = (torch.rand(*shape, generator=generator) + 0.01).half() / 10
    for token in range(num_tokens):
        group = group_of(token, num_tokens)
        keys[:coded, token] = keys[:coded, token] * scales[group] + minima[group]
    return pack_key_words(codes, num_tokens), scales, minima, keys


def planned(counts, num_tokens, words, scales, minima, queries):
    made = tiles.Tiles(words.device)
    products = torch.full((len(queries), padded_tokens(num_tokens)), torch.nan)
    plan_key_products(
        made, words, counts, num_tokens, scales=scales, minima=minima, queries=queries, products=products
    )
    return made, products[:, :num_tokens]


@given(
    counts=st.tuples(*[st.integers(0, 3)] * 4),
    num_tokens=st.one_of(st.integers(0, 30), st.integers(60, 400), st.sampled_from(GROUP_BOUNDARIES)),
    group_size=st.integers(1, 3),
    tile=st.sampled_from([1, 300, 1 << 17]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_keys(counts, num_tokens, group_size, tile, seed):
    *packed, keys = make(counts, num_tokens, seed)
    queries = torch.randn(group_size, len(keys), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", tile)
        made, products = planned(counts, num_tokens, *packed, queries)
        made.run()
    torch.testing.assert_close(products, queries @ keys, atol=1e-3, rtol=1e-4)


def test_a_run_reads_the_queries_of_its_time():
    *packed, keys = make((0, 2, 1, 2), 141, 0)
    queries = torch.zeros(2, 5)
    made, products = planned((0, 2, 1, 2), 141, *packed, queries)
    for value in (1.0, -2.0):
        queries.fill_(value)
        made.run()
        torch.testing.assert_close(products, queries @ keys, atol=1e-3, rtol=1e-4)
