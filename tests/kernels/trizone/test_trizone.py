"""Attention on packed bytes equals attention over the dequantised tensors, and reads no padding."""

import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.packed import GROUP_BOUNDARIES, poison_padding, trizone_decode, unpack_layer
from kvtest.reference import dense as reference
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.packed import tiles
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.trizone import torch_path, trizone_decode_segments

WIDTHS = torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8)


def make(num_kv_heads, group_size, num_tokens, head_dim, num_new, *, seed=0, dtype=torch.float32):
    """Queries, a packed layer of mixed widths and ragged heads, and new rows."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.1, 4, head_dim)
    keys = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator) * scale + 2
    values = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator)
    key_bits = WIDTHS[torch.randint(0, 5, (num_kv_heads, head_dim), generator=generator)]
    value_bits = WIDTHS[torch.randint(0, 5, (num_kv_heads, num_tokens), generator=generator)]
    value_bits[0, num_tokens // 2 :] = 0
    value_bits[:, 0] = 4
    packed = pack_layer(keys.to(dtype), values.to(dtype), key_bits, value_bits)
    queries = torch.randn(num_kv_heads, group_size, head_dim, generator=generator).to(dtype)
    rows = torch.randn(2, num_kv_heads, num_new, head_dim, generator=generator).to(dtype)
    return queries, packed, rows[0], rows[1]


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "num_new"),
    [(1, 8, 0), (1, 1, 1), (2, 3, 5), (97, 20, 1), (128, 16, 0), (509, 64, 3), (2500, 6, 31)],
)
def test_output_equals_attention_over_dequantised_tensors(group_size, num_tokens, head_dim, num_new):
    arguments = make(3, group_size, num_tokens, head_dim, num_new, seed=num_tokens)
    scaling = head_dim**-0.5
    output = trizone_decode(*arguments, scaling=scaling)
    expected = reference.trizone_decode(*arguments, scaling=scaling)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@given(
    num_tokens=st.integers(1, 300),
    head_dim=st.integers(1, 17),
    num_new=st.integers(0, 4),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_output_equals_the_reference_for_any_allocation(num_tokens, head_dim, num_new, seed, dtype):
    arguments = make(2, 2, num_tokens, head_dim, num_new, seed=seed, dtype=dtype)
    output = trizone_decode(*arguments, scaling=0.3)
    assert output.dtype == dtype
    expected = reference.trizone_decode(*arguments, scaling=0.3)
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", GROUP_BOUNDARIES)
@pytest.mark.parametrize("group_size", [1, 3])
def test_groups_of_any_length_have_scales_of_their_own(num_tokens, group_size):
    generator = torch.Generator().manual_seed(num_tokens)
    # each group's keys are of another size, around another value
    size = 2.0 ** (torch.arange(num_tokens) // 32 - 3)[:, None]
    keys = (torch.randn(2, num_tokens, 10, generator=generator) - 1) * size
    values, queries = torch.randn(2, num_tokens, 10, generator=generator), torch.randn(2, group_size, 10)
    key_bits = torch.tensor([[0, 2, 4, 8, 16, 2, 4, 8, 2, 4]] * 2)
    packed = pack_layer(keys, values, key_bits, torch.full((2, num_tokens), 4))
    step = (queries, packed, keys[:, :0], values[:, :0])
    output = trizone_decode(*step, scaling=0.1)
    expected = reference.trizone_decode(*step, scaling=0.1)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sharpness", [20, 400])
def test_weights_too_small_for_normal_floats_change_nothing(sharpness):
    queries, packed, new_keys, new_values = make(2, 4, 300, 16, 3)
    output = trizone_decode(sharpness * queries, packed, new_keys, new_values, scaling=0.25)
    expected = reference.trizone_decode(sharpness * queries, packed, new_keys, new_values, scaling=0.25)
    assert output.isfinite().all()
    torch.testing.assert_close(output, expected, atol=2e-3, rtol=2e-3)


def test_full_precision_equals_dense_attention_over_the_whole_cache():
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(2, 2, 203, 16, generator=generator).half().float()
    queries = torch.randn(2, 4, 16, generator=generator)
    bits = torch.full((2, 200), 16)
    packed = pack_layer(cache[0, :, :200], cache[1, :, :200], bits[:, :16], bits)
    output = trizone_decode(queries, packed, cache[0, :, 200:], cache[1, :, 200:], scaling=0.25)
    expected = dense_decode(queries, cache[0], cache[1], scaling=0.25)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("num_tokens", [3, 141])
def test_heads_that_keep_alike_are_attended_together(bits, num_tokens):
    generator = torch.Generator().manual_seed(bits)
    rows = torch.randn(2, 4, num_tokens, 12, generator=generator)
    widths = torch.full((4, num_tokens), bits, dtype=torch.uint8)
    widths[3, 0] = 16  # the last is another
    packed = pack_layer(rows[0], rows[1], widths[:, :1].expand(-1, 12).clone(), widths)
    queries = torch.randn(4, 2, 12, generator=generator)
    step = (queries, packed, rows[0, :, :2], rows[1, :, :2])
    output = trizone_decode(*step, scaling=0.3)
    expected = reference.trizone_decode(*step, scaling=0.3)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_new", [0, 1, 7])
def test_segments_are_attended_as_one_run_of_dequantised_tokens(num_new):
    queries, first, new_keys, new_values = make(3, 2, 97, 20, num_new, seed=1)
    others = [make(3, 2, n, 20, 0, seed=n)[1] for n in (1, 40)]
    output = trizone_decode_segments(queries, [first, *others], new_keys, new_values, scaling=0.3)
    for h in range(3):
        kept = [unpack_layer(packed)[h] for packed in (first, *others)]
        keys = torch.cat([*(k for k, _, _ in kept), new_keys[h]])
        values = torch.cat([*(v for _, v, _ in kept), new_values[h]])
        expected = (0.3 * queries[h] @ keys.T).softmax(dim=-1) @ values
        torch.testing.assert_close(output[h], expected, atol=1e-3, rtol=1e-3)


def test_one_segment_is_the_packed_layer_itself():
    queries, packed, new_keys, new_values = make(2, 2, 30, 8, 3)
    alone = trizone_decode(queries, packed, new_keys, new_values, scaling=0.3)
    assert torch.equal(trizone_decode_segments(queries, [packed], new_keys, new_values, scaling=0.3), alone)
    with pytest.raises(ValueError, match="at least one"):
        trizone_decode_segments(queries, [], new_keys, new_values, scaling=0.3)
    with pytest.raises(ValueError, match="has 2 heads of 9 channels"):
        trizone_decode_segments(queries, [packed, make(2, 2, 5, 9, 0)[1]], new_keys, new_values, scaling=0.3)


def test_tiles_change_nothing(monkeypatch):
    whole = trizone_decode(*make(2, 3, 700, 12, 2), scaling=0.3)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 128 * 12)
    cut = trizone_decode(*make(2, 3, 700, 12, 2), scaling=0.3)
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)


def test_padding_is_never_read():
    queries, packed, new_keys, new_values = make(2, 2, 150, 9, 2, seed=11)
    for head in packed.heads:
        assert head.counts.channels[3] > 0
        assert head.counts.num_tokens % 8
    expected = trizone_decode(queries, packed, new_keys, new_values, scaling=0.3)
    viewed = poison_padding(packed)
    assert not torch.equal(viewed.buffer, packed.buffer)
    output = trizone_decode(queries, viewed, new_keys, new_values, scaling=0.3)
    assert torch.equal(output, expected)


def test_new_rows_may_be_a_slice_of_a_longer_cache_whose_rest_is_nan():
    queries, packed, new_keys, new_values = make(2, 2, 40, 8, 3)
    cache = torch.full((2, 2, 10, 8), float("nan"))
    cache[0, :, :3], cache[1, :, :3] = new_keys, new_values
    output = trizone_decode(queries, packed, cache[0, :, :3], cache[1, :, :3], scaling=0.3)
    assert torch.equal(output, trizone_decode(queries, packed, new_keys, new_values, scaling=0.3))


def test_a_layer_is_attended_again_and_again_while_others_are_in_between():
    room = torch_path.NEW_TOKENS
    queries, packed, new_keys, new_values = make(2, 3, 150, 9, 2 * room + 1, seed=3)
    another = make(3, 1, 700, 12, 5)
    for num_new in (0, 1, 2, room, room + 1, 2 * room + 1, 3):
        for group_size in (3, 2):
            step = (queries[:, :group_size], packed, new_keys[:, :num_new], new_values[:, :num_new])
            output = trizone_decode(*step, scaling=0.3)
            expected = reference.trizone_decode(*step, scaling=0.3)
            torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
            trizone_decode(*another, scaling=0.3)


def test_segments_may_change_behind_the_first():
    queries, first, new_keys, new_values = make(3, 2, 97, 20, 2, seed=1)
    others = [make(3, 2, n, 20, 0, seed=n)[1] for n in (130, 40, 7)]
    for segments in ([first], [first, others[0]], [first, others[1]], [first, *others], [first]):
        output = trizone_decode_segments(queries, segments, new_keys, new_values, scaling=0.3)
        packed = [unpack_layer(packed) for packed in segments]
        for h in range(3):
            keys = torch.cat([*(heads[h][0] for heads in packed), new_keys[h]])
            values = torch.cat([*(heads[h][1] for heads in packed), new_values[h]])
            expected = (0.3 * queries[h] @ keys.T).softmax(dim=-1) @ values
            torch.testing.assert_close(output[h], expected, atol=1e-3, rtol=1e-3)


def test_what_was_laid_down_in_inference_mode_serves_outside_it():
    step = make(2, 3, 300, 16, 2)
    with torch.inference_mode():
        expected = trizone_decode(*step, scaling=0.3)
    assert torch.equal(trizone_decode(*step, scaling=0.3), expected)
    with torch.inference_mode():
        assert torch.equal(trizone_decode(*step, scaling=0.3), expected)


def test_threads_attend_to_one_layer_each_in_its_own_memory():
    step = make(2, 3, 300, 16, 2)
    expected = trizone_decode(*step, scaling=0.3)
    outputs: list[torch.Tensor] = []

    def attend() -> None:
        outputs.extend(trizone_decode(*step, scaling=0.3) for _ in range(20))

    threads = [threading.Thread(target=attend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(outputs) == 60
    assert all(torch.equal(output, expected) for output in outputs)


def test_a_layer_is_freed_with_what_was_laid_down_for_it():
    queries, packed, new_keys, new_values = make(2, 2, 40, 8, 3)
    another = make(2, 2, 10, 8, 0)[1]
    trizone_decode_segments(queries, [packed, another], new_keys, new_values, scaling=0.3)
    left = [weakref.ref(packed), weakref.ref(another)]
    del packed, another
    assert [of() for of in left] == [None, None]


class LargestFloats(TorchDispatchMode):
    """Elements of the largest float32 tensor that an operator returned."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.dtype == torch.float32:
            self.num_elements = max(self.num_elements, output.numel())
        return output


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_no_more_than_a_tile_of_codes_is_unpacked_at_a_time(bits):
    head_dim = 16
    num_tokens = 3 * tiles.TILE_ELEMENTS // head_dim + 5
    generator = torch.Generator().manual_seed(bits)
    rows = torch.randn(1, num_tokens, head_dim, generator=generator)
    widths = torch.full((1, num_tokens), bits, dtype=torch.uint8)
    packed = pack_layer(rows, rows, widths[:, :head_dim], widths)
    queries = torch.randn(1, 2, head_dim, generator=generator)
    with LargestFloats() as largest:
        trizone_decode(queries, packed, rows[:, :1], rows[:, :1], scaling=0.5)
    assert largest.num_elements == tiles.TILE_ELEMENTS


