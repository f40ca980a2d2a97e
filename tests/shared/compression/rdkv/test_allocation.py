"""V then K within their budgets of bits, headers included, and every bit counted."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.reference.knapsack import hull_widths

from kvferry.kernels.packed.layout import packed_bound
from kvferry.kernels.packed.packing import pack_layer
from kvferry.shared.compression.rdkv.allocation import allocate, least_budget, row_costs, solve_knapsack
from kvferry.shared.compression.rdkv.epsilon import WIDTHS, find_table

TABLE = find_table("LLaMA-3.1-8B")


def make_weights(num_tokens, head_dim, seed=0, num_kv_heads=2):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_kv_heads, num_tokens, generator=generator).mul(2).exp()
    return tokens, torch.randn(num_kv_heads, head_dim, generator=generator).exp()


def header_bits(widths, num_rows):
    """Of units of these widths, each with so many rows of codes: a float16 scale and minimum a row."""
    return 32 * num_rows * int(((widths > 0) & (widths < 16)).sum())


@given(
    num_tokens=st.integers(1, 300),
    head_dim=st.sampled_from([1, 2, 3, 4, 5, 7, 16, 33, 64, 96, 128]),
    budget_tokens=st.integers(1, 160),
    seed=st.integers(0, 999),
)
def test_codes_and_headers_are_within_their_budgets(num_tokens, head_dim, budget_tokens, seed):
    allocation = allocate(*make_weights(num_tokens, head_dim, seed), budget_tokens=budget_tokens, table=TABLE)
    value_bits, key_bits = allocation.values.long(), allocation.keys.long()
    budget = 16 * min(budget_tokens, num_tokens) * head_dim
    for h, kept in enumerate((value_bits > 0).sum(dim=1).tolist()):
        assert kept >= 1
        values = int(value_bits[h].sum()) * head_dim + header_bits(value_bits[h], 1)
        assert values <= budget
        codes = int(key_bits[h].sum()) * kept
        # half a bit a token, so that only the last group's header may be beyond the budget
        assert codes + header_bits(key_bits[h], 1) * kept / 64 <= budget
        assert codes + header_bits(key_bits[h], -(-kept // 64)) < budget + 32 * head_dim
    rows = torch.zeros(2, num_tokens, head_dim)
    packed = pack_layer(rows, rows, allocation.keys, allocation.values)
    bound = packed_bound(
        num_tokens=num_tokens, budget_tokens=budget_tokens, num_kv_heads=2, head_dim=head_dim
    ).size_bytes
    assert packed.layout.size_bytes <= bound


@pytest.mark.parametrize("head_dim", [5, 64, 96, 128])
def test_of_a_budget_less_is_left_than_any_increment_costs(head_dim):
    allocation = allocate(*make_weights(500, head_dim), budget_tokens=60, table=TABLE)
    for values, keys in zip(allocation.values.tolist(), allocation.keys.tolist(), strict=True):
        kept, budget = sum(width > 0 for width in values), 16 * 60 * head_dim
        for bits, curve, length, most in (
            (values, TABLE.value_curve, head_dim, budget),
            (keys, TABLE.key_curve, 64, 64 * budget // kept),
        ):
            cost = dict(zip(WIDTHS, row_costs(length), strict=True))
            hull = hull_widths(curve, row_costs(length), WIDTHS)
            steps = {width: cost[after] - cost[width] for width, after in itertools.pairwise(hull)}
            left = most - sum(cost[width] for width in bits)
            assert 0 <= left < min(steps[width] for width in bits if width in steps)


@pytest.mark.parametrize(
    ("widths", "num_tokens", "head_dim"),
    [((2, 4, 8, 16), 97, 8), ((2, 4, 8, 16), 97, 128), ((4, 16), 97, 64), ((8,), 31, 5), ((16,), 9, 3)],
)
def test_the_least_budget_of_widths_above_0_keeps_everything_and_one_token_less_does_not(
    widths, num_tokens, head_dim
):
    least = least_budget(widths, num_tokens=num_tokens, head_dim=head_dim)
    weights = make_weights(num_tokens, head_dim)
    allocation = allocate(*weights, budget_tokens=least, table=TABLE, widths=widths)
    budget = 16 * least * head_dim
    for value_bits, key_bits in zip(allocation.values.long(), allocation.keys.long(), strict=True):
        assert set(value_bits.tolist()) | set(key_bits.tolist()) <= set(widths)
        assert int(value_bits.sum()) * head_dim + header_bits(value_bits, 1) <= budget
        keys = int(key_bits.sum()) * num_tokens + header_bits(key_bits, 1) * num_tokens / 64
        assert keys <= budget
    needed = [
        num_tokens * min(row_costs(num_values)[WIDTHS.index(width)] for width in widths) / (16 * num_values)
        for num_values in (head_dim, 64)
    ]
    assert least - 1 < max(needed) <= least


def test_widths_that_may_drop_a_token_need_one_token():
    assert least_budget(WIDTHS, num_tokens=10_000, head_dim=64) == 1


def test_the_bound_on_bytes_covers_the_padding_of_a_single_token():
    bits = torch.full((1, 128), 16)
    rows = torch.zeros(1, 1, 128)
    packed = pack_layer(rows, rows, bits, bits[:, :1])
    bound = packed_bound(num_tokens=1, budget_tokens=1, num_kv_heads=1, head_dim=128).size_bytes
    assert bound / 2 < packed.layout.size_bytes <= bound


def test_keys_are_allocated_what_the_kept_tokens_leave():
    tokens, channels = make_weights(300, 64)
    allocation = allocate(tokens, channels, budget_tokens=24, table=TABLE)
    # a token's V: 64 values and a header of 32 bits
    budgets, costs = torch.tensor([16 * 24 * 64] * 2), (0, 160, 288, 544, 1024)
    values = solve_knapsack(tokens, TABLE.value_curve, budgets, costs=costs)
    assert torch.equal(allocation.values, values)
    kept = (values > 0).sum(dim=1)
    assert (kept > 24).all()
    # in half bits a channel and retained token, of which a header is one
    keys = solve_knapsack(channels, TABLE.key_curve, 2 * budgets // kept, costs=(0, 5, 9, 17, 32))
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
