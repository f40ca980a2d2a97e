"""Products with K's codes are those of the unpacked codes, whatever the widths, the tokens and the tiles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.packed import tiles
from kvferry.kernels.packed.key_products import padded_tokens, plan_key_products
from kvferry.kernels.packed.key_words import WIDTHS, pack_key_words


def make(counts, num_tokens, seed):
    """Words, and the codes that they hold, float32 `[c, n]`."""
    generator = torch.Generator().manual_seed(seed)
    codes = [
        torch.randint(0, 2**width, (count, num_tokens), generator=generator).to(torch.uint8)
        if width < 16
        else torch.randn(count, num_tokens, generator=generator).half()
        for width, count in zip(WIDTHS, counts, strict=True)
    ]
    return pack_key_words(codes, num_tokens), torch.cat([part.float() for part in codes])


def products_of(words, counts, num_tokens, weights, bias):
    made = tiles.Tiles(words.device)
    products = torch.full((len(weights), padded_tokens(num_tokens)), torch.nan)
    plan_key_products(made, words, counts, num_tokens, weights=weights, bias=bias, products=products)
    made.run()
    return products[:, :num_tokens]


@given(
    counts=st.tuples(*[st.integers(0, 3)] * 4),
    num_tokens=st.one_of(st.integers(0, 30), st.integers(120, 400)),
    group_size=st.integers(1, 3),
    tile=st.sampled_from([1, 300, 1 << 17]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_codes(counts, num_tokens, group_size, tile, seed):
    words, codes = make(counts, num_tokens, seed)
    weights = torch.randn(group_size, len(codes), generator=torch.Generator().manual_seed(seed))
    bias = torch.arange(group_size, dtype=torch.float32)[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", tile)
        products = products_of(words, counts, num_tokens, weights, bias)
    torch.testing.assert_close(products, weights @ codes + bias, atol=1e-3, rtol=1e-4)


def test_a_run_reads_the_weights_of_its_time():
    words, codes = make((0, 2, 1, 2), 141, 0)
    weights, bias = torch.zeros(2, 5), torch.ones(2, 1)
    made = tiles.Tiles(words.device)
    products = torch.empty(2, padded_tokens(141))
    plan_key_products(made, words, (0, 2, 1, 2), 141, weights=weights, bias=bias, products=products)
    for value in (1.0, -2.0):
        weights.fill_(value)
        made.run()
        torch.testing.assert_close(products[:, :141], weights @ codes + 1, atol=1e-3, rtol=1e-4)
