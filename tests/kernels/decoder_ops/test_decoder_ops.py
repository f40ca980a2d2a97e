"""The decoder's small operations in the interpreter against torch, and torch against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kvferry.kernels import decoder_ops
from kvferry.kernels.decoder_ops import triton_kernel

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 4e-2}
"""The interpreter truncates where a GPU rounds to bfloat16."""


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype == dtype
        torch.testing.assert_close(one, other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1, 24, 5120])
@pytest.mark.parametrize("adds", [False, True])
def test_a_sum_and_its_norm(dtype: torch.dtype, size: int, adds: bool) -> None:
    hidden, weight = rows(3, size, dtype=dtype), rows(size, dtype=dtype, seed=2)
    residual = rows(3, size, dtype=dtype, seed=1) if adds else None
    hidden[1] = torch.nan  # a row's neighbours do not notice
    ours = triton_kernel.add_norm(hidden, residual, weight, 1e-5)
    theirs = decoder_ops.add_norm_torch(hidden, residual, weight, 1e-5)
    check(tuple(tensor[[0, 2]] for tensor in ours), tuple(tensor[[0, 2]] for tensor in theirs), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (6, 2, 24), (8, 8, 64)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotary_positions(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, has_norms: bool
) -> None:
    # parts of longer rows, as one product gives them
    units = [count * head_dim for count in (heads, kv_heads, kv_heads)]
    queries, keys, values = torch.split(rows(3, sum(units), dtype=dtype), units, dim=1)
    angles = rows(3, head_dim // 2, seed=2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (rows(head_dim, dtype=dtype), rows(head_dim, dtype=dtype, seed=3), 1e-6) if has_norms else None
    ours = triton_kernel.rotate(queries, keys, values, cos, sin, norms)
    check(ours, decoder_ops.rotate_torch(queries, keys, values, cos, sin, norms), dtype)
    assert torch.equal(ours[2].flatten(1), values)
    assert all(tensor.is_contiguous() for tensor in ours)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1, 1023, 2048])
def test_a_product_with_silu(dtype: torch.dtype, size: int) -> None:
    gate, up = (rows(3, 2 * size, dtype=dtype) * 8).chunk(2, dim=1)
    ours = (triton_kernel.silu_product(gate, up),)
    check(ours, (decoder_ops.silu_product_torch(gate, up),), dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [1, 37, 600])
@pytest.mark.parametrize("spread", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9999])
def test_the_smallest_weight_of_a_nucleus(size: int, spread: float, top_p: float) -> None:
    logits = (rows(3, size).double() * spread * 2).round() / 2  # with equals among them
    logits[:, 1::3] -= torch.inf  # masked
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    goal = top_p * weights.sum(1, keepdim=True)
    spoilt = weights.clone()
    spoilt[1, 0] = torch.nan  # a row's neighbours do not notice
    ours = triton_kernel.nucleus(spoilt, goal)
    assert torch.equal(ours[[0, 2]], decoder_ops.nucleus_torch(weights, goal)[[0, 2]])


def test_a_nucleus_of_a_vocabulary_of_several_blocks_with_a_part_of_one() -> None:
    weights = rows(2, 9000).double().mul(0.3).exp()
    goal = torch.tensor([[0.2], [0.95]]) * weights.sum(1, keepdim=True)
    assert torch.equal(triton_kernel.nucleus(weights, goal), decoder_ops.nucleus_torch(weights, goal))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_torch_is_bit_for_bit_transformers(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(24, eps=1e-5).to(dtype)
    norm.weight.data = rows(24, dtype=dtype)
    hidden, residual = rows(3, 24, dtype=dtype), rows(3, 24, dtype=dtype, seed=1)
    _, ours = decoder_ops.add_norm_torch(hidden, residual, norm.weight.data, 1e-5)
    assert torch.equal(ours, norm(residual + hidden))
    queries, keys, cos, sin = (rows(3, 2, 8, dtype=dtype, seed=seed) for seed in range(4))
    theirs = apply_rotary_pos_emb(queries[:, :, None], keys[:, :, None], cos[:, :1], sin[:, :1])
    flat = [tensor.flatten(1) for tensor in (queries, keys, keys)]
    rotated = decoder_ops.rotate_torch(*flat, cos[:, 0], sin[:, 0], None)[:2]
    assert all(torch.equal(one, other[:, :, 0]) for one, other in zip(rotated, theirs, strict=True))
