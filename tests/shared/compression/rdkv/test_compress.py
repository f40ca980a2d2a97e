"""One layer through RDKV whole: what is packed is what was allocated, and attention on it stays close."""

import pytest
import torch
from kvtest.packed import trizone_decode, unpack_layer

from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.packed.check import begin_packed_check
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.rdkv.compress import RdkvSettings, allocate_layer, compress_layer_rdkv
from kvferry.shared.compression.rdkv.epsilon import find_table
from kvferry.shared.errors import KvferryError

TABLE = find_table("LLaMA-3.1-8B")


def make_inputs(num_tokens, *, num_new=None, group_size=2, head_dim=16, seed=0):
    """Keys with one-signed outlier channels; the prompt's queries look at a few tokens each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_tokens, head_dim)
    keys = torch.randn(shape, generator=generator)
    keys[:, :, 3] += 20
    queries = torch.randn(2, group_size, num_new or num_tokens, head_dim, generator=generator)
    return LayerInputs(
        layer=0,
        queries=queries,
        keys=keys,
        values=torch.randn(shape, generator=generator),
        scaling=head_dim**-0.5,
    )


@pytest.mark.parametrize(("num_tokens", "num_new"), [(1, 1), (2, 1), (31, 31), (33, 7), (211, 211)])
@pytest.mark.parametrize("group_size", [1, 4])
def test_what_is_packed_is_what_was_allocated(num_tokens, num_new, group_size):
    inputs = make_inputs(num_tokens, num_new=num_new, group_size=group_size)
    settings = RdkvSettings(budget_tokens=8, table=TABLE)
    packed = compress_layer_rdkv(settings, inputs)
    begin_packed_check(packed, num_tokens)()
    for h, (_, _, positions) in enumerate(unpack_layer(packed)):
        expected = allocate_layer(settings, inputs).values[h].nonzero()[:, 0]
        assert torch.equal(positions.sort().values, expected)


def attention_error(inputs, budget_tokens):
    """Relative error of attention on the packed bytes, for the prompt's last queries."""
    packed = compress_layer_rdkv(RdkvSettings(budget_tokens=budget_tokens, table=TABLE), inputs)
    none = inputs.keys[:, :0]
    error = power = 0.0
    for i in range(-8, 0):
        queries = inputs.queries[:, :, i]
        exact = dense_decode(queries, inputs.keys, inputs.values, scaling=inputs.scaling)
        output = trizone_decode(queries, packed, none, none, scaling=inputs.scaling)
        error += float((output - exact).square().sum())
        power += float(exact.square().sum())
    return error / power


def test_attention_nears_the_exact_one_as_the_budget_grows():
    inputs = make_inputs(200)
    errors = [attention_error(inputs, budget) for budget in (10, 50, 100, 200)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 1e-2  # half the bits: every token at 8 on average
    assert errors[3] < 1e-5


def test_the_codes_variant_of_channel_weights_can_be_chosen():
    inputs = make_inputs(100)
    layers = [
        allocate_layer(RdkvSettings(budget_tokens=10, table=TABLE, channel_weights=variant), inputs)
        for variant in ("norms", "mean_squares")
    ]
    assert torch.equal(layers[0].values, layers[1].values)
    assert not torch.equal(layers[0].keys, layers[1].keys)


def test_keys_that_are_not_finite_are_refused():
    inputs = make_inputs(40)
    inputs.keys[0, 5] = float("nan")
    with pytest.raises((KvferryError, ValueError), match="finite"):
        compress_layer_rdkv(RdkvSettings(budget_tokens=8, table=TABLE), inputs)
