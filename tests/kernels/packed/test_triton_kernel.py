"""The Triton kernels in the interpreter: the same bytes as the torch path, and the same refusals."""

from __future__ import annotations

import pytest
import torch
from kvtest.packed import GROUP_BOUNDARIES
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.layout import Bound
from kvferry.kernels.packed.packing import begin_packing, pack_layer

CPU = torch.device("cpu")


def pack_by(
    mode: dispatch.KernelMode, keys: Tensor, values: Tensor, bits: tuple[Tensor, Tensor]
) -> PackedLayer:
    dispatch.configure(mode, CPU)
    try:
        return pack_layer(keys, values, *bits)
    finally:
        dispatch.configure("auto", CPU)


@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "num_tokens", "head_dim", "widths"),
    [
        (torch.float32, 2, 300, 64, (0, 2, 4, 8, 16)),
        (torch.float16, 1, 140, 96, (2, 4)),
        (torch.bfloat16, 3, 9, 16, (0, 0, 8, 16)),
        (torch.float32, 1, 1, 32, (4,)),
        (torch.float32, 2, 5, 16, (0,)),
        (torch.bfloat16, 1, 37, 256, (0, 2, 4, 8, 16)),
        (torch.float16, 1, 3, 128, (2, 16)),
    ],
)
def test_bytes_equal_those_of_the_torch_path(
    dtype: torch.dtype, num_kv_heads: int, num_tokens: int, head_dim: int, widths: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    keys, values = torch.randn(2, num_kv_heads, num_tokens, head_dim, generator=generator).to(dtype)
    # a channel and a row without a range, and quotients half way between two codes
    keys[:, :, 0] = values[:, 0] = 1.5
    keys[:, :, 1] = torch.arange(num_tokens) % 7 / 2
    choices = torch.tensor(widths, dtype=torch.uint8)
    bits = tuple(
        choices[torch.randint(len(widths), (num_kv_heads, count), generator=generator)]
        for count in (head_dim, num_tokens)
    )
    assert len(bits) == 2
    ours, theirs = (pack_by(mode, keys, values, bits) for mode in ("triton", "torch"))
    assert ours.layout == theirs.layout
    assert torch.equal(ours.buffer, theirs.buffer)


@pytest.mark.parametrize("num_tokens", GROUP_BOUNDARIES)
def test_groups_of_any_length_have_the_bytes_of_the_torch_path(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    keys, values = torch.randn(2, 2, num_tokens, 16, generator=generator)
    keys *= 2.0 ** (torch.arange(num_tokens) // 32)[:, None]
    key_bits = torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8).repeat(2, 4)[:, :16]
    value_bits = torch.full((2, num_tokens), 2, dtype=torch.uint8)
    ours, theirs = (pack_by(mode, keys, values, (key_bits, value_bits)) for mode in ("triton", "torch"))
    assert ours.layout == theirs.layout
    assert torch.equal(ours.buffer, theirs.buffer)


def test_what_is_not_kept_need_not_be_finite() -> None:
    keys, values = torch.randn(2, 1, 20, 32)
    keys[:, :, 3] = torch.nan
    keys[:, 7] = torch.inf
    values[:, 7] = torch.inf
    key_bits, value_bits = (
        torch.full((1, 32), 4, dtype=torch.uint8),
        torch.full((1, 20), 2, dtype=torch.uint8),
    )
    key_bits[:, 3] = value_bits[:, 7] = 0
    ours, theirs = (pack_by(mode, keys, values, (key_bits, value_bits)) for mode in ("triton", "torch"))
    assert torch.equal(ours.buffer, theirs.buffer)


@pytest.mark.parametrize(("width", "bad"), [(4, torch.nan), (16, 1e6)])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_values_that_cannot_be_kept_are_refused(width: int, bad: float, which: str) -> None:
    rows = {name: torch.randn(1, 3, 16) for name in ("keys", "values")}
    rows[which][0, 1, 2] = bad
    bits = tuple(torch.full((1, count), width, dtype=torch.uint8) for count in (16, 3))
    assert len(bits) == 2
    with pytest.raises(ValueError, match="finite"):
        pack_by("triton", rows["keys"], rows["values"], bits)


@pytest.mark.parametrize(
    ("usable", "width", "bound", "message"),
    [
        (False, 4, Bound(tokens=37, size_bytes=1 << 16), "weights must be finite"),
        (True, 5, Bound(tokens=37, size_bytes=1 << 16), r"5 channels and tokens are not one of \(0, 2"),
        (True, 4, Bound(tokens=36, size_bytes=1 << 16), "retain more than 36 tokens"),
        (True, 4, Bound(tokens=37, size_bytes=1024), "or 1024 bytes"),
    ],
)
def test_bits_that_mean_nothing_or_do_not_fit_are_refused_when_the_layer_is_handed_over(
    usable: bool, width: int, bound: Bound, message: str
) -> None:
    """And nothing is written outside the memory there is: the guard would fail the test."""
    keys, values = torch.randn(2, 2, 37, 16)
    key_bits, value_bits = (torch.full((2, count), 4, dtype=torch.uint8) for count in (16, 37))
    key_bits[0, 3:5] = value_bits[1, :3] = width
    dispatch.configure("triton", CPU)
    try:
        packing = begin_packing(keys, values, key_bits, value_bits, usable=torch.tensor(usable), bound=bound)
    finally:
        dispatch.configure("auto", CPU)
    _, buffer = packing.tensors
    assert buffer.shape == (bound.size_bytes,)
    assert not buffer.any()
    with pytest.raises(ValueError, match=message):
        packing.finish(packing.tensors)


def test_a_layer_takes_the_beginning_of_its_bound() -> None:
    generator = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, 3, 70, 16, generator=generator)
    choices = torch.tensor([0, 2, 4, 16], dtype=torch.uint8)
    bits = [choices[torch.randint(4, (3, count), generator=generator)] for count in (16, 70)]
    dispatch.configure("triton", CPU)
    try:
        packing = begin_packing(keys, values, *bits, bound=Bound(tokens=70, size_bytes=1 << 16))
        packed = packing.finish([tensor.clone() for tensor in packing.tensors])
    finally:
        dispatch.configure("auto", CPU)
    alone = pack_by("torch", keys, values, (bits[0], bits[1]))
    assert torch.equal(packed.buffer, alone.buffer)
    assert not packing.tensors[-1][packed.layout.size_bytes :].any()
