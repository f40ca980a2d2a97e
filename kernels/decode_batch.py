"""Base of the batched decode attentions: a batch's shape, its sequences' rows, and descriptors that grow.

A batch is a number of slots, each a sequence or empty, in every layer. `DenseBatch`, `HsaBatch` and
`TriZoneBatch` attend for all slots of their kind in a layer: by one launch through descriptors if a Triton
kernel supports them, else one slot after another in torch. A step never reads a number from the device, so it
can be captured: lengths are stored on the device and grow there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvferry.kernels.descriptors import LENGTH
from kvferry.kernels.dispatch import path_for
from kvferry.kernels.split_workspace import SplitWorkspace, split_workspace

Alone = Callable[[int, Callable[[], Tensor]], Tensor | None]
"""(slot, attend) -> the result of `attend`; None if the slot has failed, now or before."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Attributes: num_slots: S; the rest as a model has it."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_heads(self) -> int:
        """(slot, KV head) pairs."""
        return self.num_slots * self.num_kv_heads

    def workspace(self, num_slots: int) -> SplitWorkspace:
        """Scratch for split kernels. Args: num_slots: splits of all heads together."""
        sizes = {"group_size": self.group_size, "head_dim": self.head_dim, "num_heads": self.num_heads}
        return split_workspace(num_slots=num_slots, device=self.device, **sizes)


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

    def append(self, key: Tensor, value: Tensor, *, position: int) -> tuple[Tensor, Tensor]:
        """Write a row. Args: key, value `[H_kv, D]`. Returns: K and V up to it, `[H_kv, position + 1, D]`.

        Raises: IndexError: there is no such row.
        """
        self.keys.select(1, position).copy_(key)
        self.values.select(1, position).copy_(value)
        return self.keys.narrow(1, 0, position + 1), self.values.narrow(1, 0, position + 1)


Rows = TypeVar("Rows", bound=CachedRows)


class HeadTables:
    """Descriptors (`descriptors.py`) of every layer, slot and KV head, int64 `[L, S * H_kv, F]`.

    A slot without rows in a layer, and one that is not active, has length 0 there.

    Args: empty: the fields of a head without rows, length 0; kernels may divide by some of them.
    """

    def __init__(self, shape: BatchShape, empty: Sequence[int]) -> None:
        self._shape = shape
        self._empty = list(empty)
        size = (shape.num_layers, shape.num_heads)
        self._table = torch.tensor(self._empty, device=shape.device).repeat(*size, 1)
        self._lengths = torch.zeros(size, dtype=torch.int64, device=shape.device)
        self._grows = torch.zeros(size, dtype=torch.int64, device=shape.device)

    def fill(self, layers: Sequence[Mapping[int, tuple[Sequence[int], Sequence[int]]]]) -> None:
        """Write a batch's descriptors before its first step; the memory stays the same.

        Args: layers: for each, by slot: the fields of its first head, and the increments from head to head.
            Lengths include the first step's row.
        """
        shape = self._shape
        none = (self._empty, [0] * len(self._empty))
        placed = [[members.get(slot, none) for slot in range(shape.num_slots)] for members in layers]
        first, step = torch.tensor(placed, dtype=torch.int64).unbind(2)
        heads = torch.arange(shape.num_kv_heads)[:, None]
        table = (first[:, :, None] + heads * step[:, :, None]).flatten(1, 2)
        self._table.copy_(table, non_blocking=True)
        self._lengths.copy_(table[..., LENGTH], non_blocking=True)
        self._grows.copy_((table[..., LENGTH] > 0).long(), non_blocking=True)

    def advance(self, active: Tensor) -> None:
        """See `SlotBatch.advance`."""
        heads = active[:, None].expand(-1, self._shape.num_kv_heads).reshape(1, -1)
        self._lengths += self._grows * heads
        torch.mul(self._lengths, heads, out=self._table[..., LENGTH])

    def layer(self, layer: int) -> Tensor:
        """int64 `[S * H_kv, F]`."""
        return self._table[layer]


