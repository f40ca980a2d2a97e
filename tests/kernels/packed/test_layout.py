"""A layout follows from counts alone: regions neither overlap nor stray, and kinds tile the layer."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.packed.layout import KINDS, HeadCounts, packed_bound, packed_layout

FOUR = st.tuples(*[st.integers(0, 9)] * 4)
HEADS = st.lists(st.builds(HeadCounts, channels=FOUR, tokens=FOUR), min_size=0, max_size=4)


@given(heads=HEADS)
def test_regions_are_aligned_disjoint_and_inside_their_kind(heads):
    layout = packed_layout(heads, 40, num_tokens=100)
    assert list(layout.kinds) == list(KINDS)
    end = 0
    for start, size in layout.kinds.values():
        assert start == end
        end = start + size
    assert end == layout.size_bytes
    ranges = sorted(
        (region.offset, region.offset + region.size_bytes)
        for regions in layout.regions
        for region in regions.values()
        if region.size_bytes
    )
    assert all(start % ALIGNMENT_BYTES == 0 for start, _ in ranges)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    assert all(stop <= layout.size_bytes for _, stop in ranges)


def test_sizes_of_a_worked_example():
    head = HeadCounts(channels=(2, 1, 0, 1), tokens=(3, 2, 1, 1))
    layout = packed_layout([head], 6, num_tokens=100)
    sizes = {name: region.size_bytes for name, region in layout.regions[0].items()}
    # 7 tokens fill one lane: (2 * 2 + 4 + 16) bits of 8 tokens
    assert sizes == {
        "key_words": 24,
        "values_2": 3 * 2,
        "values_4": 2 * 3,
        "values_8": 6,
        "key_scales": 6,
        "key_minima": 6,
        "value_scales": 12,
        "value_minima": 12,
        "values_16": 12,
        "channels": 8,
        "positions": 14,
    }


@pytest.mark.parametrize(("num_tokens", "groups"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (193, 4)])
def test_keys_have_scales_and_minima_by_group_and_coded_channel(num_tokens, groups):
    head = HeadCounts(channels=(2, 1, 0, 1), tokens=(0, num_tokens, 0, 0))
    (regions,) = packed_layout([head], 6, num_tokens=200).regions
    for name in ("key_scales", "key_minima"):
        assert (regions[name].shape, regions[name].dtype) == ((groups, 3), torch.float16)


@pytest.mark.parametrize(("budget_tokens", "head_dim"), [(8, 16), (64, 64), (100, 128)])
def test_the_bound_is_reached_but_for_padding_where_all_is_kept_at_2_bits(budget_tokens, head_dim):
    tokens = 8 * budget_tokens
    head = HeadCounts(channels=(head_dim, 0, 0, 0), tokens=(tokens, 0, 0, 0))
    size_bytes = packed_layout([head], head_dim, num_tokens=10 * tokens).size_bytes
    bound = packed_bound(
        num_tokens=10 * tokens, budget_tokens=budget_tokens, num_kv_heads=1, head_dim=head_dim
    )
    assert bound.tokens == tokens
    assert size_bytes <= bound.size_bytes
    # padding, and a byte a row of V
    assert size_bytes > bound.size_bytes - 14 * head_dim - tokens - 12 * ALIGNMENT_BYTES


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        HeadCounts(channels=(1, 0, 0, 0), tokens=(0, -1, 0, 0))
    with pytest.raises(ValueError, match="4 channels; head_dim is 3"):
        packed_layout([HeadCounts(channels=(1, 1, 1, 1), tokens=(1, 0, 0, 0))], 3, num_tokens=9)
