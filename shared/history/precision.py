"""How history rows are stored: as the model computed them, or in 16, 8 or 4 bits.

Rows are encoded once, when they are staged, and every tier holds those bytes: whoever reads a row, from
wherever, gets the same values. Quantised K has a scale and a minimum per channel and group of tokens, V per
token (the quantiser is `kernels/quantise`). Does not decide what is stored, nor where.

    bytes of n tokens of one layer, H = num_kv_heads, G groups of GROUP_TOKENS tokens (the last may be short):
    model, 16 bits    2 H n D * bytes of an element
    8, 4 bits         2 H n ceil(D / (8 / bits))  +  8 H D G  +  8 H n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvferry.kernels.packed.value_rows import pack_value_rows, unpack_value_rows
from kvferry.kernels.quantise import quantise_rows
from kvferry.shared.config import HistoryBits

LayerKV = tuple[Tensor, Tensor]
"""K (post-RoPE) and V of one layer, `[H_kv, n, D]`, on the host."""

GROUP_TOKENS = 64
"""Tokens that share one scale per K channel."""


class RowChunk(Protocol):
    """Consecutive tokens' rows of one layer, encoded. Immutable."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def group_offset(self) -> int:
        """Tokens of its first group that came before it; 0 where there are no groups."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored, in the order of `RowPrecision.shapes`; perhaps views."""
        ...

    def rows(self) -> LayerKV:
        """K and V in the model's dtype."""
        ...

    def part(self, start: int, stop: int) -> RowChunk:
        """Views of tokens [start, stop)."""
        ...

    def copy(self) -> RowChunk:
        """The same on memory of its own."""
        ...


