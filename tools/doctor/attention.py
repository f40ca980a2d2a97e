"""Attention of a model's shape over caches large enough to time, and the bytes that each needs.

Each case is a step of one layer: its rows, page extremes, packed or quantised bytes lie one after another in
an arena of its own, as decode lays them out. The bytes are those that a kernel must read, as in the roofline
of `benchmarks/gpu`, which compares them with the bytes that its kernels are counted to request. Times
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels import hsa
from kvferry.kernels.column_sums import window_scores
from kvferry.kernels.decode_batch import BatchShape, CachedRows, NewTokens, SlotBatch, WindowRows
from kvferry.kernels.dense_decode.batch import DenseBatch, WindowBatch
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.hsa.batch import HsaBatch, SparseRows
from kvferry.kernels.kivi.batch import KiviBatch, QuantisedRows
from kvferry.kernels.kivi.rows import WORD_BITS, kivi_quantise
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed.packing import fill_in_torch, indexed_layer
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch

NUM_SLOTS = 4
"""Sequences of a batch whose programs do not divide long heads among them."""
_NEW_ROWS = 64
"""Beside what is packed or quantised."""
_PACKED_TOKENS = 2048
"""Of a packed prompt: packing in torch is slow."""
_KIVI_BITS = 4
_WINDOW = 32
"""Queries that score a prompt."""
_PAGE_SIZE = 4
_PAGES_READ_AT_ONCE = 8
"""A channel's pages begin at multiples of as many."""


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One op. Attributes: what: its cache, in words; num_bytes: that a run must read; run: one layer's step;
    is_launched: whether kernels or C code run all sequences at once."""

    what: str
    num_bytes: int
    run: Callable[[], Tensor]
    is_launched: bool


class _Arena:
    """Memory that tensors are cut from."""

    def __init__(self, size_bytes: int, shape: BatchShape) -> None:
        self.codes = torch.zeros(size_bytes // 256 * 256, dtype=torch.uint8, device=shape.device)
        self.rows = self.codes.view(shape.dtype)
        self._shape, self._begin = shape, 0

    def take(self, dtype: torch.dtype, *size: int) -> Tensor:
        num_bytes = torch.Size(size).numel() * dtype.itemsize
        taken = self.codes[self._begin : self._begin + num_bytes].view(dtype).view(size)
        self._begin += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return taken

    def copy_of(self, tensor: Tensor) -> Tensor:
        return self.take(tensor.dtype, *tensor.shape).copy_(tensor)

    def keys_values(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Draw random rows."""
        keys, values = self.take(
            self._shape.dtype, 2, self._shape.num_kv_heads, capacity, self._shape.head_dim
        ).normal_()
        return keys, values


def _row_bytes(shape: BatchShape) -> int:
    """Return the bytes of K and V of a token."""
    return 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def _placed(
    batch: SlotBatch[Any, Any], rows: list[Any], shape: BatchShape, what: str, num_bytes: int
) -> AttentionCase:
    for slot, slot_rows in enumerate(rows):
        batch.place(slot, {0: slot_rows})
    scratch = batch.scratch(len(rows)) if batch.is_launched else None
    size = (len(rows), shape.num_kv_heads, shape.group_size, shape.head_dim)
    queries = torch.randn(size, device=shape.device).to(shape.dtype)
    keys, values = torch.randn(2, *size[:2], shape.head_dim, device=shape.device).to(shape.dtype)
    step = NewTokens(queries, keys, values, shape.head_dim**-0.5)
    return AttentionCase(
        what=what,
        num_bytes=num_bytes,
        run=lambda: batch.attend(0, step, errors={}, scratch=scratch),
        is_launched=batch.is_launched,
    )


