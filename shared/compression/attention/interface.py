"""The interface of decode attention: its sizes for one layer of one prompt, and its operations.

Formats use one object for the layout of the arena (`auxiliary_specs`), for a prompt that has arrived
(`build`), for decode's steps (`append`, `attend`) and in the oracle. It stores sizes only; K, V and auxiliary
tensors belong to the caller.
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
    """Shape and dtype of a tensor that needs room.

    Attributes:
        aligned: whether kernels read the last dimension in pieces of ALIGNMENT_BYTES. Each slice along it
            then begins at a multiple of that, and the padding between slices is not used.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """The shape with padding for alignment; the tensor itself comes first in each dimension."""
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

    Legend: keys and values `[H_kv, cap, D]`, of which the first rows are in use; G query heads per KV head;
    `auxiliary` are the tensors of `auxiliary_specs`, in that order. Rows after those in use may contain
    anything.

    Attributes:
        name: its name in plans and metrics.
    """

    name: ClassVar[str]

    def auxiliary_specs(
        self, *, num_kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """The tensors stored beside K and V of `num_rows` rows."""
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
        """Write key and value `[H_kv, D]` to row `position`, the first unused one, and update `auxiliary`.

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
        """Attention of one token to the first `length` rows, of which its own is the last.

        Args: queries: `[H_kv, G, D]`.
        Returns: `[H_kv, G, D]`.
        """
        ...

    def read_bytes(self, *, num_rows: int, head_dim: int, element_bytes: int) -> int:
        """Bytes that a step reads per KV head with `num_rows` rows in use.

        Bytes read to choose rows count too. This is what a fused kernel on the method's own layout reads; a
        torch path may read more.
        """
        ...


class PackedAttention(Protocol):
    """Decode attention of a layer whose prompt is packed, and possibly some of its new tokens.

    An `AttentionKind` implements this as well if packed formats can use it.

    Legend: as in `AttentionKind`, but keys and values `[H_kv, cap, D]` are of new tokens only, and
    `auxiliary` are the tensors of `packed_specs`.
    """

    def packed_specs(
        self, *, num_kv_heads: int, num_tokens: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """The tensors stored beside `num_tokens` tokens per KV head, packed and new ones together."""
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
        """Write key and value `[H_kv, D]` to row `position`, and update `auxiliary`.

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
        """Attention of one token to the packed tokens and the first `length` rows; its own row is the last.

        Args: queries: `[H_kv, G, D]`; packed: the prompt, then segments.
        Returns: `[H_kv, G, D]`.
        """
        ...

    def read_packed_bytes(
        self, *, num_tokens: int, num_kv_heads: int, packed_bytes: int, head_dim: int, element_bytes: int
    ) -> int:
        """Bytes that a step reads of a layer with `num_tokens` tokens in `packed_bytes` bytes.

        As `AttentionKind.read_bytes`, but for all KV heads together, because heads pack to different sizes.
        """
        ...


class SizedAttentionKind(AttentionKind, Protocol):
    """An entry of the registry: a kind that computes its own sizes. A frozen dataclass of integers."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init__(self, **sizes: int) -> None: ...

    @classmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int) -> SizedAttentionKind:
        """The sizes for one layer.

        Args:
            cap: the most rows that attention chooses from: retained rows and new tokens.
            budget: t, the traffic of one decode step as a number of rows; what is read to choose rows counts.
            head_dim: d.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RowsAlone:
    """The part of `AttentionKind` for kinds without auxiliary tensors."""

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
