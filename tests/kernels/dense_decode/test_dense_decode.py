"""Dense decode attention agrees with the plain float32 reference."""

import pytest
import torch
from kvtest.reference.dense import dense_decode as reference

from kvferry.kernels.dense_decode import dense_decode

# float32: SDPA sums in another order; half precision: rounding of the stored output and of P before P V.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("length", [1, 2, 7, 129])
def test_agrees_with_the_reference_on_a_slice_of_a_poisoned_cache(dtype, group_size, length):
    generator = torch.Generator().manual_seed(length * 10 + group_size)
    queries = torch.randn(3, group_size, 20, generator=generator).to(dtype)
    cache = torch.full((2, 3, length + 5, 20), float("nan"), dtype=dtype)
    cache[:, :, :length] = torch.randn(2, 3, length, 20, generator=generator).to(dtype)
    keys, values = cache[0, :, :length], cache[1, :, :length]
    output = dense_decode(queries, keys, values, scaling=0.3)
    assert output.dtype == dtype
    expected = reference(queries, keys, values, scaling=0.3)
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_one_token_returns_its_value_for_every_head_of_the_group():
    values = torch.randn(2, 1, 8)
    output = dense_decode(torch.randn(2, 4, 8), torch.randn(2, 1, 8), values, scaling=1.0)
    torch.testing.assert_close(output, values.expand(2, 4, 8))


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (torch.zeros(2, 0, 8), torch.zeros(2, 0, 8)),
        (torch.zeros(3, 4, 8), torch.zeros(3, 4, 8)),
        (torch.zeros(2, 4, 8), torch.zeros(2, 5, 8)),
        (torch.zeros(2, 4, 8).half(), torch.zeros(2, 4, 8).half()),
        (torch.zeros(2, 8, 4).transpose(1, 2), torch.zeros(2, 4, 8)),
    ],
    ids=["empty", "other heads", "lengths differ", "other dtype", "rows not contiguous"],
)
def test_refuses_arguments_that_do_not_fit(keys, values):
    with pytest.raises(ValueError, match=r"keys|dtypes|rows"):
        dense_decode(torch.zeros(2, 1, 8), keys, values, scaling=1.0)
