"""V rows: split over D as documented, and back, at any head_dim."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.packed import tiles
from kvferry.kernels.packed.value_rows import (
    add_value_products,
    pack_value_rows,
    unpack_value_rows,
    value_row_bytes,
)


def make_codes(num_tokens, head_dim, bits, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, (num_tokens, head_dim), generator=generator).to(torch.uint8)


@given(
    num_tokens=st.integers(0, 9),
    head_dim=st.integers(1, 33),
    bits=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 99),
)
def test_codes_come_back(num_tokens, head_dim, bits, seed):
    codes = make_codes(num_tokens, head_dim, bits, seed)
    packed = pack_value_rows(codes, bits)
    assert packed.shape == (num_tokens, value_row_bytes(bits, head_dim))
    assert torch.equal(unpack_value_rows(packed, bits, head_dim), codes.float())


def test_four_bits_are_half_split_and_two_bits_quarter_split():
    four = pack_value_rows(torch.tensor([[1, 2, 3, 4, 5, 6]], dtype=torch.uint8), 4)
    assert four.tolist() == [[1 | 4 << 4, 2 | 5 << 4, 3 | 6 << 4]]
    two = pack_value_rows(torch.tensor([[0, 1, 2, 3, 3, 2, 1, 0]], dtype=torch.uint8), 2)
    assert two.tolist() == [[0 | 2 << 2 | 3 << 4 | 1 << 6, 1 | 3 << 2 | 2 << 4 | 0 << 6]]


@pytest.mark.parametrize(("bits", "head_dim", "padding"), [(4, 5, 0xF0), (2, 5, 0xF0), (2, 7, 0xC0)])
def test_padding_channels_are_never_read(bits, head_dim, padding):
    codes = make_codes(3, head_dim, bits)
    packed = pack_value_rows(codes, bits)
    poisoned = packed.clone()
    poisoned[:, -1] |= padding
    assert not torch.equal(poisoned, packed)
    assert torch.equal(unpack_value_rows(poisoned, bits, head_dim), codes.float())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("head_dim", [1, 5, 16])
def test_products_are_those_of_the_codes_however_many_tiles_they_take(bits, head_dim, monkeypatch):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (41, head_dim), generator=generator, dtype=torch.uint8)
    weights = torch.randn(3, 41, generator=generator)
    packed = pack_value_rows(codes, bits)
    for tile_elements in (tiles.TILE_ELEMENTS, 64):
        monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile_elements)
        output = torch.ones(3, head_dim)
        add_value_products(weights, packed, bits, output)
        torch.testing.assert_close(output, 1 + weights @ codes.float(), atol=1e-4, rtol=1e-5)
