"""The decoder's small operations in Triton.

    _add_norm_kernel      (row): residual + hidden, and its RMSNorm
    _rotate_kernel        (row, head): RMSNorm of a head if there is one, its rotary position; a copy of V
    _silu_product_kernel  (block, row): silu(gate) * up
    _nucleus_kernel       (row, block): one digit of the smallest weight that top_p selects

Results are rounded to the rows' dtype where transformers' modules round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dependent_launch import begin_after_others, dependent

_BLOCK = 1024
_DIGIT_BITS = 4
_WAYS = tl.constexpr(1 << _DIGIT_BITS)
_NUCLEUS_BLOCKS = tl.constexpr(32)
"""Programs of a row, whatever the vocabulary: a constant, so that the kernel is compiled once."""
_NUCLEUS_TILE = tl.constexpr(256)
_FLOAT_BITS = 64
_LARGEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def _add_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, eps, n, HAS_SUM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
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
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr, query_out_ptr,
    key_out_ptr, value_out_ptr, eps, stride_query, stride_key, stride_value, num_heads, num_kv_heads,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    is_first = d < D // 2
    other = tl.where(is_first, d + D // 2, d - D // 2)
    kv_head = (head - num_heads) % num_kv_heads
    if head < num_heads:
        from_ptr, weight_ptr = query_ptr + row * stride_query + head * D, query_weight_ptr
        to_ptr = query_out_ptr + (row * num_heads + head) * D
    elif head < num_heads + num_kv_heads:
        from_ptr, weight_ptr = key_ptr + row * stride_key + kv_head * D, key_weight_ptr
        to_ptr = key_out_ptr + (row * num_kv_heads + kv_head) * D
    else:
        from_ptr, weight_ptr = value_ptr + row * stride_value + kv_head * D, key_weight_ptr
        to_ptr = value_out_ptr + (row * num_kv_heads + kv_head) * D
    loaded = tl.load(from_ptr + d, mask=inside, other=0.0)
    dtype = loaded.dtype
    x = loaded.to(tl.float32)
    y = tl.load(from_ptr + other, mask=inside, other=0.0).to(tl.float32)
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
    is_value = head >= num_heads + num_kv_heads
    tl.store(to_ptr + d, tl.where(is_value, loaded, rotated.to(dtype)), mask=inside)


@triton.jit
def _silu_product_kernel(
    gate_ptr, up_ptr, out_ptr, stride_gate, stride_up, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin_after_others(PDL)
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    loaded = tl.load(gate_ptr + row * stride_gate + i, mask=i < size, other=0.0)
    x = loaded.to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + i, mask=i < size, other=0.0).to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(loaded.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + i, (activated * up).to(loaded.dtype), mask=i < size)


# one kernel for all digits
@triton.jit(do_not_specialize=["shift"])
def _nucleus_kernel(
    weight_ptr, goal_ptr, sums_before_ptr, lows_before_ptr, sums_ptr, lows_ptr, n, chunk, shift,
    DIGIT_BITS: tl.constexpr,
):  # fmt: skip
    """Sum this block's weights above each of 16 candidates, `[row, block, 16]`.

    Weights are compared by their bits, which have the same order. `lows_before` has the digits above `shift`
    + 4 of the largest number above which the weights sum up to the goal; `sums_before` gives the next digit.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    way = tl.arange(0, _WAYS)
    each = tl.arange(0, _NUCLEUS_BLOCKS)[:, None] * _WAYS + way[None, :]
    all_before = tl.sum(tl.load(sums_before_ptr + row * _NUCLEUS_BLOCKS * _WAYS + each), 0)
    enough = tl.sum((all_before >= tl.load(goal_ptr + row)).to(tl.int64), 0)
    digit = tl.maximum(enough - 1, 0)
    low = tl.load(lows_before_ptr + row) + (digit << (shift + DIGIT_BITS))
    tl.store(lows_ptr + row, low, mask=block == 0)
    candidate = low + (way.to(tl.int64) << shift)
    # the first digit's larger candidates have the sign bit set, so no weight is above them
    candidate = tl.where(candidate < low, _LARGEST, candidate)
    sums = tl.zeros([_WAYS], tl.float64)
    end = tl.minimum((block + 1) * chunk, n)
    for first in range(block * chunk, end, _NUCLEUS_TILE):
        i = first + tl.arange(0, _NUCLEUS_TILE)
        weight = tl.load(weight_ptr + row * n + i, mask=i < end, other=0.0)
        above = weight.to(tl.int64, bitcast=True)[:, None] > candidate[None, :]
        sums += tl.sum(tl.where(above, weight[:, None], 0.0), 0)
    tl.store(sums_ptr + (row * _NUCLEUS_BLOCKS + block) * _WAYS + way, sums)


def add_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = hidden.shape[1]
    total = hidden if residual is None else torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_norm_kernel[(len(hidden),)](
        hidden, hidden if residual is None else residual, weight, total, normed, eps, size,
        HAS_SUM=residual is not None, BLOCK=block, **dependent(hidden.device),
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return total, normed


def rotate(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, head_dim = cos.shape
    given = (queries, keys, values)
    made = [tensor.new_empty(num_rows, tensor.shape[1] // head_dim, head_dim) for tensor in given]
    num_heads, num_kv_heads = made[0].shape[1], made[1].shape[1]
    of_queries, of_keys, eps = norms if norms is not None else (cos, cos, 0.0)
    _rotate_kernel[(num_rows, num_heads + 2 * num_kv_heads)](
        *given, cos, sin, of_queries, of_keys, *made, eps, *(tensor.stride(0) for tensor in given), num_heads,
        num_kv_heads,
        D=head_dim, BLOCK=triton.next_power_of_2(head_dim), HAS_NORM=norms is not None,
        **dependent(queries.device), num_warps=1,
    )  # fmt: skip
    return made[0], made[1], made[2]


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    num_rows, size = gate.shape
    out = gate.new_empty(num_rows, size)
    _silu_product_kernel[(triton.cdiv(size, _BLOCK), num_rows)](
        gate, up, out, gate.stride(0), up.stride(0), size, BLOCK=_BLOCK, **dependent(gate.device), num_warps=4
    )
    return out


def nucleus(weights: Tensor, goal: Tensor) -> Tensor:
    num_rows, size = weights.shape
    blocks, ways = _NUCLEUS_BLOCKS.value, _WAYS.value
    chunk = triton.cdiv(triton.cdiv(size, blocks), _NUCLEUS_TILE.value) * _NUCLEUS_TILE.value
    # Each launch reads what the previous one has written; the first one finds digit 0 and reads nothing. Sums
    # of blocks beyond the vocabulary stay zero.
    sums = weights.new_zeros(2, num_rows, blocks, ways)
    # both begin at 16 bytes, so that the kernel is compiled once
    lows = torch.zeros(2, num_rows + num_rows % 2, dtype=torch.int64, device=weights.device)
    for number, shift in enumerate(range(_FLOAT_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS)):
        before, now = (number + 1) % 2, number % 2
        _nucleus_kernel[(num_rows, triton.cdiv(size, chunk))](
            weights, goal, sums[before], lows[before], sums[now], lows[now], size, chunk, shift,
            DIGIT_BITS=_DIGIT_BITS, num_warps=4,
        )  # fmt: skip
    digit = ((sums[now].sum(1) >= goal).sum(1) - 1).clamp(min=0)
    return (lows[now, :num_rows] + digit + 1).view(torch.float64)[:, None]