def dense_case(shape: BatchShape, arena_bytes: int) -> AttentionCase:
    """Make the case of one sequence and all rows."""
    shape = replace(shape, num_slots=1)
    length = max(arena_bytes // _row_bytes(shape), _NEW_ROWS) - 1
    arena = _Arena((length + 1) * _row_bytes(shape) + 256, shape)
    keys, values = arena.keys_values(length + 1)
    rows = CachedRows(keys=keys, values=values, length=length)
    batch, num_bytes = DenseBatch(shape, arena.rows), (length + 1) * _row_bytes(shape)
    return _placed(batch, [rows], shape, f"{length + 1:,} rows", num_bytes)


def window_case(shape: BatchShape, arena_bytes: int) -> AttentionCase:
    """Make the case of one sequence and the last half of its rows."""
    shape = replace(shape, num_slots=1)
    length = max(arena_bytes // _row_bytes(shape), _NEW_ROWS) - 1
    window = (length + 1) // 2
    arena = _Arena((length + 1) * _row_bytes(shape) + 256, shape)
    keys, values = arena.keys_values(length + 1)
    rows = WindowRows(keys=keys, values=values, length=length, window=window, rows_before=None)
    what = f"the last {window:,} of {length + 1:,} rows"
    return _placed(WindowBatch(shape, arena.rows), [rows], shape, what, window * _row_bytes(shape))


def hsa_case(shape: BatchShape, arena_bytes: int) -> AttentionCase:
    """Make the case of pages of four rows, half of the channels, and an eighth of the rows."""
    shape = replace(shape, num_slots=NUM_SLOTS)
    # extremes of pages take half as much as rows
    most = min(arena_bytes * 2 // 3 // _row_bytes(shape) // NUM_SLOTS, hsa.MAX_PAGES * _PAGE_SIZE)
    pages = max(most // _PAGE_SIZE, 2 * _PAGES_READ_AT_ONCE) // _PAGES_READ_AT_ONCE * _PAGES_READ_AT_ONCE
    capacity, num_channels = pages * _PAGE_SIZE, max(shape.head_dim // 2, 1)
    num_tokens = max(capacity // 8, _PAGE_SIZE + 1)
    arena = _Arena(NUM_SLOTS * (3 * capacity * _row_bytes(shape) // 2 + 256), shape)
    rows = []
    for _ in range(NUM_SLOTS):
        keys, values = arena.keys_values(capacity)
        extremes = arena.take(shape.dtype, 2, shape.num_kv_heads, shape.head_dim, pages)
        page_max, page_min = extremes.mT
        hsa.page_extremes(keys, page_max, page_min, length=capacity - 1, page_size=_PAGE_SIZE)
        rows.append(
            SparseRows(
                keys=keys,
                values=values,
                length=capacity - 1,
                page_max=page_max,
                page_min=page_min,
                page_size=_PAGE_SIZE,
                num_channels=num_channels,
                num_tokens=num_tokens,
            )
        )
    of_head = pages * num_channels + 2 * num_tokens * shape.head_dim
    num_bytes = NUM_SLOTS * shape.num_kv_heads * of_head * shape.dtype.itemsize
    what = f"{NUM_SLOTS} sequences, {num_tokens:,} of {capacity:,} rows, {num_channels} channels"
    return _placed(HsaBatch(shape, arena.rows), rows, shape, what, num_bytes)


def trizone_case(shape: BatchShape, arena_bytes: int) -> AttentionCase:
    """Make the case of one packed prompt, copied to each sequence, and new rows."""
    generator = torch.Generator().manual_seed(5)
    tokens = max(min(arena_bytes // _row_bytes(shape) // 8, _PACKED_TOKENS), _NEW_ROWS)
    prompt = torch.randn(2, shape.num_kv_heads, tokens, shape.head_dim, generator=generator)
    widths = torch.tensor([0, 2, 2, 2, 4, 4, 8, 16], dtype=torch.uint8)
    channels, rows_bits = (
        widths[torch.randint(len(widths), (shape.num_kv_heads, count), generator=generator)].to(shape.device)
        for count in (shape.head_dim, tokens)
    )
    keys, values = prompt.to(shape.device)
    packed = indexed_layer(keys, values, channels, rows_bits)
    fill_in_torch(packed, keys, values)
    size, new_bytes = packed.layout.size_bytes, (_NEW_ROWS + 1) * _row_bytes(shape)
    num_slots = max(arena_bytes // (size + new_bytes), 1)
    shape = replace(shape, num_slots=num_slots)
    arena = _Arena(num_slots * (size + new_bytes + 256), shape)
    slots = []
    for _ in range(num_slots):
        of_slot = view_packed_layer(packed.layout, arena.copy_of(packed.buffer))
        keys, values = arena.keys_values(_NEW_ROWS + 1)
        slots.append(PackedRows(keys=keys, values=values, length=_NEW_ROWS, packed=of_slot))
    what = f"{num_slots} sequences of {tokens:,} packed tokens"
    batch = TriZoneBatch(shape, arena.rows, arena.codes)
    return _placed(batch, slots, shape, what, num_slots * (size + new_bytes))


def kivi_case(shape: BatchShape, arena_bytes: int) -> AttentionCase:
    """Make the case of quantised prompts and new rows."""
    shape = replace(shape, num_slots=NUM_SLOTS)
    bits = _KIVI_BITS if shape.head_dim * _KIVI_BITS % WORD_BITS == 0 else 8
    code_bytes = _row_bytes(shape) * bits // (8 * shape.dtype.itemsize)
    length = max(arena_bytes // NUM_SLOTS // (2 * code_bytes), _NEW_ROWS)
    rows, num_bytes = [], 0
    names = ("codes", "scales", "keys", "values")
    prompt_keys, prompt_values = torch.randn(
        2, shape.num_kv_heads, length, shape.head_dim, device=shape.device
    ).to(shape.dtype)
    quantised = kivi_quantise(prompt_keys, prompt_values, bits)
    del prompt_keys, prompt_values
    of_prompt = {name: getattr(quantised, name) for name in names}
    size = sum(tensor.numel() * tensor.element_size() for tensor in of_prompt.values())
    new_bytes = (_NEW_ROWS + 1) * _row_bytes(shape)
    arena = _Arena(NUM_SLOTS * (size + new_bytes + 256), shape)
    for _ in range(NUM_SLOTS):
        parts: dict[str, Any] = {name: arena.copy_of(tensor) for name, tensor in of_prompt.items()}
        keys, values = arena.keys_values(_NEW_ROWS + 1)
        copied = replace(quantised, **parts)
        rows.append(QuantisedRows(keys=keys, values=values, length=_NEW_ROWS, quantised=copied))
        num_bytes += size + new_bytes
    what = f"{NUM_SLOTS} sequences of {length:,} tokens at {bits} bits"
    return _placed(KiviBatch(shape, arena.rows, arena.codes), rows, shape, what, num_bytes)


def scores_case(shape: BatchShape, arena_bytes: int) -> AttentionCase:
    """Make the case of a prompt's window scores: K is read twice."""
    length = max(arena_bytes // _row_bytes(shape), 2 * _WINDOW)
    size = (shape.num_kv_heads, shape.group_size, _WINDOW, shape.head_dim)
    queries = torch.randn(size, device=shape.device).to(shape.dtype)
    keys = torch.empty(shape.num_kv_heads, length, shape.head_dim, dtype=shape.dtype, device=shape.device)
    keys.normal_()
    return AttentionCase(
        what=f"{length:,} keys, twice",
        num_bytes=2 * keys.numel() * keys.element_size() + 4 * shape.num_kv_heads * length,
        run=lambda: window_scores(queries, keys, scaling=shape.head_dim**-0.5),
        is_launched=True,
    )


def attention_cases(
    shape: BatchShape,
) -> dict[str, tuple[str, Callable[[BatchShape, int], AttentionCase]]]:
    """Return what a model of this shape can use, by name: the op of `dispatch.py`, and what makes a case.

    The second argument of what makes a case is the approximate size of the arena in bytes.
    """
    cases: dict[str, tuple[str, Callable[[BatchShape, int], AttentionCase]]] = {
        "dense_decode": ("dense_decode", dense_case)
    }
    if shape.has_windows:
        cases["dense_decode of windows"] = ("dense_decode", window_case)
    cases |= {
        "hsa": ("hsa", hsa_case),
        "trizone": ("trizone", trizone_case),
        "kivi": ("kivi", kivi_case),
        "window_scores": ("window_scores", scores_case),
    }
    return cases
