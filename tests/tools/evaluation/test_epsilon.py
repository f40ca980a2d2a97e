"""Measured distortion agrees with theory on Gaussian data."""

import math

import pytest
import torch

from kvferry.shared.compression.rdkv.epsilon import EpsilonTable
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.evaluation.epsilon import EpsilonAccumulator


def measure_epsilon(keys, values) -> EpsilonTable:
    """The table of one layer of one prompt."""
    accumulator = EpsilonAccumulator()
    accumulator.add(keys, values)
    return accumulator.table()


def expected_gaussian_nmse(num_samples, bits, *, draws=400, points=4001):
    """E of the min-max uniform quantiser's squared error on n samples of N(0, 1), which has unit power.

    The extremes are order statistics of n samples; between them lie n - 2 samples of a truncated normal,
    whose squared distance to the nearest of 2^b equidistant levels is integrated numerically; the extremes
    themselves are levels. No quantiser of the project is used.
    """
    generator = torch.Generator().manual_seed(1)
    u = torch.rand(2, draws, dtype=torch.float64, generator=generator)
    highest = u[0] ** (1 / num_samples)  # of n uniforms
    # The others lie uniformly below it; their least, by symmetry, is as far from 0 as a greatest from there.
    lowest = highest * (1 - u[1] ** (1 / (num_samples - 1)))
    low, high = (math.sqrt(2) * torch.erfinv(2 * p - 1) for p in (lowest, highest))
    grid = torch.linspace(0, 1, points, dtype=torch.float64)
    x = low[:, None] + (high - low)[:, None] * grid
    density = torch.exp(-x.square() / 2)
    step = (high - low)[:, None] / (2**bits - 1)
    error = (x - low[:, None] - ((x - low[:, None]) / step).round() * step).square()
    mean = (error * density).sum(dim=1) / density.sum(dim=1)
    return float(mean.mean()) * (num_samples - 2) / num_samples


@pytest.mark.parametrize(("num_tokens", "head_dim"), [(512, 64), (1021, 128)])
def test_epsilon_of_gaussian_data_agrees_with_theory(num_tokens, head_dim):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4, num_tokens, head_dim, generator=generator) * 3 + 50
    values = torch.randn(4, num_tokens, head_dim, generator=generator) * 0.2
    table = measure_epsilon(keys, values)
    for i, bits in enumerate((2, 4, 8)):
        assert table.keys[i] == pytest.approx(expected_gaussian_nmse(num_tokens, bits), rel=0.05)
        assert table.values[i] == pytest.approx(expected_gaussian_nmse(head_dim, bits), rel=0.05)


def test_keys_are_measured_per_channel_against_variance_and_values_per_token_against_energy():
    keys = torch.tensor([[[0.0], [1.0], [2.0], [3.0], [4.5]]]) + 100
    values = torch.tensor([[[0.0, 1.0, 2.0, 4.5]]]).expand(1, 5, 4) + 2
    table = measure_epsilon(keys, values.contiguous())
    # steps of 1.5: K 0 1.5 1.5 3 4.5 and V 0 1.5 1.5 4.5
    channel = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.5])
    assert table.keys[0] == pytest.approx(0.5 / 5 / float(channel.var(correction=0)), rel=1e-4)
    assert table.values[0] == pytest.approx(0.5 / (4 + 9 + 16 + 42.25), rel=1e-4)


def test_layers_and_prompts_are_averaged_over_units():
    generator = torch.Generator().manual_seed(2)
    pairs = [torch.randn(2, 2, n, 8, generator=generator) for n in (33, 70)]
    accumulator = EpsilonAccumulator()
    for keys, values in pairs:
        accumulator.add(keys, values)
    tables = [measure_epsilon(keys, values) for keys, values in pairs]
    # as many channels in both, but 33 and 70 tokens
    assert accumulator.table().keys[1] == pytest.approx((tables[0].keys[1] + tables[1].keys[1]) / 2)
    mean = (33 * tables[0].values[1] + 70 * tables[1].values[1]) / 103
    assert accumulator.table().values[1] == pytest.approx(mean)


def test_units_without_power_are_left_out():
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 1, 40, 4, generator=generator)
    expected = measure_epsilon(keys, values)
    constant = torch.cat([keys, torch.full((1, 40, 1), 7.0)], dim=2)
    zero = torch.cat([values, torch.zeros(1, 3, 4)], dim=1)
    table = measure_epsilon(constant, zero)
    assert table.keys == pytest.approx(expected.keys)
    assert table.values == pytest.approx(expected.values)
    with pytest.raises(ConfigurationError, match="0 K channels"):
        measure_epsilon(keys[:, :1], values[:, :1])
