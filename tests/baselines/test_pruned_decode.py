"""Attention on pruned K agrees with the plain reference, which pads lost channels with zeros."""

import pytest
import torch
from kvtest.reference.dense import dense_decode
from kvtest.reference.dense import pruned_decode as reference

from kvferry.baselines.think import pruned_decode

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def make(num_rows, num_new, group_size, kept, *, dim=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_rows * 100 + num_new * 10 + group_size)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    channels = torch.stack([torch.randperm(dim, generator=generator)[:kept].sort().values for _ in range(3)])
    cache = torch.full((2, 3, num_new + 2, dim), torch.nan, dtype=dtype)
    cache[:, :, :num_new] = draw(2, 3, num_new, dim)
    return {
        "queries": draw(3, group_size, dim),
        "channels": channels.to(torch.int16),
        "keys": draw(3, num_rows, kept),
        "values": draw(3, num_rows, dim),
        "new_keys": cache[0, :, :num_new],
        "new_values": cache[1, :, :num_new],
    }


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(("num_rows", "num_new"), [(0, 1), (1, 0), (1, 1), (37, 5)])
@pytest.mark.parametrize("kept", [1, 3, 7])
def test_agrees_with_the_reference_beside_poisoned_rows(num_rows, num_new, group_size, kept, dtype):
    arguments = make(num_rows, num_new, group_size, kept, dtype=dtype)
    output = pruned_decode(**arguments, scaling=0.4)
    assert output.dtype == dtype
    expected = reference(**arguments, scaling=0.4)
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_with_all_channels_it_is_dense_attention():
    arguments = make(9, 4, 2, 7)
    keys = torch.cat([arguments["keys"], arguments["new_keys"]], 1)
    values = torch.cat([arguments["values"], arguments["new_values"]], 1)
    expected = dense_decode(arguments["queries"], keys, values, scaling=0.4)
    torch.testing.assert_close(pruned_decode(**arguments, scaling=0.4), expected, atol=2e-6, rtol=2e-6)


def test_refuses_arguments_that_do_not_fit():
    arguments = make(9, 4, 2, 3)
    for name in ("channels", "keys", "values", "new_values"):
        with pytest.raises(ValueError, match="they must be"):
            pruned_decode(**{**arguments, name: arguments[name][:, 1:]}, scaling=1.0)
    with pytest.raises(ValueError, match="dtypes"):
        pruned_decode(**{**arguments, "keys": arguments["keys"].half()}, scaling=1.0)
    with pytest.raises(ValueError, match="nor a new one"):
        pruned_decode(**make(0, 0, 1, 2), scaling=1.0)
