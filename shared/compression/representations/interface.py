"""What a layer's prompt is where it is not plain rows: named tensors of known sizes, and attention to them.

One object serves prefill (`store`), decode's arena (`specs`), the receiver (`view`, `StoredPrompt.check`),
the decode engine and the one-process oracle (`StoredPrompt.attend`) alike. New tokens' rows are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvferry.kernels.packed import ALIGNMENT_BYTES
from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.interface import LayerInputs, StoredPrompt

Specs = Mapping[str, TensorSpec]
"""Tensors by name, in the order in which they are sent and lie in memory."""


@dataclass(frozen=True, kw_only=True)
class PromptShape:
    """What the sizes of a stored prompt follow from.

    Attributes:
        rows: rows kept per KV head, on average where heads differ.
        num_tokens: T of the prompt.
        dtype: of K and V.
    """

    rows: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Representation(Protocol):
    """A representation with a plan's parameters. A frozen dataclass."""

    def rows_within(self, budget_rows: int, *, num_tokens: int, head_dim: int) -> int:
        """The most rows of at most T that take no more bytes than `budget_rows` plain rows of 16-bit values;
        scales and channel numbers are counted, and positions on neither side."""
        ...

    def specs(self, shape: PromptShape) -> Specs:
        """The tensors of a layer."""
        ...

    def store(self, inputs: LayerInputs, *, rows: int, scores: Tensor | None) -> StoredPrompt:
        """Compress a layer. Args: scores: float32 `[H_kv, T]`; None where all rows are kept.

        Raises: ValueError: K or V cannot be represented.
        """
        ...

    def view(self, tensors: Mapping[str, Tensor]) -> StoredPrompt:
        """What `StoredPrompt.tensors` gave, as an object again; nothing is copied."""
        ...


def zone_bytes(specs: Specs) -> int:
    """Bytes of all tensors one after another, each at a multiple of ALIGNMENT_BYTES."""
    return sum(_aligned(spec.size_bytes) for spec in specs.values())


def view_zone(specs: Specs, zone: Tensor) -> dict[str, Tensor]:
    """Typed views of uint8 `[zone_bytes or more]`, in the order of `specs`; writes go to the zone."""
    views, offset = {}, 0
    for name, spec in specs.items():
        views[name] = zone[offset : offset + spec.size_bytes].view(spec.dtype).view(spec.shape)
        offset += _aligned(spec.size_bytes)
    return views


def index_spec(shape: PromptShape) -> Specs:
    """The kept positions, int32 `[H_kv, n]`; nothing where every token is kept."""
    if shape.rows == shape.num_tokens:
        return {}
    return {"index": TensorSpec(shape=(shape.num_kv_heads, shape.rows), dtype=torch.int32)}


def check_index(index: Tensor, num_tokens: int) -> None:
    """Args: index int32 `[H_kv, n]`. Raises: ValueError: positions that no selection makes."""
    ascending = bool((index[:, 1:] > index[:, :-1]).all())
    if not ascending or bool(((index < 0) | (index >= num_tokens)).any()):
        raise ValueError(f"kept positions must ascend within 0 to {num_tokens - 1} for each KV head")


def gather_rows(rows: Tensor, positions: Tensor) -> Tensor:
    """`[H_kv, T, D]` at `[H_kv, n]` -> `[H_kv, n, D]`, contiguous."""
    return rows.gather(1, positions.to(torch.int64)[:, :, None].expand(-1, -1, rows.shape[2]))


def _aligned(size_bytes: int) -> int:
    return math.ceil(size_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
