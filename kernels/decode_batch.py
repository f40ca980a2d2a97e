"""Base of the batched decode attentions: a batch's shape, its sequences' rows, and descriptors that grow.

A batch is a number of slots, each a sequence or empty, in every layer. `DenseBatch`, `WindowBatch`,
`HsaBatch`, `TriZoneBatch` and `KiviBatch` attend for all slots of their kind in a layer: by launches through
descriptors if a Triton kernel or C code supports them, else one slot after another in torch. A step never
reads a number from the device, so it can be captured: lengths are stored on the device and grow there. A
sequence joins and leaves alone: the other slots' descriptors stay as they are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvferry.kernels.descriptors import LENGTH
from kvferry.kernels.dispatch import alignment_problem, count, path_for, planned_path, shape_problem
from kvferry.kernels.native.library import in_threads, is_compared
from kvferry.kernels.quarantine import attempt, recovered, rehearsing
from kvferry.kernels.quarantine import state as quarantine
from kvferry.kernels.softmax import Scaling, Softmax

Errors = dict[int, Exception]
"""Errors of slots that have failed in torch; these slots are not run again."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """One tensor's place in a buffer: its offset in bytes, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Return the region of a uint8 buffer as a typed tensor; writes go to the buffer."""
        return buffer[self.offset : self.offset + self.size_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Attributes:
    num_slots: S; the rest as a model has it.
    has_windows: whether some of its layers have windows.
    has_plain_softmax: whether none of them has soft-capping or sinks.
    """

    num_layers: int
    num_slots: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    has_windows: bool = False
    has_plain_softmax: bool = True

    @property
    def num_heads(self) -> int:
        """The number of (slot, KV head) pairs."""
        return self.num_slots * self.num_kv_heads

    def of_slots(self, num_slots: int) -> BatchShape:
        return replace(self, num_slots=num_slots)


class NewTokens(NamedTuple):
    """A step's input in one layer, for the first S slots: queries `[S, H_kv, G, D]`, keys and values
    `[S, H_kv, D]`, and the layer's softmax."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: Scaling


class NewToken(NamedTuple):
    """One slot's part of a step: queries `[H_kv, G, D]`, key and value `[H_kv, D]`, the row that they become,
    and the layer's softmax."""

    queries: Tensor
    key: Tensor
    value: Tensor
    position: int
    scaling: Scaling


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """One sequence's K and V in one layer.

    Attributes:
        keys, values: contiguous `[H_kv, cap, D]`.
        length: rows in use before the batch's first step, less than cap.
    """

    keys: Tensor
    values: Tensor
    length: int

    def append(self, token: NewToken) -> tuple[Tensor, Tensor]:
        """Write a row. Returns: K and V up to it, `[H_kv, position + 1, D]`.

        Raises: IndexError: there is no such row.
        """
        self.keys.select(1, token.position).copy_(token.key)
        self.values.select(1, token.position).copy_(token.value)
        length = token.position + 1
        return self.keys.narrow(1, 0, length), self.values.narrow(1, 0, length)


@dataclass(frozen=True, kw_only=True)
class WindowRows(CachedRows):
    """One sequence's K and V in a layer with a window.

    Attributes:
        window: W: a token attends to the last W tokens, itself included.
        rows_before: in a layer with chunks of W tokens, of which a token attends to its own, how many tokens
            precede the first row. None: the window slides.
    """

    window: int
    rows_before: int | None

    def first_row(self, length: int) -> int:
        """Return the first row that the last of `length` rows attends to."""
        if self.rows_before is None:
            return max(0, length - self.window)
        position = self.rows_before + length - 1
        return max(0, position - position % self.window - self.rows_before)

    def append(self, token: NewToken) -> tuple[Tensor, Tensor]:
        """See `CachedRows.append`; K and V from the first row that the token attends to."""
        first = self.first_row(token.position + 1)
        keys, values = super().append(token)
        return keys[:, first:], values[:, first:]


Rows = TypeVar("Rows", bound=CachedRows)
Scratch = TypeVar("Scratch")
Fields = tuple[list[int], list[int]]
"""A descriptor: the fields of a slot's first head in one layer, and the increments from head to head."""


class HeadTables:
    """Descriptors (`descriptors.py`) of every layer, slot and KV head, int64 `[L, S * H_kv, F]`.

    A slot without rows in a layer, and one that is not active, has length 0 there. A slot is written alone:
    the others stay as they are.

    Args: empty: the fields of a head without rows, length 0; kernels may divide by some of them.
    """

    def __init__(self, shape: BatchShape, empty: Sequence[int]) -> None:
        self._num_kv_heads = shape.num_kv_heads
        self._none = (list(empty), [0] * len(empty))
        size = (shape.num_layers, shape.num_heads)
        self._table = torch.tensor(self._none[0], device=shape.device).repeat(*size, 1)
        self._lengths = torch.zeros(size, dtype=torch.int64, device=shape.device)
        self._grows = torch.zeros(size, dtype=torch.int64, device=shape.device)

    def place(self, slot: int, layers: Mapping[int, Fields]) -> None:
        """Write a slot's descriptors before its first step; the memory stays the same.

        Args: layers: by layer. Lengths include the first step's row. Other layers have no rows.
        """
        first, step = torch.tensor(
            [layers.get(layer, self._none) for layer in range(len(self._table))], dtype=torch.int64
        ).unbind(1)
        heads = torch.arange(self._num_kv_heads)[:, None]
        table = first[:, None] + heads * step[:, None]
        rows = slice(slot * self._num_kv_heads, (slot + 1) * self._num_kv_heads)
        self._table[:, rows].copy_(table, non_blocking=True)
        self._lengths[:, rows].copy_(table[..., LENGTH], non_blocking=True)
        self._grows[:, rows].copy_((table[..., LENGTH] > 0).long(), non_blocking=True)

    def advance(self, active: Tensor) -> None:
        heads = self._of_heads(active)
        self._lengths[:, : len(heads)] += self._grows[:, : len(heads)] * heads
        self.show(active)

    def show(self, active: Tensor) -> None:
        heads = self._of_heads(active)
        torch.mul(self._lengths[:, : len(heads)], heads, out=self._table[:, : len(heads), LENGTH])

    def layer(self, layer: int, num_slots: int) -> Tensor:
        """Return the first slots' descriptors, int64 `[num_slots * H_kv, F]`."""
        return self._table[layer, : num_slots * self._num_kv_heads]

    def _of_heads(self, active: Tensor) -> Tensor:
        return active[:, None].expand(-1, self._num_kv_heads).reshape(-1)


class SlotBatch(ABC, Generic[Rows, Scratch]):
    """Decode attention of a batch's slots of one kind, which is a subclass.

        made: every slot empty ──► every layer once ──advance──► every layer once ──advance──► ...
                                     place, remove: between steps, one slot at a time

    A step runs over the first slots; how many, and the scratch memory for them, may change from step to step.

    Args:
        op: as `dispatch.py` names it.
        shape: of the largest batch.
        base: the buffer that descriptors count from, one-dimensional in the rows' dtype; the arena.
        empty: see `HeadTables`.

    Attributes:
        op: as given.
        has_tables: whether descriptors are written, for Triton kernels or C code.
    """

    C_FUNCTION: ClassVar[str] = ""
    """The op's function in the C library."""

    def __init__(self, op: str, shape: BatchShape, base: Tensor, *, empty: Sequence[int]) -> None:
        problem = shape_problem(shape.dtype, shape.group_size, shape.head_dim, shape.device)
        path = "native" if is_compared() else planned_path(op, shape.device, problem)
        self._is_native = path == "native" and self._fits_native(shape)
        self._in_triton = path in ("triton", "interpreter")
        self._c_code = in_threads(self.C_FUNCTION) if self._is_native else None
        self._packed_tokens: tuple[Tensor, Tensor] | None = None  # entries and codes, for C code
        self.has_tables = self._is_native or self._in_triton
        self.op, self._shape, self._base = op, shape, base
        self._layers: list[dict[int, Rows]] = [{} for _ in range(shape.num_layers)]
        self._placed_at: dict[int, int] = {}
        self._num_steps = 0
        if self.has_tables:
            size = (shape.num_slots, shape.num_kv_heads, shape.group_size, shape.head_dim)
            self._tables = HeadTables(shape, empty)
            self._output = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    @property
    def is_launched(self) -> bool:
        """Return whether one launch runs all slots, so that a step does not wait for the device."""
        return self.has_tables and self.op not in quarantine.by_op

    def count_from(self, base: Tensor) -> None:
        """Count descriptors from another buffer. All slots must be empty, and no step be captured."""
        self._base = base

    def place(self, slot: int, layers: Mapping[int, Rows]) -> None:
        """Place a sequence in an empty slot. Args: layers: its rows in the layers that are of this kind.

        Raises: ValueError: rows whose addresses a Triton kernel cannot load 16 bytes at a time, which would
            cost the process its device.
        """
        if self._in_triton:
            for rows in layers.values():
                if problem := self._problem(rows):
                    raise ValueError(problem)
        self._placed_at[slot] = self._num_steps
        for layer, rows in layers.items():
            self._layers[layer][slot] = rows
        if self.has_tables:
            self._tables.place(slot, {layer: self._fields(rows) for layer, rows in layers.items()})

    def remove(self, slot: int) -> None:
        """Empty a slot, and drop all references to its sequence."""
        del self._placed_at[slot]
        for layer in self._layers:
            layer.pop(slot, None)
        if self.has_tables:
            self._tables.place(slot, {})

    def advance(self, active: Tensor) -> None:
        """Begin the next step: one more row in every active slot.

        Args: active: int64 `[n]`, 0 or 1, of the first slots.
        """
        self._num_steps += 1
        if self.has_tables:
            self._tables.advance(active)

    def show(self, active: Tensor) -> None:
        """Change which slots the next step is for. Args: as in `advance`."""
        if self.has_tables:
            self._tables.show(active)

    def count_steps(self, number: int) -> None:
        """Count steps that `advance` has not counted, those of a replayed graph. Negative: steps that were
        run for a capture only."""
        self._num_steps += number

    @abstractmethod
    def size(self) -> Hashable:
        """Return what the scratch memory depends on besides the number of slots, for the placed sequences."""

    @abstractmethod
    def scratch(self, num_slots: int) -> Scratch:
        """Make the scratch memory for steps over the first slots, while `size()` stays the same."""

    def attend(self, layer: int, step: NewTokens, *, errors: Errors, scratch: Scratch | None) -> Tensor:
        """Append a row to every slot of this kind and attend.

        Args:
            errors: used if no kernel runs all slots; one that fails does not fail the others.
            scratch: for S slots; needed if kernels run the op.
        Returns: `[S, H_kv, G, D]`, zero in the other slots; valid until the next call.
        """
        in_torch = partial(self.attend_slots, layer, step, errors)
        if scratch is None or self._is_beyond(step) or not self.is_launched:
            path_for(self.op, self._shape.device)
            return in_torch()
        if self._is_native:
            count({(self.op, "native"): 1})
        else:
            path_for(self.op, self._shape.device)
        if rehearsing.is_on:
            return attempt(self.op, partial(self.attend_launched, layer, step, scratch), in_torch)
        try:  # as `attempt`, with one call less per layer
            return self.attend_launched(layer, step, scratch)
        except Exception as error:
            return recovered(self.op, error, in_torch)

    def attend_launched(self, layer: int, step: NewTokens, scratch: Scratch) -> Tensor:
        """Run `attend` by launches for all slots, without falling back."""
        queries, keys, values, scaling = step
        output, heads = self._output[: len(queries)], self._tables.layer(layer, len(queries))
        step = NewTokens(queries.contiguous(), keys.contiguous(), values.contiguous(), scaling)
        if self._c_code is None:
            self._launch(layer, heads, step, scratch, output)
        elif self._packed_tokens is None:
            attend_in_c(self._c_code, heads, self._base, step, output)
        else:
            entries, codes = self._packed_tokens
            attend_in_c(self._c_code, heads, self._base, step, output, entries[layer, : len(heads)], codes)
        return output

    def attend_slots(self, layer: int, step: NewTokens, errors: Errors) -> Tensor:
        """Run `attend` in torch, one slot after another."""
        queries, keys, values, scaling = step
        by_slot = list(zip(queries.unbind(0), keys.unbind(0), values.unbind(0), strict=True))
        attended: dict[int, Tensor] = {}
        for slot, rows in self._layers[layer].items():
            if slot in errors:
                continue
            position = rows.length + self._num_steps - self._placed_at[slot]
            token = NewToken(*by_slot[slot], position, scaling)
            try:
                attended[slot] = self._attend_one(layer, slot, rows, token)
            except Exception as error:
                errors[slot] = error
        if len(attended) == len(by_slot):
            in_order = list(map(attended.__getitem__, range(len(by_slot))))
            return torch.stack(in_order) if len(in_order) > 1 else in_order[0].unsqueeze(0)
        outputs = torch.zeros_like(queries)
        for slot, output_one in attended.items():
            outputs[slot] = output_one
        return outputs

    def _is_beyond(self, step: NewTokens) -> bool:
        """Return whether a step is beyond the C code, which has no soft-capping and no sinks."""
        return self._is_native and isinstance(step.scaling, Softmax)

    @classmethod
    def _fits_native(cls, shape: BatchShape) -> bool:
        """Return whether the op's C code can run for this shape."""
        return shape.dtype == torch.float32

    def _fields(self, rows: Rows) -> Fields:
        return row_fields(self._base, rows)

    def _problem(self, rows: Rows) -> str | None:
        """Say why a Triton kernel cannot read these rows; None if it can."""
        return alignment_problem(keys=rows.keys, values=rows.values)

    @abstractmethod
    def _attend_one(self, layer: int, slot: int, rows: Rows, token: NewToken) -> Tensor:
        """Append a row and attend for one slot in torch. Returns: `[H_kv, G, D]`."""

    @abstractmethod
    def _launch(self, layer: int, heads: Tensor, step: NewTokens, scratch: Scratch, output: Tensor) -> None:
        """Append and attend in Triton, for the first slots, whose descriptors are `heads`, into `output`; all
        tensors are contiguous."""


def row_fields(base: Tensor, rows: CachedRows, *others: Tensor) -> Fields:
    """Return the K offset, V offset, length after the first step, and the offsets of other tensors.

    Offsets are in elements from the start of `base`, which may be in another storage.
    """
    start, size = base.data_ptr(), base.element_size()
    keys, values = rows.keys, rows.values
    first = [(keys.data_ptr() - start) // size, (values.data_ptr() - start) // size, rows.length + 1]
    first += [(tensor.data_ptr() - start) // size for tensor in others]
    return first, [keys.stride(0), values.stride(0), 0, *[other.stride(0) for other in others]]


def attend_in_c(
    function: Callable[..., int],
    heads: Tensor,
    base: Tensor,
    step: NewTokens,
    output: Tensor,
    entries: Tensor | None = None,
    codes: Tensor | None = None,
) -> None:
    """Append a row to every head of a table and attend, by C code in as many threads as torch has.

    Args:
        function: of `in_threads`.
        heads: int64 `[n, fields]`, contiguous, with the function's fields.
        base: float32, one-dimensional; where the rows are.
        step, output: float32 and contiguous, of n heads.
        entries, codes: of packed tokens: int64 `[n, fields]`, see `packed_entries`, and
            uint8, one-dimensional; where they are.

    Raises: RuntimeError: rows or regions of a head are outside of `base` or `codes`, or there is no memory.
    """
    queries, keys, values, scaling = step
    assert isinstance(scaling, float), "another softmax runs in torch"
    packed: tuple[int | None, ...] = (None, 0, None, 0)
    if entries is not None and codes is not None:
        packed = (entries.data_ptr(), entries.shape[1], codes.data_ptr(), codes.numel())
    failed = function(
        torch.get_num_threads(),
        heads.data_ptr(),
        *heads.shape,
        base.data_ptr(),
        base.numel(),
        *packed,
        *queries.shape[-2:],
        *map(Tensor.data_ptr, (queries, keys, values)),
        scaling,
        output.data_ptr(),
    )
    if failed:
        reasons = {1: "there is no memory for its scores", 2: "rows of a head are outside of the arena"}
        raise RuntimeError(f"attention failed: {reasons[failed]}")


def in_buckets(number: int, *, least: int = 1) -> int:
    """Return the next power of two, so that sizes that change from batch to batch have few values."""
    return max(1 << max(number - 1, 0).bit_length(), least)
