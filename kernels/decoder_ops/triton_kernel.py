"""The decoder's small operations in Triton.

    _add_norm_kernel      (row): residual + hidden, and its RMSNorm
    _rotate_kernel        (row, head): RMSNorm of a head if there is one, then its rotary position
    _silu_product_kernel  (block): silu(gate) * up

Results are rounded to the rows' dtype where transformers' modules round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, eps, n, HAS_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * n
    i = tl.arange(0, BLOCK)
    inside = i < n
    loaded = tl.load(hidden_ptr + start + i, mask=inside, other=0.0)
    x = loaded.to(tl.float32)
    if HAS_SUM:
        residual = tl.load(residual_ptr + start + i, mask=inside, other=0.0).to(tl.float32)
        total = (residual + x).to(loaded.dtype)
        tl.store(sum_ptr + start + i, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    normed = (x * scale).to(loaded.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + i, (weight * normed).to(loaded.dtype), mask=inside)


@triton.jit
def _rotate_kernel(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr, query_out_ptr, key_out_ptr, eps,
    num_heads, num_kv_heads, D: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    is_first = d < D // 2
    other = tl.where(is_first, d + D // 2, d - D // 2)
    if head < num_heads:
        from_ptr, to_ptr, weight_ptr = query_ptr, query_out_ptr, query_weight_ptr
        start = (row * num_heads + head) * D
    else:
        from_ptr, to_ptr, weight_ptr = key_ptr, key_out_ptr, key_weight_ptr
        start = (row * num_kv_heads + head - num_heads) * D
    loaded = tl.load(from_ptr + start + d, mask=inside, other=0.0)
    dtype = loaded.dtype
    x = loaded.to(tl.float32)
    y = tl.load(from_ptr + start + other, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        of_x = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
        of_y = tl.load(weight_ptr + other, mask=inside, other=0.0).to(tl.float32)
        x = (of_x * (x * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        y = (of_y * (y * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + row * D + d, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * D + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(is_first, -y, y)
    rotated = (x * cos).to(dtype).to(tl.float32) + (y * sin).to(dtype).to(tl.float32)
    tl.store(to_ptr + start + d, rotated.to(dtype), mask=inside)


@triton.jit
def _silu_product_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    loaded = tl.load(gate_ptr + i, mask=i < size, other=0.0)
    x = loaded.to(tl.float32)
    up = tl.load(up_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(loaded.dtype).to(tl.float32)
    tl.store(out_ptr + i, (activated * up).to(loaded.dtype), mask=i < size)


def add_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.decoder_ops.add_norm`."""
    size = hidden.shape[1]
    total = hidden if residual is None else torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(len(hidden),)](
        hidden, hidden if residual is None else residual, weight, total, normed, eps, size,
        HAS_SUM=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return total, normed


def rotate(
    queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor, float] | None
) -> tuple[Tensor, Tensor]:
    """See `kernels.decoder_ops.rotate`."""
    head_dim = cos.shape[1]
    rotated = [torch.empty_like(its).view(len(its), -1, head_dim) for its in (queries, keys)]
    num_heads, num_kv_heads = (its.shape[1] for its in rotated)
    of_queries, of_keys, eps = norms if norms is not None else (cos, cos, 0.0)
    _rotate_kernel[(len(queries), num_heads + num_kv_heads)](
        queries, keys, cos, sin, of_queries, of_keys, rotated[0], rotated[1], eps, num_heads, num_kv_heads,
        D=head_dim, BLOCK=triton.next_power_of_2(head_dim), HAS_NORM=norms is not None, num_warps=1,
    )  # fmt: skip
    return rotated[0], rotated[1]


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """See `kernels.decoder_ops.silu_product`."""
    out = torch.empty_like(gate)
    _silu_product_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
        gate, up, out, gate.numel(), BLOCK=_BLOCK, num_warps=4
    )
    return out
