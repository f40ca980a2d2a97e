"""Grouped quantisation and attention on its codes agree with the plain reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.reference.dense import dense_decode
from kvtest.reference.scores import rounded

from kvferry.kernels.kivi import kivi_decode
from kvferry.kernels.kivi import rows as kivi_rows
from kvferry.kernels.kivi.rows import KiviRows, kivi_dequantise, kivi_quantise, kivi_shapes

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


def make(num_rows, *, heads=2, dim=5, seed=0, dtype=torch.float32):
    """K with channels of one sign, one constant channel, and channels of very different ranges."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, heads, num_rows, dim, generator=generator)
    keys = keys * torch.linspace(0.1, 5, dim) + 3
    keys[..., -1] = 0.25
    return keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("num_rows", "dim"), [(0, 3), (1, 3), (31, 1), (32, 7), (33, 5), (97, 6)])
def test_rows_survive_as_the_reference_rounds_them(num_rows, dim, bits):
    keys, values = make(num_rows, dim=dim)
    rows = kivi_quantise(keys, values, bits)
    shapes = kivi_shapes(num_rows, num_kv_heads=2, head_dim=dim, bits=bits)
    assert tuple(tuple(t.shape) for t in (rows.codes, rows.scales, rows.keys)) == shapes
    assert rows.scales.dtype == torch.float16
    assert rows.num_rows == num_rows
    for ours, expected in zip(kivi_dequantise(rows), rounded(keys, values, bits), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    left = num_rows % 32
    assert torch.equal(kivi_dequantise(rows)[0][:, num_rows - left :], keys[:, num_rows - left :])


@given(
    num_rows=st.integers(32, 100),
    dim=st.integers(1, 9),
    bits=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 99),
)
def test_no_value_moves_by_more_than_half_a_step_of_its_group(num_rows, dim, bits, seed):
    keys, values = make(num_rows, dim=dim, seed=seed)
    new_keys, new_values = kivi_dequantise(kivi_quantise(keys, values, bits))
    grouped = num_rows // 32 * 32
    step = half_step(keys[:, :grouped].unflatten(1, (-1, 32)), 2, bits).repeat_interleave(32, dim=1)
    assert ((new_keys - keys)[:, :grouped].abs() <= step).all()
    assert ((new_values - values)[:, :grouped].abs() <= half_step(values, 2, bits)[:, :grouped, None]).all()


def half_step(rows, dim, bits):
    """Half of a step between codes, at most: minima are up to 3 / 2048 lower, and scales as much higher."""
    low = rows.amin(dim)
    return (rows.amax(dim) - low + low.abs() * 3 / 2048) * (1 + 3 / 2048) / (2**bits - 1) / 2 + 1e-5


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(("num_rows", "num_new"), [(0, 1), (1, 0), (31, 2), (32, 0), (32, 1), (101, 3)])
def test_attention_on_codes_is_attention_on_what_they_stand_for(
    num_rows, num_new, group_size, dtype, monkeypatch
):
    monkeypatch.setattr(kivi_rows, "TILE_GROUPS", 2)  # several tiles, the last one short
    keys, values = make(num_rows, dim=7, seed=num_rows, dtype=dtype)
    rows = kivi_quantise(keys, values, 4)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(2, group_size, 7, generator=generator).to(dtype)
    cache = torch.full((2, 2, num_new + 2, 7), torch.nan, dtype=dtype)
    cache[:, :, :num_new] = torch.randn(2, 2, num_new, 7, generator=generator).to(dtype)
    new_keys, new_values = cache[0, :, :num_new], cache[1, :, :num_new]
    output = kivi_decode(queries, rows, new_keys, new_values, scaling=0.3)
    assert output.dtype == dtype
    whole = [
        torch.cat([old.float(), new.float()], 1)
        for old, new in zip(rounded(keys, values, 4), (new_keys, new_values), strict=True)
    ]
    expected = dense_decode(queries, *whole, scaling=0.3)
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_and_scales_have_the_size_of_their_formula(bits):
    keys, values = make(64, heads=3, dim=128)
    rows = kivi_quantise(keys, values, bits)
    assert rows.codes.numel() == 2 * 3 * 64 * 128 * bits // 8
    assert rows.scales.nbytes == 2 * 3 * 2 * (2 * 128 + 2 * 32)


def test_what_cannot_be_is_refused():
    keys, values = make(40)
    with pytest.raises(ValueError, match="bits is 3"):
        kivi_quantise(keys, values, 3)
    with pytest.raises(ValueError, match="must be \\[H_kv, n, D\\]"):
        kivi_quantise(keys, values[:, 1:], 4)
    poisoned = keys.clone()
    for value in (torch.nan, torch.inf, 1e6):  # the last is beyond float16
        poisoned[1, 3, 0] = value
        with pytest.raises(ValueError, match="not finite"):
            kivi_quantise(poisoned, values, 4)
    rows = kivi_quantise(keys, values, 4)
    with pytest.raises(ValueError, match="must be"):
        KiviRows(bits=8, codes=rows.codes, scales=rows.scales, keys=rows.keys, values=rows.values)
    queries, none = torch.zeros(2, 1, 5), torch.zeros(2, 0, 5)
    with pytest.raises(ValueError, match="nor a new one"):
        kivi_decode(queries, kivi_quantise(none, none, 4), none, none, scaling=1.0)
    with pytest.raises(ValueError, match="do not fit"):
        kivi_decode(torch.zeros(2, 1, 4), rows, none[..., :4], none[..., :4], scaling=1.0)
    with pytest.raises(ValueError, match="new_keys"):
        kivi_decode(queries, rows, none[:1], none, scaling=1.0)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("group_size", [1, 8])
@pytest.mark.parametrize(("num_rows", "num_new"), [(1, 0), (31, 2), (32, 0), (70, 1), (101, 3)])
def test_latent_rows_are_quantised_as_keys_and_their_values_are_read_from_the_same_codes(
    num_rows, num_new, group_size, bits, monkeypatch
):
    monkeypatch.setattr(kivi_rows, "TILE_GROUPS", 2)
    latent = make(num_rows, dim=9, seed=num_rows)[0]
    rows = kivi_quantise(latent, latent[..., :6], bits, latent_dim=6)
    keys, values = kivi_dequantise(rows)
    torch.testing.assert_close(keys, rounded(latent, latent, bits)[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(values, keys[..., :6])
    assert rows.codes.shape[2:] == (9 * 32 * bits // 8,)
    assert rows.scales.shape[2:] == (2 * 9,)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(2, group_size, 9, generator=generator)
    new = torch.randn(2, num_new, 9, generator=generator)
    output = kivi_decode(queries, rows, new, new[..., :6], scaling=0.3)
    whole = torch.cat([keys, new], 1)
    expected = dense_decode(queries, whole, whole, scaling=0.3)[..., :6]
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def test_latent_rows_with_other_values_are_refused():
    latent = make(33, dim=9)[0]
    with pytest.raises(ValueError, match="must be"):
        kivi_quantise(latent, latent[..., :5], 4, latent_dim=6)
    rows = kivi_quantise(latent, latent[..., :6], 4, latent_dim=6)
    with pytest.raises(ValueError, match="do not fit"):
        kivi_decode(torch.ones(2, 1, 9), rows, torch.ones(2, 1, 9), torch.ones(2, 1, 9), scaling=1.0)
