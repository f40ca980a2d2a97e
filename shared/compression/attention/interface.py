"""What a kind of decode attention is: its sizes for one layer of one prompt, and what it does with them.

One object serves the arena's layout (`cache/layout.py`), the receiver (`build`), the decode engine (`append`,
`attend`) and the one-process oracle alike. Holds sizes only; K, V and auxiliary tensors are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.packed import PackedLayer


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor to make room for.

    Attributes:
        aligned: whether kernels read what lies along the last dimension in pieces of ALIGNMENT_BYTES: the
            next begins at a multiple of that, after memory that is reserved and holds nothing.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = False

    @property
    def size_bytes(self) -> int:
        """Without what alignment takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """The shape with room for alignment, of which `shape` is the beginning."""
        if not self.aligned:
            return self.shape
        *outer, length = self.shape
        piece = max(ALIGNMENT_BYTES // self.dtype.itemsize, 1)
        return (*outer, -(-length // piece) * piece)

    @property
    def placed_bytes(self) -> int:
        return math.prod(self.placed_shape) * self.dtype.itemsize


class AttentionKind(Protocol):
    """Decode attention of one layer.

    Legend: keys and values `[H_kv, cap, D]` of which the first rows are in use, G query heads per KV head;
    `auxiliary` are the tensors that `auxiliary_specs` asked for, in that order. Rows beyond those in use may
    hold anything.

    Attributes:
        name: in plans and metrics.
    """

    name: ClassVar[str]

    def auxiliary_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """The tensors kept beside K and V of `num_rows` rows."""
        ...

    def build(self, keys: Tensor, values: Tensor, auxiliary: tuple[Tensor, ...], *, length: int) -> None:
        """Fill the auxiliary tensors from the first `length` rows."""
        ...

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        key: Tensor,
        value: Tensor,
        *,
        position: int,
    ) -> None:
        """Write key and value `[H_kv, D]` as row `position`, the first not in use, and follow in `auxiliary`.

        Raises: IndexError, ValueError: there is no such row.
        """
        ...

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        *,
        length: int,
        scaling: float,
    ) -> Tensor:
        """Attention of one token to the first `length` rows, its own the last: `[H_kv, G, D]` of the same."""
        ...

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        """Bytes that a step reads per KV head with `num_rows` rows in use, estimates included.

        What the method's own layout and a fused kernel would read; a torch path may read more.
        """
        ...


class PackedAttention(Protocol):
    """Decode attention of a layer whose prompt is packed, and maybe some of its new tokens: what an
    `AttentionKind` has to offer besides, to go with a packed representation.

    Legend: as there; keys and values `[H_kv, cap, D]` are of new tokens only; `auxiliary` are the tensors
    that `packed_specs` asked for.
    """

    def packed_specs(
        self, *, num_kv_heads: int, num_tokens: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """The tensors kept beside `num_tokens` tokens per KV head, packed and new ones together."""
        ...

    def build_packed(self, packed: PackedLayer, auxiliary: tuple[Tensor, ...]) -> None:
        """Fill the auxiliary tensors from the packed prompt."""
        ...

    def append_packed(
        self,
        packed: Sequence[PackedLayer],
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        key: Tensor,
        value: Tensor,
        *,
        position: int,
    ) -> None:
        """Write key and value `[H_kv, D]` as row `position`, and follow in `auxiliary`.

        Raises: IndexError, ValueError: there is no such row.
        """
        ...

    def attend_packed(
        self,
        queries: Tensor,
        packed: Sequence[PackedLayer],
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        *,
        length: int,
        scaling: float,
    ) -> Tensor:
        """Attention of one token to what is packed and the first `length` rows, its own the last."""
        ...

    def read_packed_bytes(
        self, *, num_tokens: int, num_kv_heads: int, packed_bytes: int, head_dim: int, element_bytes: int
    ) -> int:
        """Bytes that a step reads of a layer of num_tokens tokens packed to packed_bytes, estimates included.

        As `AttentionKind.read_bytes`, of all KV heads together, for heads pack to different sizes.
        """
        ...


class SizedAttentionKind(AttentionKind, Protocol):
    """What the registry holds: a kind that can work out its own sizes. A frozen dataclass of integers."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init__(self, **sizes: int) -> None: ...

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> SizedAttentionKind:
        """The sizes for one layer.

        Args:
            cap: rows that attention may come to choose from: kept rows and new tokens.
            budget: t, the rows' worth of traffic of one decode step, estimates included.
            head_dim: d.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RowsAlone:
    """The part of `AttentionKind` that keeps nothing beside K and V."""

    def auxiliary_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        return ()

    def build(self, keys: Tensor, values: Tensor, auxiliary: tuple[Tensor, ...], *, length: int) -> None:
        """Nothing to build."""

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        auxiliary: tuple[Tensor, ...],
        key: Tensor,
        value: Tensor,
        *,
        position: int,
    ) -> None:
        keys[:, position] = key
        values[:, position] = value
