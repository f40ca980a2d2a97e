"""Packing V in Triton: each row's range, then its codes.

    _pack_values_kernel  (item): some tokens of one head and width

Imported only by `triton_kernel.py`, because it imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.packed.key_packing import codes_of


@triton.jit
def _pack_rows(
    values_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, row, start, rows, begin, end, stride_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Tokens begin .. end of the zone that starts at packed token `start`; rows: its offset in elements."""
    for t0 in range(begin, end, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        there = t < end
        position = tl.load(ints_ptr + tl.load(row + 19) + start + t, mask=there, other=0).to(tl.int64)
        if W == 16:
            d = tl.arange(0, BLOCK_D)
            ok = there[:, None] & (d[None, :] < D)
            x = tl.load(values_ptr + position[:, None] * stride_row + d[None, :], mask=ok, other=0.0)
            at = rows + t.to(tl.int64)[:, None] * D + d[None, :]
            x = x.to(tl.float32)
            # NaN, and what would round to infinity, is refused afterwards
            x = tl.where(tl.abs(x) < 65520.0, x, float("inf"))
            tl.store(halves_ptr + at, x.to(tl.float16), mask=ok)
        else:
            PER_BYTE: tl.constexpr = 8 // W
            STRIDE: tl.constexpr = D // PER_BYTE
            i = tl.arange(0, BLOCK_D // PER_BYTE)
            ok = there[:, None] & (i[None, :] < STRIDE)
            from_row = values_ptr + position[:, None] * stride_row + i[None, :]
            lowest = tl.full([BLOCK_T], float("inf"), tl.float32)
            highest = tl.full([BLOCK_T], float("-inf"), tl.float32)
            for p in tl.static_range(PER_BYTE):
                x = tl.load(from_row + p * STRIDE, mask=ok, other=0.0).to(tl.float32)
                top = tl.where(ok, tl.where(x == x, x, float("inf")), float("-inf"))
                bottom = tl.where(ok, tl.where(x == x, x, float("-inf")), float("inf"))
                highest, lowest = tl.maximum(highest, tl.max(top, 1)), tl.minimum(lowest, tl.min(bottom, 1))
            lowest, highest = tl.where(there, lowest, 0.0), tl.where(there, highest, 0.0)
            scale = tl.div_rn(highest - lowest, tl.full([BLOCK_T], (1 << W) - 1, tl.float32))
            scale = tl.where(scale > 0, scale, 1.0)
            # a row that is refused afterwards has arbitrary codes
            usable = (highest - lowest < float("inf"))[:, None]
            from_scale = tl.where(usable, scale[:, None], 1.0)
            from_lowest = tl.where(usable, lowest[:, None], 0.0)
            octet = tl.zeros([BLOCK_T, BLOCK_D // PER_BYTE], tl.int32)
            for p in tl.static_range(PER_BYTE):
                x = tl.load(from_row + p * STRIDE, mask=ok, other=0.0).to(tl.float32)
                x = tl.where(ok & usable, x, from_lowest)
                octet |= codes_of(x, from_lowest, from_scale, (1 << W) - 1) << (p * W)
            at = rows + t.to(tl.int64)[:, None] * STRIDE + i[None, :]
            tl.store(bytes_ptr + at, octet.to(tl.uint8), mask=ok)
            tl.store(floats_ptr + tl.load(row + 13) + start + t, scale, mask=there)
            tl.store(floats_ptr + tl.load(row + 14) + start + t, lowest, mask=there)


@triton.jit
def _pack_values_kernel(
    value_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, entries_ptr, items_ptr, stride_head, stride_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    item = items_ptr + tl.program_id(0) * 4
    head, kind, begin, end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    row = entries_ptr + head * FIELDS
    t2, t4, t8 = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    values_ptr = value_ptr + head.to(tl.int64) * stride_head
    if kind == 0:
        _pack_rows(
            values_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, row, 0, tl.load(row + 15) * 2, begin,
            end, stride_row, D, BLOCK_D, BLOCK_T, 2,
        )  # fmt: skip
    elif kind == 1:
        _pack_rows(
            values_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, row, t2, tl.load(row + 16) * 2, begin,
            end, stride_row, D, BLOCK_D, BLOCK_T, 4,
        )  # fmt: skip
    elif kind == 2:
        _pack_rows(
            values_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, row, t2 + t4, tl.load(row + 17) * 2,
            begin, end, stride_row, D, BLOCK_D, BLOCK_T, 8,
        )  # fmt: skip
    else:
        _pack_rows(
            values_ptr, bytes_ptr, halves_ptr, ints_ptr, floats_ptr, row, t2 + t4 + t8, tl.load(row + 18),
            begin, end, stride_row, D, BLOCK_D, BLOCK_T, 16,
        )  # fmt: skip
