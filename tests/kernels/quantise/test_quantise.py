"""The quantiser agrees with the value-by-value reference and keeps what a clamped zero point loses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.reference.scores import quantise_row

from kvferry.kernels.quantise import dequantise_rows, quantise_rows

WIDTHS = (2, 4, 8)


def clamped_zero_point_nmse(row, bits):
    """The authors' quantiser: z = clamp(round(-min / s), 0, 2^b - 1), code = round(x / s) + z."""
    levels = 2**bits - 1
    scale = (row.max() - row.min()) / levels
    zero = (-row.min() / scale).round().clamp(0, levels)
    code = ((row / scale).round() + zero).clamp(0, levels)
    return float((scale * (code - zero) - row).square().mean() / row.square().mean())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (3, 129), (2, 3, 31)])
def test_codes_equal_the_reference(bits, shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 5 + 1
    codes, scales, minima = quantise_rows(rows, bits)
    assert codes.dtype == torch.uint8
    flat = zip(rows.flatten(0, -2), codes.flatten(0, -2), scales.flatten(), minima.flatten(), strict=True)
    for row, code, scale, minimum in flat:
        expected, expected_scale, expected_minimum = quantise_row(row, bits)
        assert float(scale) == pytest.approx(expected_scale, rel=1e-5)
        assert float(minimum) == expected_minimum
        # float32 may round a value that lies halfway between two codes the other way
        differs = (code.long() - torch.tensor(expected)).abs()
        assert differs.max() <= 1
        assert differs.sum() <= 1


@given(
    row=st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=40), bits=st.sampled_from(WIDTHS)
)
def test_no_value_is_off_by_more_than_half_a_step(row, bits):
    values = torch.tensor([row])
    codes, scales, minima = quantise_rows(values, bits)
    assert int(codes.max()) < 2**bits
    error = (dequantise_rows(codes, scales, minima) - values).abs().max()
    rounding = 1e-6 * float(values.abs().max())
    assert float(error) <= 0.5 * float(scales[0]) * (1 + 1e-5) + rounding


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("value", [0.0, -3.25, 60000.0])
def test_a_row_without_range_comes_back_exactly(bits, value):
    codes, scales, minima = quantise_rows(torch.full((1, 9), value), bits)
    assert codes.eq(0).all()
    assert scales.eq(1).all()
    assert dequantise_rows(codes, scales, minima).eq(value).all()


def test_a_range_too_small_to_divide_counts_as_none():
    tiny = torch.tensor([[0.0, 1e-45]])
    codes, scales, minima = quantise_rows(tiny, 8)
    assert scales.eq(1).all()
    assert dequantise_rows(codes, scales, minima).isfinite().all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_one_signed_channel_keeps_its_precision(bits):
    channel = 20 + torch.randn(1, 1024, generator=torch.Generator().manual_seed(0))
    ours = dequantise_rows(*quantise_rows(channel, bits))
    nmse = float((ours - channel).square().mean() / channel.square().mean())
    assert clamped_zero_point_nmse(channel, bits) == pytest.approx(0.41, abs=0.06)
    assert nmse == pytest.approx({2: 1.2e-3, 4: 4.2e-5, 8: 1.4e-7}[bits], rel=0.35)


def test_a_minimum_far_beyond_the_range_costs_no_precision():
    channel = torch.linspace(4000, 4001, 257)[None]
    ours = dequantise_rows(*quantise_rows(channel, 8))
    assert float((ours - channel).abs().max()) <= 0.5 / 255 + 3e-4  # 4000 has a float32 spacing of 2.4e-4


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("offset", [-300.0, -1.0, 0.0, 1e-6, 20.0, 3000.0])
def test_half_precision_headers_still_cover_the_row(bits, offset):
    """The minimum is rounded down and the scale up, so no value is further from a code than half a step."""
    rows = offset + torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    codes, scales, minima = quantise_rows(rows, bits, half=True)
    assert scales.dtype == minima.dtype == torch.float16
    assert (minima.float() <= rows.amin(dim=1)).all()
    error = (dequantise_rows(codes, scales, minima) - rows).abs()
    assert (error <= scales.float()[:, None] * 0.501 + abs(offset) * 1e-6).all()


def test_half_precision_headers_cost_no_accuracy_that_matters():
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(4))
    for bits in WIDTHS:
        whole, half = (
            (dequantise_rows(*quantise_rows(rows, bits, half=half)) - rows).square().mean()
            for half in (False, True)
        )
        assert half < 1.04 * whole


def test_a_constant_row_with_half_precision_headers_keeps_its_value():
    for value in (0.0, 3.5, -2.0, 1000.0, 0.1):
        rows = torch.full((1, 9), value)
        restored = dequantise_rows(*quantise_rows(rows, 4, half=True))
        assert restored.sub(value).abs().max() <= abs(value) * 2e-3


def test_rows_of_a_transposed_view_are_channels():
    keys = torch.randn(13, 5, generator=torch.Generator().manual_seed(1)).half()
    codes, scales, _ = quantise_rows(keys.T, 4)
    again = quantise_rows(keys.T.contiguous(), 4)
    assert torch.equal(codes, again[0])
    assert scales.shape == (5,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(bad):
    rows = torch.zeros(3, 5)
    rows[1, 2] = bad
    with pytest.raises(ValueError, match="finite"):
        quantise_rows(rows, 4)


@pytest.mark.parametrize(
    ("rows", "bits", "named"),
    [
        (torch.zeros(2, 2), 3, "bits is 3"),
        (torch.zeros(2, 0), 4, r"\(2, 0\)"),
        (torch.zeros(2, 2, dtype=torch.int32), 4, "int32"),
    ],
)
def test_what_cannot_be_quantised_is_named(rows, bits, named):
    with pytest.raises(ValueError, match=named):
        quantise_rows(rows, bits)
