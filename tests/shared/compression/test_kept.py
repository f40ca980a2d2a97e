"""The picture of kept tokens against counting them one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import one_format, packed_tensors

from kvferry.kernels.packed.packing import pack_layer
from kvferry.shared.cache.delta import head_positions
from kvferry.shared.compression.kept import kept_fractions
from kvferry.shared.compression.plan import Part


def layer_of(positions, num_tokens):
    """As a format of rows tells the positions of its tensors."""
    fmt = one_format(rows=len(positions[0]), num_prompt_tokens=num_tokens)
    return head_positions(fmt, {"index": torch.tensor(positions, dtype=torch.int32)})


def fractions(num_tokens, num_bins, heads):
    """Of one layer, token by token."""
    kept, seen = [0] * min(num_bins, num_tokens), [0] * min(num_bins, num_tokens)
    for positions in heads:
        for token in range(num_tokens):
            seen[token * len(kept) // num_tokens] += 1
            kept[token * len(kept) // num_tokens] += token in positions
    return [k / s for k, s in zip(kept, seen, strict=True)]


@given(data=st.data(), num_tokens=st.integers(1, 40), num_bins=st.integers(1, 50))
def test_it_counts_what_counting_tokens_counts(data, num_tokens, num_bins):
    size = data.draw(st.integers(1, num_tokens))
    head = st.lists(st.integers(0, num_tokens - 1), min_size=size, max_size=size, unique=True)
    layers = data.draw(st.lists(st.tuples(head, head), min_size=1, max_size=3))
    positions = {layer: layer_of(heads, num_tokens) for layer, heads in enumerate(layers)}
    in_any_order = dict(reversed(positions.items()))
    made = kept_fractions(in_any_order, num_tokens=num_tokens, num_bins=num_bins)
    expected = [fraction for heads in layers for fraction in fractions(num_tokens, num_bins, heads)]
    assert made == pytest.approx(expected)


def test_a_layer_that_keeps_everything_counts_as_such():
    rows = torch.zeros(2, 7, 8)
    whole = head_positions(one_format(rows=7, num_prompt_tokens=7), {"keys": rows, "values": rows})
    made = kept_fractions({0: whole, 1: layer_of([[0], [6]], 7)}, num_tokens=7, num_bins=3)
    assert made == pytest.approx((1, 1, 1, 1 / 6, 0, 1 / 4))


def test_a_packed_layer_counts_the_tokens_that_have_bits():
    value_bits = torch.tensor([[0, 2, 16, 0, 4, 0]], dtype=torch.uint8)
    key_bits = torch.full((1, 4), 8, dtype=torch.uint8)
    packed = pack_layer(torch.randn(1, 6, 4), torch.randn(1, 6, 4), key_bits, value_bits)
    fmt = one_format(
        rows=6,
        num_prompt_tokens=6,
        num_kv_heads=1,
        head_dim=4,
        method="rdkv",
        representation=Part(name="rdkv", params={"budget_tokens": 6}),
    )
    positions = {0: head_positions(fmt, packed_tensors(packed))}
    assert kept_fractions(positions, num_tokens=6, num_bins=6) == (0, 1, 1, 0, 1, 0)


def test_without_positions_there_are_no_fractions():
    assert kept_fractions({}, num_tokens=5, num_bins=2) == ()
    assert kept_fractions({0: ()}, num_tokens=5, num_bins=2) == ()


@pytest.mark.parametrize(
    ("part", "tensors", "expected"),
    [
        (
            Part(name="ragged", params={"floor": 0.2}),
            {"head_rows": [1, 3], "index": [0, 0, 1, 2]},
            (1, 0.5, 0.5, 0),
        ),
        (Part(name="kivi", params={"bits": 4}), {"index": [[0, 1], [0, 3]]}, (1, 0.5, 0, 0.5)),
        (Part(name="kivi", params={"bits": 4}), {"codes": [0]}, (1, 1, 1, 1)),
    ],
)
def test_a_layer_stored_otherwise_counts_its_index(part, tensors, expected):
    fmt = one_format(rows=2, num_prompt_tokens=4, representation=part)
    positions = {0: head_positions(fmt, {name: torch.tensor(value) for name, value in tensors.items()})}
    assert kept_fractions(positions, num_tokens=4, num_bins=4) == expected
