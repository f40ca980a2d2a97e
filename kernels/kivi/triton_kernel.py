"""KIVI decode attention in Triton: split-K over groups of codes and over plain rows; see `dense_decode`.

A tile of codes is some groups. 32-bit words are loaded, and their fields become bits of a float's mantissa:
`1 + code / 2^b`, so that no integer is converted. `s code + min = (s 2^b) (1 + code / 2^b) + (min - s 2^b)`.

K lies channel by channel, V token by token, each row with field f of byte i at place f * bytes + i
(`packed/value_rows.py`). Where D is no power of two, V's tile has its padding inside: `_channels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvferry.kernels.dense_decode.triton_kernel import (
    MAX_REGISTERS,
    MIN_SPLIT_BYTES,
    MORE_REGISTERS,
    decode_warps,
    dot_dtype,
)
from kvferry.kernels.dependent_launch import begin_after_others, dependent
from kvferry.kernels.descriptors import ALIGNMENT_BYTES, SplitWorkspace, choose_num_programs, split_workspace
from kvferry.kernels.dispatch import interpreting
from kvferry.kernels.kivi.rows import GROUP_TOKENS, KiviRows
from kvferry.kernels.split_attention import (
    LOG2_E,
    MIN_BLOCK_G,
    attend_tile,
    finish_split,
    load_queries,
    place_of,
)

_WARP_SIZE = 32
_GROUP = tl.constexpr(GROUP_TOKENS)
_WORD_ALIGN = tl.constexpr(ALIGNMENT_BYTES // 4)
_HEADER_ALIGN = tl.constexpr(ALIGNMENT_BYTES // 2)


@triton.jit
def _unpack(words, BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Unpack words `[ROWS, WORDS]` to `1 + code / 2^b`, by their places: float32 `[ROWS, 32 * WORDS / b]`."""
    shift = 8 * tl.arange(0, 4)[:, None] + BITS * tl.arange(0, 8 // BITS)[None, :]
    fields = (words[:, :, None, None] >> shift[None, None]) & ((1 << BITS) - 1)
    floats = ((fields << (23 - BITS)) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.permute(floats, (0, 3, 1, 2)), (ROWS, WORDS * (32 // BITS)))


@triton.jit
def _scaled(units, scale, minimum, BITS: tl.constexpr):
    """Turn `1 + code / 2^b` into `s code + min`."""
    step = scale * (1 << BITS)
    return units * step + (minimum - step)


@triton.jit
def _key_tile(
    word_ptr, scale_ptr, codes, scales, first, num_groups, BITS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Load K of some groups, float32 `[GROUPS * 32, BLOCK_D]`, zero beyond D and in missing groups."""
    # word by word, because a channel has too few for a wide load
    w, x = tl.arange(0, GROUPS * BLOCK_D * BITS), tl.arange(0, GROUPS * BLOCK_D)
    group, word = first + w // (BLOCK_D * BITS), w % (BLOCK_D * BITS)
    at = codes + group.to(tl.int64) * (2 * D * BITS) + word
    words = tl.load(word_ptr + at, mask=(group < num_groups) & (word < D * BITS), other=0)
    words = tl.reshape(words, (GROUPS * BLOCK_D, BITS))
    group, d = first + x // BLOCK_D, x % BLOCK_D
    ok = (group < num_groups) & (d < D)
    here = scales + group.to(tl.int64) * (2 * D + 2 * _GROUP) + d
    scale = tl.load(scale_ptr + here, mask=ok, other=0.0).to(tl.float32)
    minimum = tl.load(scale_ptr + here + D, mask=ok, other=0.0).to(tl.float32)
    units = _unpack(words, BITS, GROUPS * BLOCK_D, BITS)
    keys = tl.reshape(_scaled(units, scale[:, None], minimum[:, None], BITS), (GROUPS, BLOCK_D, _GROUP))
    return tl.reshape(tl.permute(keys, (0, 2, 1)), (GROUPS * _GROUP, BLOCK_D))


@triton.jit
def _value_tile(
    word_ptr, scale_ptr, codes, scales, first, num_groups, BITS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Load V of some groups, float32 `[GROUPS * 32, BLOCK_D]`, channels in the order of `_channels`."""
    w, x = tl.arange(0, BLOCK_D * BITS // 32), tl.arange(0, GROUPS * _GROUP)
    group, token = first + x // _GROUP, x % _GROUP
    ok = group < num_groups
    at = codes + group.to(tl.int64) * (2 * D * BITS) + D * BITS + token * (D * BITS // 32)
    mask = ok[:, None] & (w[None, :] < D * BITS // 32)
    words = tl.load(word_ptr + at[:, None] + w[None, :], mask=mask, other=0)
    here = scales + group.to(tl.int64) * (2 * D + 2 * _GROUP) + 2 * D + token
    scale = tl.load(scale_ptr + here, mask=ok, other=0.0).to(tl.float32)
    minimum = tl.load(scale_ptr + here + _GROUP, mask=ok, other=0.0).to(tl.float32)
    units = _unpack(words, BITS, GROUPS * _GROUP, BLOCK_D * BITS // 32)
    return _scaled(units, scale[:, None], minimum[:, None], BITS)


@triton.jit
def _channels(BITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the channel at each place of V's tile, and whether there is one: `[BLOCK_D]`."""
    place = tl.arange(0, BLOCK_D)
    if D == BLOCK_D:
        return place, place < D
    else:
        at = place % (BLOCK_D * BITS // 8)
        channel = place // (BLOCK_D * BITS // 8) * (D * BITS // 8) + at
        return channel, at < D * BITS // 8


@triton.jit
def _attend_rows(
    q, key_ptr, value_ptr, length, first, begin, end, channel, there, highest, total, acc, scale_log2,
    stride_row, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attend to plain rows in the tiles from `begin` to `end`; tile `first` is that of row 0."""
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    for tile in range(tl.maximum(begin, first), tl.minimum(end, first + tl.cdiv(length, BLOCK_N))):
        row = (tile - first) * BLOCK_N + n
        ok = row < length
        at = row.to(tl.int64)[:, None] * stride_row
        k = tl.load(key_ptr + at + d[None, :], mask=ok[:, None] & (d[None, :] < D), other=0.0).to(DOT)
        v = tl.load(value_ptr + at + channel[None, :], mask=ok[:, None] & there[None, :], other=0.0).to(DOT)
        highest, total, acc = attend_tile(q, k, v, ok, highest, total, acc, scale_log2)
    return highest, total, acc


@triton.jit
def _parts(heads_ptr, h, ok, BLOCK_N: tl.constexpr, FIELDS: tl.constexpr):
    """Return heads' groups of codes, rows left over, new rows, and the tiles where the last two begin and
    end."""
    entry = heads_ptr + h * FIELDS
    length = tl.load(entry + 2, mask=ok, other=0).to(tl.int32)
    # a head without a length has no prompt either
    num_left = tl.where(length > 0, tl.load(entry + 5, mask=ok, other=0), 0).to(tl.int32)
    num_groups = tl.where(length > 0, tl.load(entry + 8, mask=ok, other=0), 0).to(tl.int32)
    first_left = tl.cdiv(num_groups * _GROUP, BLOCK_N)
    first_new = first_left + tl.cdiv(num_left, BLOCK_N)
    return num_groups, num_left, length, first_left, first_new, first_new + tl.cdiv(length, BLOCK_N)


@triton.jit
def _coded_tiles(heads_ptr, h, ok, BLOCK_N: tl.constexpr, FIELDS: tl.constexpr, BITS: tl.constexpr):
    """Count tiles as `row_tiles`. Another launch takes heads of another width; every launch takes heads
    without a length."""
    _, _, length, _, _, num_tiles = _parts(heads_ptr, h, ok, BLOCK_N, FIELDS)
    mine = ok & ((length == 0) | (tl.load(heads_ptr + h * FIELDS + 9, mask=ok, other=0) == BITS))
    return tl.where(mine, num_tiles, 0), mine


@triton.jit
def _kivi_decode_kernel(
    query_ptr, word_ptr, scale_ptr, left_key_ptr, left_value_ptr, new_key_ptr, new_value_ptr, heads_ptr,
    partial_ptr, lse_ptr, counter_ptr, out_ptr, scale_log2, stride_row, num_heads,
    BITS: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr, MIN_TILES: tl.constexpr, ALIGN: tl.constexpr, FIELDS: tl.constexpr,
    DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after_others(PDL)
    program = tl.program_id(0)
    BLOCK_N: tl.constexpr = GROUPS * _GROUP
    bh, begin, end, first_program, num_splits = place_of(
        heads_ptr, num_heads, program, tl.num_programs(0), _coded_tiles, MIN_TILES, BLOCK_N, FIELDS, BITS
    )
    if bh < num_heads:
        entry = heads_ptr + bh * FIELDS
        num_groups, num_left, length, first_left, first_new, _ = _parts(
            heads_ptr, bh, bh < num_heads, BLOCK_N, FIELDS
        )
        g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        q = load_queries(query_ptr, bh, g, d, G, D, DOT)
        highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        channel, there = _channels(BITS, D, BLOCK_D)
        codes = tl.multiple_of(tl.load(entry + 6), _WORD_ALIGN)
        scales = tl.multiple_of(tl.load(entry + 7), _HEADER_ALIGN)
        for tile in range(begin, tl.minimum(end, first_left)):
            first = tile * GROUPS
            k = _key_tile(word_ptr, scale_ptr, codes, scales, first, num_groups, BITS, D, BLOCK_D, GROUPS)
            v = _value_tile(word_ptr, scale_ptr, codes, scales, first, num_groups, BITS, D, BLOCK_D, GROUPS)
            ok = first * _GROUP + n < num_groups * _GROUP
            highest, total, acc = attend_tile(q, k.to(DOT), v.to(DOT), ok, highest, total, acc, scale_log2)
        keys, values = tl.multiple_of(tl.load(entry + 3), ALIGN), tl.multiple_of(tl.load(entry + 4), ALIGN)
        highest, total, acc = _attend_rows(
            q, left_key_ptr + keys, left_value_ptr + values, num_left, first_left, begin, end,
            channel, there, highest, total, acc, scale_log2, stride_row, D, BLOCK_D, BLOCK_N, DOT,
        )  # fmt: skip
        keys, values = tl.multiple_of(tl.load(entry), ALIGN), tl.multiple_of(tl.load(entry + 1), ALIGN)
        highest, total, acc = _attend_rows(
            q, new_key_ptr + keys, new_value_ptr + values, length, first_new, begin, end,
            channel, there, highest, total, acc, scale_log2, stride_row, D, BLOCK_D, BLOCK_N, DOT,
        )  # fmt: skip
        finish_split(
            acc, highest, total, partial_ptr, lse_ptr, counter_ptr, out_ptr, bh,
            program, first_program, num_splits, g, tl.where(there, channel, D), G, D,
        )  # fmt: skip


class Buffers(NamedTuple):
    """What offsets count from: codes as int32, scales as float16, rows in the queries' dtype. All of a batch
    are one arena."""

    words: Tensor
    scales: Tensor
    left_keys: Tensor
    left_values: Tensor
    new_keys: Tensor
    new_values: Tensor

    @classmethod
    def of_arena(cls, base: Tensor, codes: Tensor) -> Buffers:
        """Make the buffers of an arena. Args: the arena in the rows' dtype, and as uint8."""
        return cls(codes.view(torch.int32), codes.view(torch.float16), base, base, base, base)


def kivi_decode_batch(
    queries: Tensor,
    buffers: Buffers,
    heads: Tensor,
    *,
    bits: int,
    row_stride: int,
    scaling: float,
    workspace: SplitWorkspace,
    output: Tensor,
) -> None:
    """Attend with one new token of every sequence of a batch whose codes have one width, in one launch.

    Args:
        queries: contiguous `[B, H_kv, G, D]`.
        heads: int64 `[B * H_kv, FIELDS]`, see `batch.py`.
        row_stride: elements from one row to the next.
        workspace: as of `dense_decode_batch`.
        output: out, contiguous `[B, H_kv, G, D]` in the queries' dtype; zero of a head without a length,
            unchanged of a head of another width.
    """
    batch_size, num_kv_heads, group_size, head_dim = queries.shape
    block_d = max(triton.next_power_of_2(head_dim), 16)
    groups = block_groups(bits, block_d)
    warps = decode_warps(block_d)
    tile_bytes = groups * GROUP_TOKENS * head_dim * bits // 4
    _kivi_decode_kernel[(len(workspace.lse),)](
        queries, *buffers, heads, workspace.partial, workspace.lse, workspace.counters, output,
        scaling * LOG2_E, row_stride, batch_size * num_kv_heads,
        BITS=bits, G=group_size, BLOCK_G=MIN_BLOCK_G, D=head_dim, BLOCK_D=block_d, GROUPS=groups,
        MIN_TILES=max(MIN_SPLIT_BYTES // tile_bytes, 1), ALIGN=ALIGNMENT_BYTES // queries.element_size(),
        FIELDS=heads.shape[1], DOT=dot_dtype(queries.dtype), **dependent(queries.device),
        num_warps=warps, num_stages=2,
        maxnreg=MORE_REGISTERS if groups > 1 or block_d == 128 else MAX_REGISTERS,
    )  # fmt: skip


def kivi_decode(
    queries: Tensor, rows: KiviRows, new_keys: Tensor, new_values: Tensor, *, scaling: float
) -> Tensor:
    """Run one sequence of `kivi_decode_batch`; `__init__.py` checks arguments."""
    num_kv_heads, _, head_dim = queries.shape
    codes, scales = rows.codes, rows.scales
    places = [(tensor.stride(0), tensor.shape[1]) for tensor in (new_keys, rows.keys, codes, scales)]
    (new_step, num_new), (left_step, num_left), (code_step, num_groups), (scale_step, _) = places
    per_head = [new_step, new_values.stride(0), 0, left_step, left_step, 0, code_step // 4, scale_step, 0, 0]
    fixed = torch.tensor([0, 0, num_new, 0, 0, num_left, 0, 0, num_groups, rows.bits])
    heads = fixed + torch.arange(num_kv_heads)[:, None] * torch.tensor(per_head)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    kivi_decode_batch(
        queries.contiguous()[None],
        Buffers(codes.view(torch.int32), scales, rows.keys, rows.values, new_keys, new_values),
        heads.to(queries.device, non_blocking=True),
        bits=rows.bits,
        row_stride=head_dim,
        scaling=scaling,
        workspace=split_workspace(output, choose_num_programs(num_kv_heads, queries.device)),
        output=output[None],
    )
    return output


def block_groups(bits: int, block_d: int) -> int:
    """Return the groups per tile: as many as give each thread 16 bytes of K's codes, at most two, because
    registers would spill.

    The interpreter has larger tiles, because its cost is per operation.
    """
    if interpreting():
        return 4
    group_bytes = block_d * bits * (GROUP_TOKENS // 8)
    return 2 if group_bytes < ALIGNMENT_BYTES * _WARP_SIZE * decode_warps(block_d) else 1
