"""A packed layer keeps what the bits say, loses what they say, and is read only where it was written."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.packed import GROUP_BOUNDARIES, group_of, unpack_layer

from kvferry.kernels import dispatch
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.packed.check import begin_packed_check
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed.layout import packed_layout
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.quantise import dequantise_rows, quantise_rows
from kvferry.kernels.quarantine import quarantined

WIDTHS = torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8)


@pytest.fixture(params=["torch", "triton"])
def check(request):
    """The check on the torch path, then with its kernel in the interpreter."""

    def run(packed, num_tokens):
        dispatch.configure(request.param, torch.device("cpu"))
        try:
            begin_packed_check(packed, num_tokens)()
        finally:
            dispatch.configure("auto", torch.device("cpu"))

    yield run
    assert not quarantined()


def make_layer(num_kv_heads, num_tokens, head_dim, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator) * 3 + 1
    values = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator)
    key_bits = WIDTHS[torch.randint(0, 5, (num_kv_heads, head_dim), generator=generator)]
    value_bits = WIDTHS[torch.randint(0, 5, (num_kv_heads, num_tokens), generator=generator)]
    return keys.to(dtype), values.to(dtype), key_bits, value_bits


def expected_head(keys, values, key_bits, value_bits):
    """Channel by channel of each group, token by token, in position order; zeros where nothing is kept."""
    kept = sorted(value_bits.nonzero()[:, 0].tolist(), key=lambda position: (value_bits[position], position))
    groups = [[] for _ in range(-(-len(kept) // 64))]
    for token, position in enumerate(kept):
        groups[group_of(token, len(kept))].append(position)
    expected_keys, expected_values = torch.zeros(keys.shape), torch.zeros(values.shape)
    for c, bits in enumerate(key_bits.tolist()):
        for group in groups:
            channel = keys[group, c].float()
            if bits == 16:
                expected_keys[group, c] = channel.half().float()
            elif bits:
                expected_keys[group, c] = dequantise_rows(*quantise_rows(channel[None], bits, half=True))[0]
    for t, bits in enumerate(value_bits.tolist()):
        token = values[t].float()
        if bits == 16:
            expected_values[t] = token.half().float()
        elif bits:
            expected_values[t] = dequantise_rows(*quantise_rows(token[None], bits, half=True))[0]
    return expected_keys, expected_values


@given(
    num_tokens=st.one_of(st.integers(1, 20), st.sampled_from([70, 100, 128, 150, 250])),
    head_dim=st.integers(1, 11),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_what_is_unpacked_is_what_the_bits_keep(num_tokens, head_dim, seed, dtype):
    keys, values, key_bits, value_bits = make_layer(2, num_tokens, head_dim, seed, dtype)
    packed = pack_layer(keys, values, key_bits, value_bits)
    begin_packed_check(packed, num_tokens)()
    for h, (kept_keys, kept_values, positions) in enumerate(unpack_layer(packed)):
        widths = value_bits[h][positions]
        assert sorted(positions.tolist()) == (value_bits[h] > 0).nonzero()[:, 0].tolist()
        assert widths.tolist() == sorted(widths.tolist())
        expected = expected_head(keys[h], values[h], key_bits[h], value_bits[h])
        torch.testing.assert_close(kept_keys, expected[0][positions], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kept_values, expected[1][positions], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", GROUP_BOUNDARIES)
def test_each_group_has_a_scale_and_a_minimum_of_its_own(num_tokens):
    groups = [group_of(token, num_tokens) for token in range(num_tokens)]
    # what a group's keys range over is twice as far from zero, and twice as wide, as the group's before
    low = torch.tensor([2.0**group for group in groups])
    first = torch.tensor([groups.index(group) == token for token, group in enumerate(groups)])
    keys = torch.where(first, low, 2 * low)[None, :, None].expand(1, -1, 3).clone()
    keys[0, :, 2] = 7.0
    bits = torch.full((1, num_tokens), 4)
    packed = pack_layer(keys, keys, torch.tensor([[2, 8, 4]]), bits)
    (head,) = packed.heads
    sizes = [groups.count(group) for group in range(max(groups) + 1)]
    assert head.key_minima.tolist() == [[2.0**g, 7.0, 2.0**g] for g in range(len(sizes))]
    for group, size in enumerate(sizes):
        # a group of one token has no range
        ranges = [2.0**group / levels if size > 1 else 1.0 for levels in (3, 255)]
        expected = torch.tensor([ranges[0], 1.0, ranges[1]])
        torch.testing.assert_close(head.key_scales[group].float(), expected, rtol=2e-3, atol=0)
    ((kept, _, _),) = unpack_layer(packed)
    torch.testing.assert_close(kept, keys[0], rtol=2e-3, atol=0)


def test_sixteen_bit_channels_and_rows_are_exact_in_half_precision():
    keys, values, key_bits, value_bits = make_layer(2, 37, 9, dtype=torch.float16)
    packed = pack_layer(keys, values, key_bits.fill_(16), value_bits.fill_(16))
    for h, (kept_keys, kept_values, positions) in enumerate(unpack_layer(packed)):
        assert positions.tolist() == list(range(37))
        assert torch.equal(kept_keys, keys[h].float())
        assert torch.equal(kept_values, values[h].float())
    assert packed.layout.regions[0]["key_scales"].size_bytes == 0


def test_one_token_and_one_channel_pack():
    for bits in (2, 4, 8, 16):
        key_bits, value_bits = torch.full((1, 1), bits), torch.full((1, 1), bits)
        packed = pack_layer(torch.full((1, 1, 1), 3.5), torch.full((1, 1, 1), -2.0), key_bits, value_bits)
        assert [part.tolist() for part in unpack_layer(packed)[0]] == [[[3.5]], [[-2.0]], [0]]


def test_evicted_tokens_and_dropped_channels_may_hold_anything():
    keys, values, key_bits, value_bits = make_layer(2, 50, 8)
    for h in range(2):
        keys[h, value_bits[h] == 0] = float("nan")
        values[h, value_bits[h] == 0] = float("inf")
        keys[h, :, key_bits[h] == 0] = float("nan")
    for kept_keys, kept_values, _ in unpack_layer(pack_layer(keys, values, key_bits, value_bits)):
        assert kept_keys.isfinite().all()
        assert kept_values.isfinite().all()


def test_a_layer_is_viewed_from_its_bytes_and_counts_alone():
    packed = pack_layer(*make_layer(3, 141, 12))
    arena = torch.full((packed.layout.size_bytes + 4096,), 0xFF, dtype=torch.uint8)
    place = arena[1024 : 1024 + packed.layout.size_bytes]
    for start, size in packed.layout.kinds.values():
        place[start : start + size] = packed.buffer[start : start + size]
    viewed = view_packed_layer(packed_layout(packed.layout.heads, 12, num_tokens=141), place)
    for one, other in zip(unpack_layer(viewed), unpack_layer(packed), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_values_beyond_half_precision_are_refused_at_every_width(width):
    keys, values = torch.full((1, 2, 2), 70000.0), torch.zeros(1, 2, 2)
    bits = torch.full((1, 2), width)
    for one, other in ((keys, values), (values, keys)):
        with pytest.raises(ValueError, match="65504"):
            pack_layer(one, other, bits, bits)


@pytest.mark.parametrize(("num_tokens", "dtype"), [(65536, torch.uint16), (65537, torch.int32)])
def test_positions_take_two_bytes_as_long_as_these_suffice(num_tokens, dtype):
    keys = torch.ones(1, num_tokens, 2)
    value_bits = torch.zeros(1, num_tokens, dtype=torch.uint8)
    value_bits[0, [0, 40000, num_tokens - 1]] = 4
    packed = pack_layer(keys, keys, torch.full((1, 2), 4, dtype=torch.uint8), value_bits)
    assert packed.heads[0].positions.dtype == dtype
    assert unpack_layer(packed)[0][2].tolist() == [0, 40000, num_tokens - 1]
    begin_packed_check(packed, num_tokens)()


def test_scales_and_minima_take_two_bytes():
    packed = pack_layer(*make_layer(2, 50, 8))
    for head in packed.heads:
        for name in ("key_scales", "key_minima", "value_scales", "value_minima"):
            assert getattr(head, name).dtype == torch.float16


def test_misfits_are_named():
    keys, values, key_bits, value_bits = make_layer(2, 5, 4)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        pack_layer(keys, values, key_bits[:, :3], value_bits)
    with pytest.raises(ValueError, match=r"3.*one of \(0, 2, 4, 8, 16\)"):
        pack_layer(keys, values, key_bits.fill_(3), value_bits)
    packed = pack_layer(*make_layer(2, 5, 4))
    with pytest.raises(ValueError, match="contiguous uint8"):
        view_packed_layer(packed.layout, packed.buffer[:-1])
    shifted = torch.zeros(packed.layout.size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)[1:]
    with pytest.raises(ValueError, match="multiple of 16"):
        view_packed_layer(packed.layout, shifted[: packed.layout.size_bytes])


@pytest.mark.parametrize(
    ("name", "entry", "named"),
    [
        ("positions", 65535, "positions of head 1"),
        ("positions", 99, "positions of head 1"),
        ("channels", 4, "channels of head 1"),
        ("channels", 0, "channels of head 1"),
        ("key_scales", float("nan"), "scales of head 1"),
        ("key_scales", 0.0, "scales of head 1"),
        ("value_scales", -1.0, "scales of head 1"),
        ("value_minima", float("inf"), "scales of head 1"),
        ("value_scales", float("inf"), "scales of head 1"),
        ("values_16", float("nan"), "head 1 keeps at 16 bits"),
    ],
)
def test_an_index_or_scales_that_no_packer_writes_are_refused(check, name, entry, named):
    keys, values, key_bits, value_bits = make_layer(2, 99, 4)
    key_bits[1] = torch.tensor([2, 4, 8, 2])
    packed = pack_layer(keys, values, key_bits, value_bits)
    check(packed, 99)
    getattr(packed.heads[1], name)[-1] = entry
    with pytest.raises(ValueError, match=named):
        check(packed, 99)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 128, 193, 1200])
@pytest.mark.parametrize(("name", "entry"), [("key_scales", 0.0), ("key_minima", float("nan"))])
def test_scales_and_minima_of_every_group_are_checked(check, num_tokens, name, entry):
    keys = torch.ones(1, num_tokens, 60)
    key_bits = torch.full((1, 60), 4)
    key_bits[0, 7] = 16
    packed = pack_layer(keys, keys, key_bits, torch.full((1, num_tokens), 8))
    of_groups = getattr(packed.heads[0], name)
    assert of_groups.shape == (-(-num_tokens // 64), 59)
    check(packed, num_tokens)
    for group, channel in ((0, 1), (len(of_groups) // 2, 0), (-1, -1)):
        before = of_groups[group, channel].clone()
        of_groups[group, channel] = entry
        with pytest.raises(ValueError, match="scales of head 0"):
            check(packed, num_tokens)
        of_groups[group, channel] = before
    check(packed, num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 8, 127, 128, 141])
def test_sixteen_bit_channels_that_are_not_finite_are_refused_but_padding_may_hold_anything(
    check, num_tokens
):
    keys = torch.ones(1, num_tokens, 3)
    packed = pack_layer(keys, keys, torch.tensor([[4, 16, 16]]), torch.full((1, num_tokens), 8))
    lanes = -(-(num_tokens % 128) // 8) or 16
    last = packed.heads[0].key_words[-2 * 8 * lanes :].view(torch.float16)
    padding = -num_tokens % 8
    last[8 * lanes - padding :] = float("nan")
    check(packed, num_tokens)
    last[8 * lanes - padding - 1] = float("nan")
    with pytest.raises(ValueError, match="at 16 bits"):
        check(packed, num_tokens)