def chunk_bytes(chunk: RowChunk) -> int:
    return sum(tensor.nbytes for tensor in chunk.tensors)


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainChunk:
    """Rows as numbers. `keys`, `values`: `[H_kv, n, D]` of the stored dtype; `dtype`: the model's."""

    keys: Tensor
    values: Tensor
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def group_offset(self) -> int:
        return 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    def rows(self) -> LayerKV:
        return self.keys.to(self.dtype), self.values.to(self.dtype)

    def part(self, start: int, stop: int) -> PlainChunk:
        return PlainChunk(keys=self.keys[:, start:stop], values=self.values[:, start:stop], dtype=self.dtype)

    def copy(self) -> PlainChunk:
        return PlainChunk(keys=_host_copy(self.keys), values=_host_copy(self.values), dtype=self.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedChunk:
    """Rows as codes.

    Attributes:
        tensors: K codes uint8 `[H_kv, n, P]`, V codes alike; K scales and minima float32 `[H_kv, groups, D]`;
            V scales and minima float32 `[H_kv, n]`. P bytes hold D codes.
        group_offset: see `RowChunk`.
    """

    tensors: tuple[Tensor, ...]
    bits: int
    head_dim: int
    dtype: torch.dtype
    group_offset: int = 0

    @property
    def num_tokens(self) -> int:
        return self.tensors[0].shape[1]

    def rows(self) -> LayerKV:
        k_codes, v_codes, k_scales, k_minima, v_scales, v_minima = self.tensors
        groups = (torch.arange(self.num_tokens) + self.group_offset) // GROUP_TOKENS
        keys = self._unpack(k_codes) * k_scales[:, groups] + k_minima[:, groups]
        values = self._unpack(v_codes) * v_scales[..., None] + v_minima[..., None]
        return keys.to(self.dtype), values.to(self.dtype)

    def part(self, start: int, stop: int) -> QuantisedChunk:
        k_codes, v_codes, k_scales, k_minima, v_scales, v_minima = self.tensors
        first, offset = divmod(self.group_offset + start, GROUP_TOKENS)
        groups = slice(first, num_groups(self.group_offset, stop))
        return QuantisedChunk(
            tensors=(
                k_codes[:, start:stop], v_codes[:, start:stop], k_scales[:, groups], k_minima[:, groups],
                v_scales[:, start:stop], v_minima[:, start:stop],
            ),
            bits=self.bits, head_dim=self.head_dim, dtype=self.dtype, group_offset=offset,
        )  # fmt: skip

    def copy(self) -> QuantisedChunk:
        return QuantisedChunk(
            tensors=tuple(_host_copy(tensor) for tensor in self.tensors),
            bits=self.bits,
            head_dim=self.head_dim,
            dtype=self.dtype,
            group_offset=self.group_offset,
        )

    def _unpack(self, codes: Tensor) -> Tensor:
        num_heads, num_tokens, _ = codes.shape
        return unpack_value_rows(codes.flatten(0, 1), self.bits, self.head_dim).view(
            num_heads, num_tokens, self.head_dim
        )


def num_groups(group_offset: int, num_tokens: int) -> int:
    """Groups that tokens [0, num_tokens) touch, the first of them `group_offset` tokens into its group."""
    return -(-(group_offset + num_tokens) // GROUP_TOKENS)


@dataclass(frozen=True, kw_only=True)
class RowPrecision:
    """One way of storing rows, for a model whose K and V are of `dtype`.

    Deviation: "16" stores float32 rows as float16, clamped to its range; a model of a 16-bit dtype keeps its
    own, so that 16 and "model" are the same there.
    """

    bits: HistoryBits = "model"
    dtype: torch.dtype | None = None

    @property
    def code(self) -> int:
        """What the format's headers call it: bits of a code, or the stored dtype."""
        if self.bits in ("8", "4"):
            return int(self.bits)
        return {torch.float32: 32, torch.float16: 16, torch.bfloat16: 17}[self._stored(self._model_dtype)]

    @property
    def _model_dtype(self) -> torch.dtype:
        assert self.dtype is not None
        return self.dtype

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16 if self.bits == "16" and dtype == torch.float32 else dtype

    def encode(self, keys: Tensor, values: Tensor) -> RowChunk:
        """Args: `[H_kv, n, D]`, n >= 1, on any device. Returns: a chunk on the host that shares nothing."""
        dtype = keys.dtype
        if self.bits in ("8", "4"):
            return _quantise(keys, values, int(self.bits))
        stored = self._stored(dtype)
        if stored != dtype:
            limit = torch.finfo(stored).max
            keys, values = keys.clamp(-limit, limit).to(stored), values.clamp(-limit, limit).to(stored)
        return PlainChunk(keys=_host_copy(keys), values=_host_copy(values), dtype=dtype)

    def shapes(
        self, *, num_tokens: int, group_offset: int, num_kv_heads: int, head_dim: int
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of a chunk's tensors, in order."""
        heads = num_kv_heads
        if self.bits not in ("8", "4"):
            rows = (heads, num_tokens, head_dim), self._stored(self._model_dtype)
            return rows, rows
        codes = (heads, num_tokens, -(-head_dim // (8 // int(self.bits)))), torch.uint8
        channels = (heads, num_groups(group_offset, num_tokens), head_dim), torch.float32
        tokens = (heads, num_tokens), torch.float32
        return codes, codes, channels, channels, tokens, tokens

    def chunk(self, tensors: Sequence[Tensor], *, group_offset: int, head_dim: int) -> RowChunk:
        """A chunk of tensors that have the shapes of `shapes`."""
        if self.bits not in ("8", "4"):
            return PlainChunk(keys=tensors[0], values=tensors[1], dtype=self._model_dtype)
        return QuantisedChunk(
            tensors=tuple(tensors),
            bits=int(self.bits),
            head_dim=head_dim,
            dtype=self._model_dtype,
            group_offset=group_offset,
        )


def _quantise(keys: Tensor, values: Tensor, bits: int) -> QuantisedChunk:
    num_heads, num_tokens, head_dim = keys.shape
    k_codes, k_scales, k_minima = _quantise_channels(keys.cpu(), bits)
    v_codes, v_scales, v_minima = quantise_rows(values.cpu(), bits)

    def pack(codes: Tensor) -> Tensor:
        packed = pack_value_rows(codes.reshape(num_heads * num_tokens, head_dim), bits)
        return packed.view(num_heads, num_tokens, -1)

    return QuantisedChunk(
        tensors=(pack(k_codes), pack(v_codes), k_scales, k_minima, v_scales, v_minima),
        bits=bits,
        head_dim=head_dim,
        dtype=keys.dtype,
    )


def _quantise_channels(keys: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[H_kv, n, D]`, scales and minima `[H_kv, groups, D]`: each group's channels are rows of their
    own to the quantiser."""
    parts = [quantise_rows(group.transpose(-1, -2), bits) for group in torch.split(keys, GROUP_TOKENS, dim=1)]
    codes = torch.cat([codes.transpose(-1, -2) for codes, _, _ in parts], dim=1)
    return codes, torch.stack([s for _, s, _ in parts], dim=1), torch.stack([m for _, _, m in parts], dim=1)
