"""The interface of decode attention: its sizes for one layer of one prompt, and its operations.

Formats use one object for the layout of the arena (`specs`), for a prompt that has arrived (`build`), for
decode's steps (`append`, `attend`) and in the oracle. It stores sizes only; K, V and auxiliary tensors belong
to the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.interface import LayerShape, TensorSpec


@dataclass(frozen=True, kw_only=True)
class CacheView:
    """One layer's KV as attention reads it.

    Attributes:
        keys, values: `[H_kv, cap, D]`, of which the first rows are in use; the others may contain anything.
            If the prompt is packed, they are of new tokens only.
        auxiliary: the tensors of `AttentionKind.specs`, in that order.
        packed: the packed prompt, then packed segments of new tokens; empty if the prompt is rows.
    """

    keys: Tensor
    values: Tensor
    auxiliary: tuple[Tensor, ...] = ()
    packed: Sequence[PackedLayer] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionKind(ABC):
    """Decode attention of one layer. A subclass is a frozen dataclass whose fields are integer sizes.

    Attributes:
        name: its name in plans and metrics.
        takes_any_softmax: whether it goes with soft-capping and sinks, too; estimates ignore them.
    """

    name: ClassVar[str]
    takes_any_softmax: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def sized(cls, *, cap: int, budget: int, head_dim: int, row_dim: int) -> AttentionKind:
        """The sizes for one layer.

        Args:
            cap: the prompt rows that attention chooses from.
            budget: t, the traffic of one decode step as a number of rows; what is read to choose rows counts.
            head_dim: d.
            row_dim: channels that a row stores: 2 d for K and V, d of a latent row.
        """

    def specs(self, shape: LayerShape, num_rows: int, *, packed: bool = False) -> tuple[TensorSpec, ...]:
        """The tensors stored beside `num_rows` tokens per KV head; if packed, the new ones among them."""
        return ()

    def rebuilt(
        self, shape: LayerShape, keys: Tensor, values: Tensor, packed: Sequence[PackedLayer] = ()
    ) -> CacheView:
        """A view with new auxiliary tensors, built from every row and packed token. For the oracle."""
        num_packed = max(head.num_tokens for head in packed[0].layout.heads) if packed else 0
        specs = self.specs(shape, num_packed + keys.shape[1], packed=bool(packed))
        auxiliary = [torch.empty(its.placed_shape, dtype=its.dtype, device=keys.device) for its in specs]
        view = CacheView(keys=keys, values=values, auxiliary=tuple(auxiliary), packed=packed)
        self.build_again(view, length=keys.shape[1])
        return view

    def build_again(self, cache: CacheView, *, length: int) -> None:
        """Fill the auxiliary tensors from the packed prompt, if there is one, and the first `length` rows."""
        self.build(cache, length=length)
        if cache.packed and cache.auxiliary:
            for position in range(length):
                key, value = cache.keys[:, position], cache.values[:, position]
                self.append(cache, key, value, position=position)

    def build(self, cache: CacheView, *, length: int) -> None:  # noqa: B027 (most kinds have nothing to build)
        """Fill the auxiliary tensors from the first `length` rows, or from the packed prompt."""

    def append(self, cache: CacheView, key: Tensor, value: Tensor, *, position: int) -> None:
        """Write key and value `[H_kv, D]` to row `position`, the first unused one; update `auxiliary`.

        Raises: IndexError, ValueError: there is no such row.
        """
        cache.keys[:, position] = key
        cache.values[:, position] = value

    @abstractmethod
    def attend(self, queries: Tensor, cache: CacheView, *, length: int, scaling: Scaling) -> Tensor:
        """Attention of one token to the packed tokens and the first `length` rows; its own row is the last.

        Args: queries: `[H_kv, G, D]`.
        Returns: `[H_kv, G, D]`.
        """

    @abstractmethod
    def read_bytes(self, shape: LayerShape, num_rows: int, packed_bytes: int | None = None) -> int:
        """Bytes that a step reads of a layer with `num_rows` tokens per KV head, of all KV heads together.

        Bytes read to choose rows count too. This is what a fused kernel on the method's own layout reads; a
        torch path may read more.

        Args: packed_bytes: of the packed tokens, if they are packed.
        """
