"""HSA on packed bytes equals HSA over dequantised tensors, and reads the chosen tokens' codes alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.packed import unpack_layer
from kvtest.reference import sparse as reference

from kvferry.kernels import packed_hsa
from kvferry.kernels.hsa import num_pages
from kvferry.kernels.packed.key_words import gather_key_codes, key_tiles
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.packed_hsa import PageCodes, append_key, attend, page_extremes

WIDTHS = torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8)


def make(num_kv_heads, group_size, num_tokens, head_dim, num_new, *, seed=0, dtype=torch.float32):
    """Queries, a packed layer of mixed widths and ragged heads, and new rows."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, num_kv_heads, num_tokens, head_dim, generator=generator)
    key_bits = WIDTHS[torch.randint(0, 5, (num_kv_heads, head_dim), generator=generator)]
    key_bits[:, 0] = 16
    value_bits = WIDTHS[torch.randint(0, 5, (num_kv_heads, num_tokens), generator=generator)]
    value_bits[0, num_tokens // 2 :] = 0
    value_bits[:, 0] = 4
    packed = pack_layer(keys.to(dtype), values.to(dtype), key_bits, value_bits)
    queries = 3 * torch.randn(num_kv_heads, group_size, head_dim, generator=generator).to(dtype)
    rows = torch.randn(2, num_kv_heads, num_new, head_dim, generator=generator).to(dtype)
    return queries, packed, rows[0], rows[1]


def build(packed, new_keys, page_size, *, spare=2):
    """Page extremes of the packed keys, then each new key folded in; 77 and NaN where nothing is written."""
    most = max(head.counts.num_tokens for head in packed.heads) + new_keys.shape[1]
    num_heads, head_dim = len(packed.heads), packed.layout.head_dim
    codes = torch.full((2, num_heads, num_pages(most, page_size) + spare, head_dim), 77, dtype=torch.uint8)
    pages = PageCodes(*codes, *torch.full((2, num_heads, head_dim), torch.nan))
    page_extremes(packed, pages, page_size=page_size)
    for m in range(new_keys.shape[1]):
        append_key(packed, pages, new_keys[:, m], num_new=m, page_size=page_size)
    return pages


@given(
    num_tokens=st.one_of(st.integers(1, 150), st.integers(150, 300)),
    head_dim=st.sampled_from([1, 3, 8, 20]),
    num_new=st.integers(1, 20),
    page_size=st.integers(1, 9),
    num_selected=st.integers(1, 60),
    group_size=st.sampled_from([1, 4]),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_output_equals_hsa_over_dequantised_tensors(
    num_tokens, head_dim, num_new, page_size, num_selected, group_size, seed, data
):
    queries, packed, new_keys, new_values = make(2, group_size, num_tokens, head_dim, num_new, seed=seed)
    sizes = {
        "page_size": page_size,
        "num_channels": data.draw(st.integers(1, head_dim)),
        "num_tokens": num_selected,
        "scaling": 0.3,
    }
    output = attend(queries, packed, new_keys, new_values, build(packed, new_keys, page_size), **sizes)
    expected = reference.packed_hsa_attend(queries, packed, new_keys, new_values, **sizes)
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_page_extremes_are_those_of_each_heads_own_dequantised_tokens(page_size):
    _, packed, new_keys, _ = make(3, 1, 211, 8, 5, seed=3)
    pages = build(packed, new_keys, page_size)
    for h, (keys, _, _) in enumerate(unpack_layer(packed)):
        all_keys = reference.in_8_bits(torch.cat([keys, new_keys[h]]), keys)[None]
        for codes, expected in zip(
            (pages.highest, pages.lowest), reference.page_extremes(all_keys, page_size=page_size), strict=True
        ):
            num = expected.shape[1]
            found = pages.low[h] + pages.step[h] * codes[h, :num]
            torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=1e-5)
            assert (codes[h, num:] == 77).all()


def test_extremes_are_within_half_a_step_and_new_keys_stay_within_the_range():
    _, packed, new_keys, _ = make(2, 1, 211, 20, 4, seed=4)
    pages = build(packed, 100 * new_keys, 4)
    for h, (keys, _, _) in enumerate(unpack_layer(packed)):
        head = packed.heads[h]
        whole = head.counts.num_tokens // 4
        found = (pages.low[h] + pages.step[h] * pages.highest[h])[:whole]
        expected = reference.page_extremes(keys[None], page_size=4)[0][0, :whole]
        assert ((found - expected).abs() <= 0.5001 * pages.step[h] + 1e-6).all()
        dropped = sorted({*range(20)} - {*head.channels.tolist()})
        assert dropped
        assert not pages.highest[h][:, dropped][: whole + 1].any()
        last = num_pages(head.counts.num_tokens + 4, 4)
        assert (pages.low[h] + pages.step[h] * pages.highest[h, :last]).amax() <= keys.amax() + 1e-4


@given(num_tokens=st.integers(1, 300), seed=st.integers(0, 999), data=st.data())
def test_gathered_codes_are_those_of_the_unpacked_tokens(num_tokens, seed, data):
    head = make(1, 1, num_tokens, 20, 1, seed=seed)[1].heads[0]
    counts = head.counts
    tokens = data.draw(st.sets(st.integers(0, counts.num_tokens - 1), max_size=20))
    chosen = torch.tensor(sorted(tokens), dtype=torch.int64)
    tiles = key_tiles(head.key_words, counts.channels, counts.num_tokens, max_blocks=64)
    every = torch.cat([codes for _, codes in tiles], dim=1)
    gathered = gather_key_codes(head.key_words, counts.channels, counts.num_tokens, chosen)
    assert torch.equal(gathered, every[:, chosen])


def test_only_chosen_tokens_are_read(monkeypatch):
    queries, packed, new_keys, new_values = make(2, 2, 400, 8, 3, seed=5)
    pages = build(packed, new_keys, 4)
    read = []

    def remember(words, num_channels, num_tokens, tokens):
        read.append(len(tokens))
        return gather_key_codes(words, num_channels, num_tokens, tokens)

    monkeypatch.setattr(packed_hsa, "gather_key_codes", remember)
    attend(
        queries, packed, new_keys, new_values, pages, page_size=4, num_channels=4, num_tokens=10, scaling=0.3
    )
    assert len(read) == 2
    assert max(read) <= 9  # the newest token is no packed one


def test_rows_and_pages_beyond_those_in_use_may_hold_anything():
    queries, packed, new_keys, new_values = make(2, 2, 90, 8, 4, seed=6, dtype=torch.bfloat16)
    sizes = {"page_size": 3, "num_channels": 5, "num_tokens": 12, "scaling": 0.3}
    output = attend(queries, packed, new_keys, new_values, build(packed, new_keys, 3), **sizes)
    assert output.dtype == torch.bfloat16
    assert output.isfinite().all()
    alone = attend(queries, packed, new_keys, new_values, build(packed, new_keys, 3, spare=0), **sizes)
    assert torch.equal(output, alone)


def test_misfits_are_named():
    queries, packed, new_keys, new_values = make(2, 2, 30, 8, 2)
    pages = build(packed, new_keys, 4)
    sizes = {"page_size": 4, "num_channels": 4, "num_tokens": 5, "scaling": 0.3}
    for changes, named in (
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 1}, "need .* pages"),
        ({"num_channels": 9}, "num_channels is 9"),
        ({"num_tokens": 0}, "num_tokens is 0"),
    ):
        with pytest.raises(ValueError, match=named):
            attend(queries, packed, new_keys, new_values, pages, **sizes | changes)
    with pytest.raises(ValueError, match="m at least 1"):
        attend(queries, packed, new_keys[:, :0], new_values[:, :0], pages, **sizes)
    with pytest.raises(ValueError, match="queries"):
        attend(queries[:1], packed, new_keys, new_values, pages, **sizes)
    with pytest.raises(ValueError, match="page extremes"):
        page_extremes(packed, replace(pages, lowest=pages.lowest[:1]), page_size=4)
    with pytest.raises(ValueError, match="dtypes must"):
        attend(queries.double(), packed, new_keys, new_values, pages, **sizes)
