"""What the batched decode attentions share: a batch's shape, its sequences' rows, and descriptors that grow.

A batch is a number of slots, each a sequence or empty, in every layer. `DenseBatch`, `HsaBatch` and
`TriZoneBatch` attend for all slots of their kind in a layer at once: by one launch through descriptors where
a Triton kernel serves them, else one slot after another in torch. Nothing of a step depends on a number that
only the device knows, so a step can be captured: lengths lie on the device and grow there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvferry.kernels.descriptors import LENGTH

Alone = Callable[[int, Callable[[], Tensor]], Tensor | None]
"""(slot, attend) -> what `attend` returns; None where the slot has failed, now or before."""


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


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """One sequence's K and V in one layer.

    Attributes:
        keys, values: contiguous `[H_kv, cap, D]`.
        length: rows in use before the batch's first step, below cap.
    """

    keys: Tensor
    values: Tensor
    length: int


class LaunchBatch(Protocol):
    """Decode attention of a batch's slots of one kind.

    Made for its first step; `advance` goes from one step to the next.
    """

    @property
    def is_launched(self) -> bool:
        """Whether kernels serve it, so that a step asks the device for nothing."""
        ...

    def release(self) -> None:
        """Hold nothing of the batch any more."""
        ...

    def advance(self, active: Tensor) -> None:
        """The next step: one more row in every slot that is active. Args: active: int64 `[S]`, 0 or 1."""
        ...

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, alone: Alone
    ) -> Tensor:
        """Append a row to every slot of this kind and attend.

        Args: queries `[S, H_kv, G, D]`; keys, values `[S, H_kv, D]`; alone: runs one slot's part where slots
        are attended one after another.
        Returns: `[S, H_kv, G, D]`, zero in the other slots; valid until the next call.
        """
        ...


class HeadTables:
    """Descriptors (`descriptors.py`) of every layer, slot and KV head, int64 `[L, S * H_kv, F]`.

    A slot without rows in a layer, and one that is not active, has length 0 there.

    Args: empty: the fields of a head without rows, length 0; a kernel may still divide by some of them.
    """

    def __init__(self, shape: BatchShape, empty: Sequence[int]) -> None:
        self._shape = shape
        self._empty = list(empty)
        size = (shape.num_layers, shape.num_heads)
        self._table = torch.tensor(self._empty, device=shape.device).repeat(*size, 1)
        self._lengths = torch.zeros(size, dtype=torch.int64, device=shape.device)
        self._grows = torch.zeros(size, dtype=torch.int64, device=shape.device)

    def fill(self, layers: Sequence[Mapping[int, tuple[Sequence[int], Sequence[int]]]]) -> None:
        """Place a batch before its first step, in the same memory as the one before.

        Args: layers: for each, by slot: the fields of its first head and what each next head adds to them.
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
        """See `LaunchBatch.advance`."""
        heads = active[:, None].expand(-1, self._shape.num_kv_heads).reshape(1, -1)
        self._lengths += self._grows * heads
        torch.mul(self._lengths, heads, out=self._table[..., LENGTH])

    def layer(self, layer: int) -> Tensor:
        """int64 `[S * H_kv, F]`."""
        return self._table[layer]


def elements_from(base: Tensor, tensor: Tensor) -> int:
    """Elements from the start of one tensor to the start of another on its device, whatever the storage."""
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()


def row_fields(base: Tensor, rows: CachedRows) -> tuple[list[int], list[int]]:
    """K offset, V offset, length after the first step: of the first head, and what each next head adds."""
    return (
        [elements_from(base, rows.keys), elements_from(base, rows.values), rows.length + 1],
        [rows.keys.stride(0), rows.values.stride(0), 0],
    )


def in_buckets(number: int, *, least: int = 1) -> int:
    """The next power of two: sizes that change from batch to batch take few values."""
    return max(1 << max(number - 1, 0).bit_length(), least)