class SlotBatch(ABC, Generic[Rows]):
    """Decode attention of a batch's slots of one kind, which is a subclass.

        made: every slot empty ──fill──► every layer once ──advance──► every layer once ...

    Args:
        op: as `dispatch.py` names it.
        base: the buffer that descriptors count from, one-dimensional in the rows' dtype; the arena.
        is_launched: whether Triton kernels run it, so that a step does not wait for the device.
        empty: see `HeadTables`.
    """

    def __init__(
        self, op: str, shape: BatchShape, base: Tensor, *, is_launched: bool, empty: Sequence[int]
    ) -> None:
        self.is_launched = is_launched
        self._op, self._shape, self._base = op, shape, base
        self._layers: Sequence[Mapping[int, Rows]] = ()
        self._num_steps = 1
        if is_launched:
            size = (shape.num_slots, shape.num_kv_heads, shape.group_size, shape.head_dim)
            self._tables = HeadTables(shape, empty)
            self._output = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def fill(self, layers: Sequence[Mapping[int, Rows]]) -> None:
        """Set the batch before its first step. Args: layers: for each, the rows of this kind's slots."""
        self._layers = layers
        self._num_steps = 1
        if self.is_launched:
            self._tables.fill(
                [{slot: self._fields(rows) for slot, rows in layer.items()} for layer in layers]
            )

    def release(self) -> None:
        """Drop all references to the batch."""
        self._layers = ()

    def advance(self, active: Tensor) -> None:
        """The next step: one more row in every slot that is active. Args: active: int64 `[S]`, 0 or 1."""
        self._num_steps += 1
        if self.is_launched:
            self._tables.advance(active)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, alone: Alone
    ) -> Tensor:
        """Append a row to every slot of this kind and attend.

        Args: queries `[S, H_kv, G, D]`; keys, values `[S, H_kv, D]`; alone: runs one slot's part, used if no
            kernel runs them all.
        Returns: `[S, H_kv, G, D]`, zero in the other slots; valid until the next call.
        """
        path_for(self._op, self._shape.device)
        if self.is_launched:
            self._launch(layer, queries.contiguous(), keys.contiguous(), values.contiguous(), scaling)
            return self._output
        members = self._layers[layer]
        by_slot = list(zip(queries.unbind(0), keys.unbind(0), values.unbind(0), strict=True))
        attended: dict[int, Tensor] = {}
        for slot, rows in members.items():
            attend_one = partial(self._attend_one, layer, slot, rows, *by_slot[slot], scaling=scaling)
            output = alone(slot, attend_one)
            if output is not None:
                attended[slot] = output
        if len(attended) == len(by_slot):
            return torch.stack(list(attended.values())) if len(attended) > 1 else attended[0].unsqueeze(0)
        outputs = torch.zeros_like(queries)
        for slot, output in attended.items():
            outputs[slot] = output
        return outputs

    def _fields(self, rows: Rows) -> tuple[list[int], list[int]]:
        """A descriptor, as `HeadTables.fill` takes it."""
        return row_fields(self._base, rows)

    @abstractmethod
    def _attend_one(
        self,
        layer: int,
        slot: int,
        rows: Rows,
        queries: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
    ) -> Tensor:
        """Append and attend for one slot in torch. Args: queries `[H_kv, G, D]`; key, value `[H_kv, D]`."""

    @abstractmethod
    def _launch(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """Append and attend for all slots into `_output`; the arguments are contiguous."""


def elements_from(base: Tensor, tensor: Tensor) -> int:
    """Elements from the start of one tensor to the start of another, which may be in another storage."""
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()


def row_fields(base: Tensor, rows: CachedRows) -> tuple[list[int], list[int]]:
    """K offset, V offset, length after the first step: of the first head, and the increments per head."""
    return (
        [elements_from(base, rows.keys), elements_from(base, rows.values), rows.length + 1],
        [rows.keys.stride(0), rows.values.stride(0), 0],
    )


def in_buckets(number: int, *, least: int = 1) -> int:
    """The next power of two, so that sizes that change from batch to batch have few values."""
    return max(1 << max(number - 1, 0).bit_length(), least)
