"""Attention over heads of different lengths is dense attention of each head alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.reference.dense import dense_decode
from kvtest.reference.dense import ragged_decode as reference

from kvferry.kernels.ragged_decode import ragged_decode

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def make(head_rows, num_new, group_size, *, dim=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(head_rows) * 10 + num_new)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    heads = len(head_rows)
    cache = torch.full((2, heads, num_new + 2, dim), torch.nan, dtype=dtype)
    cache[:, :, :num_new] = draw(2, heads, num_new, dim)
    return {
        "queries": draw(heads, group_size, dim),
        "head_rows": head_rows,
        "keys": draw(sum(head_rows), dim),
        "values": draw(sum(head_rows), dim),
        "new_keys": cache[0, :, :num_new],
        "new_values": cache[1, :, :num_new],
    }


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize(
    ("head_rows", "num_new"), [((1,), 0), ((0, 1), 1), ((3, 3, 3), 2), ((1, 40, 7), 0), ((0, 0), 5)]
)
def test_agrees_with_the_reference_beside_poisoned_rows(head_rows, num_new, group_size, dtype):
    arguments = make(head_rows, num_new, group_size, dtype=dtype)
    output = ragged_decode(**arguments, scaling=0.4)
    assert output.dtype == dtype
    expected = reference(**arguments, scaling=0.4)
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@given(head_rows=st.lists(st.integers(0, 20), min_size=1, max_size=5), num_new=st.integers(1, 4))
def test_a_head_sees_its_own_rows_and_no_others(head_rows, num_new):
    arguments = make(tuple(head_rows), num_new, 2)
    output = ragged_decode(**arguments, scaling=0.4)
    start = 0
    for head, count in enumerate(head_rows):
        pieces = [
            torch.cat([arguments[old][start : start + count], arguments[new][head]])[None]
            for old, new in (("keys", "new_keys"), ("values", "new_values"))
        ]
        expected = dense_decode(arguments["queries"][head : head + 1], *pieces, scaling=0.4)
        torch.testing.assert_close(output[head : head + 1], expected, atol=3e-6, rtol=3e-6)
        start += count


def test_refuses_arguments_that_do_not_fit():
    arguments = make((2, 5), 1, 2)
    for changes in ({"head_rows": (2, 4)}, {"head_rows": (7,)}, {"head_rows": (8, -1)}):
        with pytest.raises(ValueError, match="rows of each head"):
            ragged_decode(**{**arguments, **changes}, scaling=1.0)
    with pytest.raises(ValueError, match="dtypes"):
        ragged_decode(**{**arguments, "values": arguments["values"].half()}, scaling=1.0)
    with pytest.raises(ValueError, match="it must have one"):
        ragged_decode(**make((3, 0), 0, 1), scaling=1.0)


@pytest.mark.parametrize(("head_rows", "num_new"), [((5,), 0), ((0, 1), 1), ((1, 40, 7), 2)])
def test_values_of_latent_rows_have_fewer_channels(head_rows, num_new):
    arguments = make(head_rows, num_new, 3)
    whole = {**arguments, "values": arguments["keys"], "new_values": arguments["new_keys"]}
    narrow = {**whole, "values": whole["keys"][..., :4], "new_values": whole["new_keys"][..., :4]}
    output = ragged_decode(**narrow, scaling=0.4)
    torch.testing.assert_close(output, reference(**whole, scaling=0.4)[..., :4], atol=3e-6, rtol=3e-6)
    with pytest.raises(ValueError, match="must be"):
        ragged_decode(**{**narrow, "new_values": whole["new_keys"]}, scaling=0.4)
