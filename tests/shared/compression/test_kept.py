"""The map of kept tokens against counting them one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.compression import one_format, packed_tensors

from kvferry.kernels.packed.packing import pack_layer
from kvferry.shared.compression.kept import KeptMap
from kvferry.shared.compression.plan import Part


def layer_of(positions, num_tokens):
    """As a format of rows tells the positions of its tensors."""
    fmt = one_format(rows=len(positions[0]), num_prompt_tokens=num_tokens)
    return fmt.positions_by_head({"index": torch.tensor(positions, dtype=torch.int32)})


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
    made = KeptMap(num_tokens=num_tokens, num_bins=num_bins)
    for layer, heads in reversed(list(enumerate(layers))):  # in any order
        made.add(layer, layer_of(heads, num_tokens))
    expected = [fraction for heads in layers for fraction in fractions(num_tokens, num_bins, heads)]
    assert made.fractions() == pytest.approx(expected)


def test_a_layer_that_keeps_everything_counts_as_such():
    made = KeptMap(num_tokens=7, num_bins=3)
    rows = torch.zeros(2, 7, 8)
    made.add(0, one_format(rows=7, num_prompt_tokens=7).positions_by_head({"keys": rows, "values": rows}))
    made.add(1, layer_of([[0], [6]], 7))
    assert made.fractions() == pytest.approx((1, 1, 1, 1 / 6, 0, 1 / 4))


def test_a_packed_layer_counts_the_tokens_that_have_bits():
    value_bits = torch.tensor([[0, 2, 16, 0, 4, 0]], dtype=torch.uint8)
    key_bits = torch.full((1, 4), 8, dtype=torch.uint8)
    packed = pack_layer(torch.randn(1, 6, 4), torch.randn(1, 6, 4), key_bits, value_bits)
    made = KeptMap(num_tokens=6, num_bins=6)
    fmt = one_format(
        rows=6,
        num_prompt_tokens=6,
        num_kv_heads=1,
        head_dim=4,
        method="rdkv",
        representation=Part(name="rdkv", params={"budget_tokens": 6}),
    )
    made.add(0, fmt.positions_by_head(packed_tensors(packed)))
    assert made.fractions() == (0, 1, 1, 0, 1, 0)


def test_nothing_counted_gives_no_fractions():
    assert KeptMap(num_tokens=5, num_bins=2).fractions() == ()


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
    made = KeptMap(num_tokens=4, num_bins=4)
    made.add(0, fmt.positions_by_head({name: torch.tensor(value) for name, value in tensors.items()}))
    assert made.fractions() == expected