def test_a_head_that_keeps_nothing_attends_to_the_new_tokens():
    queries, _, new_keys, new_values = make(2, 2, 8, 4, 3)
    none = torch.zeros(2, 8, dtype=torch.uint8)
    rows = torch.zeros(2, 8, 4)
    packed = pack_layer(rows, rows, none[:, :4], none)
    output = trizone_decode(queries, packed, new_keys, new_values, scaling=0.3)
    torch.testing.assert_close(output, dense_decode(queries, new_keys, new_values, scaling=0.3))
    with pytest.raises(ValueError, match="has no token"):
        trizone_decode(queries, packed, new_keys[:, :0], new_values[:, :0], scaling=0.3)


def test_misfits_are_named():
    queries, packed, new_keys, new_values = make(2, 2, 8, 4, 3)
    with pytest.raises(ValueError, match=r"\[H_kv, m, D\]"):
        trizone_decode(queries, packed, new_keys, new_values[:, :1], scaling=0.3)
    with pytest.raises(ValueError, match="2 heads of 4 channels"):
        trizone_decode(queries[:1], packed, new_keys[:1], new_values[:1], scaling=0.3)
    with pytest.raises(ValueError, match="float64"):
        trizone_decode(queries.double(), packed, new_keys, new_values, scaling=0.3)
