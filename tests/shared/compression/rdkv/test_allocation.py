"""V then K within their budgets of bits, and every bit counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.packed.layout import packed_bound
from kvferry.kernels.packed.packing import pack_layer
from kvferry.shared.compression.rdkv.allocation import allocate, solve_knapsack
from kvferry.shared.compression.rdkv.epsilon import find_table

TABLE = find_table("LLaMA-3.1-8B")


def make_weights(num_tokens, head_dim, seed=0, num_kv_heads=2):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_kv_heads, num_tokens, generator=generator).mul(2).exp()
    return tokens, torch.randn(num_kv_heads, head_dim, generator=generator).exp()


@given(
    num_tokens=st.integers(1, 200),
    head_dim=st.integers(1, 40),
    budget_tokens=st.integers(1, 120),
    seed=st.integers(0, 999),
)
def test_budgets_hold_and_packed_bytes_stay_below_their_bound(num_tokens, head_dim, budget_tokens, seed):
    allocation = allocate(*make_weights(num_tokens, head_dim, seed), budget_tokens=budget_tokens, table=TABLE)
    value_bits, key_bits = allocation.values.long(), allocation.keys.long()
    for h, kept in enumerate((value_bits > 0).sum(dim=1).tolist()):
        assert kept >= 1
        assert int(value_bits[h].sum()) <= 16 * budget_tokens
        share = 16 * min(budget_tokens, num_tokens) * head_dim // kept
        assert int(key_bits[h].sum()) <= min(share, 16 * head_dim)
        # in full: codes of K and V together are within B_tok tokens of float16 K and V
        codes = int(value_bits[h].sum()) * head_dim + int(key_bits[h].sum()) * kept
        assert codes <= 2 * 16 * budget_tokens * head_dim
    rows = torch.zeros(2, num_tokens, head_dim)
    packed = pack_layer(rows, rows, allocation.keys, allocation.values)
    bound = packed_bound(
        num_tokens=num_tokens, budget_tokens=budget_tokens, num_kv_heads=2, head_dim=head_dim
    ).size_bytes
    assert packed.layout.size_bytes <= bound


def test_the_bound_on_bytes_covers_the_padding_of_a_single_token():
    bits = torch.full((1, 128), 16)
    rows = torch.zeros(1, 1, 128)
    packed = pack_layer(rows, rows, bits, bits[:, :1])
    bound = packed_bound(num_tokens=1, budget_tokens=1, num_kv_heads=1, head_dim=128).size_bytes
    assert bound / 2 < packed.layout.size_bytes <= bound


def test_keys_are_allocated_what_the_kept_tokens_leave():
    tokens, channels = make_weights(300, 64)
    allocation = allocate(tokens, channels, budget_tokens=24, table=TABLE)
    values = solve_knapsack(tokens, TABLE.value_curve, torch.tensor([384, 384]))
    assert torch.equal(allocation.values, values)
    kept = (values > 0).sum(dim=1)
    assert (kept > 24).all()
    keys = solve_knapsack(channels, TABLE.key_curve, 16 * 24 * 64 // kept)
    assert torch.equal(allocation.keys, keys)


def test_a_budget_that_covers_the_prompt_keeps_all_of_it_in_full_precision():
    allocation = allocate(*make_weights(31, 8), budget_tokens=31, table=TABLE)
    assert allocation.values.eq(16).all()
    assert allocation.keys.eq(16).all()
    rows = torch.zeros(2, 31, 8)
    assert pack_layer(rows, rows, allocation.keys, allocation.values).layout.kinds["scales"][1] == 0


def test_one_token_and_one_channel_are_kept():
    allocation = allocate(*make_weights(1, 1), budget_tokens=1, table=TABLE)
    assert allocation.values.tolist() == allocation.keys.tolist() == [[16], [16]]


def test_a_budget_of_one_token_keeps_the_heaviest():
    tokens, channels = make_weights(50, 16)
    allocation = allocate(tokens, channels, budget_tokens=1, table=TABLE)
    for h in range(2):
        assert allocation.values[h, tokens[h].argmax()] > 0


def counted_bits(allocation):
    """Bits of codes and 16-bit values, of scales with minima, and of indexes; no alignment, no padding."""
    head_dim = allocation.keys.shape[1]
    codes = scales = index = 0
    for value_bits, key_bits in zip(allocation.values.tolist(), allocation.keys.tolist(), strict=True):
        kept = sum(b > 0 for b in value_bits)
        codes += head_dim * sum(value_bits) + kept * sum(key_bits)
        coded_channels = sum(b in (2, 4, 8) for b in key_bits)
        scales += 32 * (sum(b in (2, 4, 8) for b in value_bits) + -(-kept // 64) * coded_channels)
        index += 16 * kept + 16 * sum(b > 0 for b in key_bits)
    return codes, scales, index


@pytest.mark.parametrize("num_tokens", [128, 1000])
def test_codes_scales_and_index_are_counted_apart_but_for_alignment_and_padding(num_tokens):
    allocation = allocate(*make_weights(num_tokens, 64), budget_tokens=64, table=TABLE)
    codes, scales, index = counted_bits(allocation)
    assert codes <= 2 * 2 * 16 * 64 * 64
    rows = torch.zeros(2, num_tokens, 64)
    kinds = pack_layer(rows, rows, allocation.keys, allocation.values).layout.kinds
    padding = 2 * 7 * int(allocation.keys.long().sum(dim=1).max())
    for bits, size, spare in (
        (codes, kinds["codes"][1] + kinds["rows"][1], padding // 8 + 2 * 5 * 15),
        (scales, kinds["scales"][1], 2 * 4 * 15),
        (index, kinds["index"][1], 2 * 2 * 15),
    ):
        assert 0 < bits / 8 <= size <= bits / 8 + spare
