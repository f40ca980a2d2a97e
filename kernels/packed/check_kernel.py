"""The checks of a packed layer in Triton: programs of a head share its tokens, blocks and rows."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.packed.check import BAD_CHANNELS, BAD_HALVES, BAD_POSITIONS, BAD_SCALES
from kvferry.kernels.packed.layer import ENTRY_FIELDS, PackedLayer, packed_entries
from kvferry.kernels.packed.layout import position_dtype

_BLOCK = 1024
_PROGRAMS = 16
"""Programs of a head."""
_CHANNELS = tl.constexpr(BAD_CHANNELS)
_POSITIONS = tl.constexpr(BAD_POSITIONS)
_SCALES = tl.constexpr(BAD_SCALES)
_HALVES = tl.constexpr(BAD_HALVES)


@triton.jit
def _is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def _count_bad_index(index_ptr, seen_ptr, i, n, limit, first_4, first_8, first_16):
    """Count the indexes that are out of range, repeated, or not above the one before in their width."""
    inside = i < n
    number = tl.load(index_ptr + i, mask=inside, other=0).to(tl.int32)
    before = tl.load(index_ptr + i - 1, mask=inside & (i > 0), other=-1).to(tl.int32)
    valid = (number >= 0) & (number < limit)
    starts = (i == 0) | (i == first_4) | (i == first_8) | (i == first_16)
    earlier = tl.atomic_add(seen_ptr + tl.where(valid, number, 0), 1, mask=inside & valid)
    repeated = valid & (earlier > 0)
    bad = inside & ((valid == 0) | repeated | ((starts == 0) & (number <= before)))
    return tl.sum(bad.to(tl.int32), 0)


@triton.jit
def _count_bad_scales(scale_ptr, minimum_ptr, i, n):
    inside = i < n
    scale = tl.load(scale_ptr + i, mask=inside, other=1.0).to(tl.float32)
    minimum = tl.load(minimum_ptr + i, mask=inside, other=0.0)
    bad = inside & (((scale > 0) & _is_finite(scale) & _is_finite(minimum)) == 0)
    return tl.sum(bad.to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _check_kernel(
    words_ptr, halves_ptr, positions_ptr, entries_ptr, seen_ptr, out_ptr, num_tokens,
    D: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = entries_ptr + head * FIELDS
    c2, c4 = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    c8, c16 = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    t2, t4 = tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    t8, t16 = tl.load(row + 7).to(tl.int32), tl.load(row + 8).to(tl.int32)
    n = t2 + t4 + t8 + t16
    seen_ptr += head.to(tl.int64) * (D + num_tokens)
    d, k = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    channels, positions, scales, halves = 0, 0, 0, 0
    if part == 0:
        channels = _count_bad_index(
            words_ptr + tl.load(row + 10), seen_ptr, d, c2 + c4 + c8 + c16, D, c2, c2 + c4, c2 + c4 + c8
        )
    num_headers = tl.cdiv(n, 64) * (c2 + c4 + c8)
    for start in range(part * BLOCK, num_headers, parts * BLOCK):
        scales += _count_bad_scales(
            halves_ptr + tl.load(row + 11), halves_ptr + tl.load(row + 12), start + k, num_headers
        )
    for start in range(part * BLOCK, n, parts * BLOCK):
        positions += _count_bad_index(
            positions_ptr + tl.load(row + 19), seen_ptr + D, start + k, n, num_tokens,
            t2, t2 + t4, t2 + t4 + t8,
        )  # fmt: skip
        scales += _count_bad_scales(
            halves_ptr + tl.load(row + 13), halves_ptr + tl.load(row + 14), start + k, t2 + t4 + t8
        )
    # K words of 16-bit channels: the last ones of each block
    for block in range(part, tl.cdiv(n, 128), parts):
        lanes = tl.minimum((n - block * 128 + 7) // 8, 16)
        base = tl.load(row + 9) + block * (16 * (c2 + 2 * c4 + 4 * c8 + 8 * c16))
        base += lanes * (c2 + 2 * c4 + 4 * c8)
        for start in range(0, 8 * lanes * c16, BLOCK):
            i = start + k
            # padding tokens are ignored
            there = (i < 8 * lanes * c16) & (block * 128 + i % (8 * lanes) < n)
            halves += tl.sum(
                (_is_finite(tl.load(halves_ptr + base + i, mask=there, other=0.0)) == 0).to(tl.int32), 0
            )
    rows = halves_ptr + tl.load(row + 18)
    for start in range(part * BLOCK, t16 * D, parts * BLOCK):
        x = tl.load(rows + start + k, mask=start + k < t16 * D, other=0.0)
        halves += tl.sum((_is_finite(x) == 0).to(tl.int32), 0)
    found = tl.where(channels > 0, _CHANNELS, 0) + tl.where(positions > 0, _POSITIONS, 0)
    found += tl.where(scales > 0, _SCALES, 0) + tl.where(halves > 0, _HALVES, 0)
    tl.store(out_ptr + head * parts + part, found)


def begin(packed: PackedLayer, num_prompt_tokens: int) -> Tensor:
    """Queue the checks. Returns: int32 `[H_kv, programs]` on the device, for `faults`."""
    device, buffer, layout = packed.buffer.device, packed.buffer, packed.layout
    num_heads, head_dim = len(packed.heads), layout.head_dim
    (entries,) = packed_entries([packed], buffer)
    start, size_bytes = layout.kinds["index"]
    # int32, whatever they are stored as, so that the kernel is compiled once
    positions = buffer[start : start + size_bytes].view(position_dtype(layout.num_tokens)).to(torch.int32)
    for h, regions in enumerate(layout.regions):
        region = regions["positions"]
        entries[h, ENTRY_FIELDS - 1] = (region.offset - start) // region.dtype.itemsize
    seen = torch.zeros(num_heads, head_dim + num_prompt_tokens, dtype=torch.int32, device=device)
    found = torch.empty(num_heads, _PROGRAMS, dtype=torch.int32, device=device)
    _check_kernel[(num_heads, _PROGRAMS)](
        buffer.view(torch.int16), buffer.view(torch.float16), positions, entries.to(device), seen, found,
        num_prompt_tokens, D=head_dim, FIELDS=ENTRY_FIELDS, BLOCK=_BLOCK,
        BLOCK_D=max(triton.next_power_of_2(head_dim), 16), num_warps=8,
    )  # fmt: skip
    return found


def faults(found: Tensor) -> Tensor:
    """Combine each head's faults. Args: found: of `begin`, on the host. Returns: int32 `[H_kv]`."""
    return functools.reduce(torch.bitwise_or, found.unbind(1))
