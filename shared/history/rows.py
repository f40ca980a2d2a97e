"""Rows of full KV as history stores them: chunks, encoded as the model computed them or in 16, 8 or 4 bits,
and the immutable segments of chunks that records share by slicing.

Rows are encoded once, when they are staged, and every tier stores those bytes, so that a row has the same
values wherever it is read from. Quantised K has a scale and a minimum per channel and group of tokens, V per
token (the quantiser is `kernels/quantise`).

A record is a list of pieces, each the first `length` tokens of a segment. A record that branches off shares
the pieces up to that point without copying. Locking and accounting are the store's.

    bytes of n tokens of one layer, H = num_kv_heads, G groups of GROUP_TOKENS tokens (the last may be short):
    model, 16 bits    2 H n D * bytes of an element
    8, 4 bits         2 H n ceil(D / (8 / bits))  +  4 H D G  +  4 H n
    of latent rows, which are K whose first channels are V, too:
    model, 16 bits    H n D * bytes of an element
    8, 4 bits         H n ceil(D / (8 / bits))  +  4 H D G
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from kvferry.kernels.packed.value_rows import pack_value_rows, unpack_value_rows
from kvferry.kernels.quantise import quantise_rows
from kvferry.shared.process.config import HistoryBits

LayerKV = tuple[Tensor, Tensor]
"""K (post-RoPE) and V of one layer, `[H_kv, n, D]`, on the host."""

GROUP_TOKENS = 64
"""Tokens that share one scale per K channel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowChunk:
    """Consecutive tokens' rows of one layer, encoded. Immutable.

    Attributes:
        tensors: in the order of `RowPrecision.shapes`, perhaps views.
            bits 0: K and V `[H_kv, n, D]` of the stored dtype.
            bits 8, 4: codes of K and of V, uint8 `[H_kv, n, P]`, P bytes for D codes; scales and minima of K,
            float16 `[H_kv, groups, D]`; scales and minima of V, float16 `[H_kv, n]`.
            Latent rows have those of K alone.
        dtype: the model's.
        latent_dim: of latent rows, how many of the first channels are V, too; 0: K and V are stored each.
        group_offset: tokens of the first group that came before the chunk; 0 without groups.
    """

    tensors: tuple[Tensor, ...]
    bits: int
    head_dim: int
    dtype: torch.dtype
    latent_dim: int = 0
    group_offset: int = 0

    @cached_property
    def num_tokens(self) -> int:
        return self.tensors[0].shape[1]

    @cached_property
    def size_bytes(self) -> int:
        return sum(map(attrgetter("nbytes"), self.tensors))

    def rows(self) -> LayerKV:
        """Return K and V in the model's dtype."""
        if self.latent_dim:
            keys = (self._keys(*self.tensors) if self.bits else self.tensors[0]).to(self.dtype)
            return keys, keys[..., : self.latent_dim]
        if not self.bits:
            keys, values = self.tensors
        else:
            k_codes, v_codes, k_scales, k_minima, v_scales, v_minima = self.tensors
            keys = self._keys(k_codes, k_scales, k_minima)
            values = self._unpack(v_codes) * v_scales[..., None] + v_minima[..., None]
        return keys.to(self.dtype), values.to(self.dtype)

    def _keys(self, codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
        groups = (torch.arange(self.num_tokens) + self.group_offset) // GROUP_TOKENS
        return self._unpack(codes) * scales[:, groups] + minima[:, groups]

    def part(self, start: int, stop: int) -> RowChunk:
        """Return views of tokens [start, stop)."""
        first, offset = divmod(self.group_offset + start, GROUP_TOKENS) if self.bits else (0, 0)
        groups = slice(first, num_groups(self.group_offset, stop))
        # K's scales and minima are by group, all others by token.
        by_group = (1, 2) if self.latent_dim else (2, 3)
        tensors = tuple(
            tensor[:, groups if index in by_group else slice(start, stop)]
            for index, tensor in enumerate(self.tensors)
        )
        return replace(self, tensors=tensors, group_offset=offset)

    def copy(self) -> RowChunk:
        """Copy the rows to memory of their own."""
        return replace(self, tensors=tuple(map(_host_copy, self.tensors)))

    def _unpack(self, codes: Tensor) -> Tensor:
        num_heads, num_tokens, _ = codes.shape
        return unpack_value_rows(codes.flatten(0, 1), self.bits, self.head_dim).view(
            num_heads, num_tokens, self.head_dim
        )


def num_groups(group_offset: int, num_tokens: int) -> int:
    """Count the groups that tokens [0, num_tokens) touch; token 0 is `group_offset` tokens into its group."""
    return -(-(group_offset + num_tokens) // GROUP_TOKENS)


@dataclass(frozen=True, kw_only=True)
class RowPrecision:
    """One format of stored rows, for a model whose K and V are of `dtype`. `latent_dim`: as in `RowChunk`.

    Deviation: "16" stores float32 rows as float16; a model of a 16-bit dtype keeps its own, so that 16 and
    "model" are the same there. Rows are clamped to float16's range where float16 is stored: as rows, or as
    scales and minima.
    """

    bits: HistoryBits = "model"
    dtype: torch.dtype | None = None
    latent_dim: int = 0

    @property
    def code(self) -> int:
        """Its code in the stored headers: a number for the stored dtype, or 64 and the bits of a quantised
        value. Releases with float32 scales wrote these bits alone."""
        if self._code_bits:
            return 64 + self._code_bits
        return {torch.float32: 32, torch.float16: 16, torch.bfloat16: 17}[self._stored(self._model_dtype)]

    @property
    def _code_bits(self) -> int:
        return int(self.bits) if self.bits in ("8", "4") else 0

    @property
    def _model_dtype(self) -> torch.dtype:
        assert self.dtype is not None
        return self.dtype

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16 if self.bits == "16" and dtype == torch.float32 else dtype

    def encode(self, keys: Tensor, values: Tensor) -> RowChunk:
        """Encode rows.

        Args: `[H_kv, n, D]`, n >= 1, on any device. Returns: a chunk on the host that shares no memory.
        """
        dtype, head_dim, bits = keys.dtype, keys.shape[2], self._code_bits
        stored, limit = [keys] if self.latent_dim else [keys, values], torch.finfo(torch.float16).max
        if bits or self._stored(dtype) != dtype:
            stored = [rows.clamp(-limit, limit) for rows in stored]
        if bits:
            tensors = _quantise(*stored, bits=bits)
        else:
            tensors = tuple(_host_copy(rows.to(self._stored(dtype))) for rows in stored)
        return RowChunk(
            tensors=tensors, bits=bits, head_dim=head_dim, dtype=dtype, latent_dim=self.latent_dim
        )

    def shapes(
        self, *, num_tokens: int, group_offset: int, num_kv_heads: int, head_dim: int
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of a chunk's tensors, in order."""
        heads = num_kv_heads
        if not self._code_bits:
            rows = (heads, num_tokens, head_dim), self._stored(self._model_dtype)
            return (rows,) if self.latent_dim else (rows, rows)
        codes = (heads, num_tokens, -(-head_dim // (8 // self._code_bits))), torch.uint8
        channels = (heads, num_groups(group_offset, num_tokens), head_dim), torch.float16
        tokens = (heads, num_tokens), torch.float16
        if self.latent_dim:
            return codes, channels, channels
        return codes, codes, channels, channels, tokens, tokens

    def chunk(self, tensors: Sequence[Tensor], *, group_offset: int, head_dim: int) -> RowChunk:
        """Make a chunk of tensors that have the shapes of `shapes`."""
        return RowChunk(
            tensors=tuple(tensors),
            bits=self._code_bits,
            head_dim=head_dim,
            dtype=self._model_dtype,
            latent_dim=self.latent_dim,
            group_offset=group_offset if self._code_bits else 0,
        )


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _quantise(keys: Tensor, values: Tensor | None = None, *, bits: int) -> tuple[Tensor, ...]:
    """Quantise K and V. Args: values: None for latent rows."""
    num_heads, num_tokens, head_dim = keys.shape
    # Each group's K channels are rows of their own to the quantiser.
    groups = [
        quantise_rows(group.transpose(-1, -2), bits, half=True)
        for group in torch.split(keys.cpu(), GROUP_TOKENS, dim=1)
    ]
    k_codes = torch.cat([codes.transpose(-1, -2) for codes, _, _ in groups], dim=1)
    k_scales, k_minima = (torch.stack([group[index] for group in groups], dim=1) for index in (1, 2))

    def pack(codes: Tensor) -> Tensor:
        packed = pack_value_rows(codes.reshape(num_heads * num_tokens, head_dim), bits)
        return packed.view(num_heads, num_tokens, -1)

    if values is None:
        return pack(k_codes), k_scales, k_minima
    v_codes, v_scales, v_minima = quantise_rows(values.cpu(), bits, half=True)
    return pack(k_codes), pack(v_codes), k_scales, k_minima, v_scales, v_minima


def part_of(chunks: Iterable[RowChunk], start: int, stop: int) -> list[RowChunk]:
    """Return rows [start, stop) of consecutive chunks: the chunks that lie inside, and views of those that
    are cut."""
    parts: list[RowChunk] = []
    position = 0
    for chunk in chunks:
        if position >= stop:
            break
        low, high = max(start - position, 0), min(stop - position, chunk.num_tokens)
        if low < high:
            parts.append(chunk if (low, high) == (0, chunk.num_tokens) else chunk.part(low, high))
        position += chunk.num_tokens
    assert position >= stop, f"{stop - position} of {stop} rows are missing"
    return parts


class Segment:
    """What one turn added: `num_tokens` rows of every layer. Immutable.

    Attributes:
        size_bytes: host memory in use while anything names the segment, even a slice of it.
        references: how many records and turns name it. Guarded by the store's lock.
    """

    def __init__(self, layers: Sequence[Sequence[RowChunk]], num_tokens: int) -> None:
        """Hold these rows.

        Args: layers: consecutive chunks of each layer. A chunk with rows beyond `num_tokens` is copied
            without them, so that their memory is freed.
        """
        self.num_tokens = num_tokens
        self.size_bytes = 0
        self.references = 0
        self._layers: list[list[RowChunk]] = []
        for chunks in layers:
            rows = part_of(chunks, 0, num_tokens)
            if rows[-1] is not chunks[len(rows) - 1]:
                rows[-1] = rows[-1].copy()
            self._layers.append(rows)
            for chunk in rows:
                self.size_bytes += chunk.size_bytes

    def rows(self, layer: int, num_tokens: int) -> list[RowChunk]:
        """Return the first `num_tokens` tokens' rows of a layer."""
        return part_of(self._layers[layer], 0, num_tokens)

    def first(self, num_tokens: int) -> Segment:
        """Make a segment with copies of the first `num_tokens` tokens' rows."""
        layers = [[chunk.copy() for chunk in part_of(chunks, 0, num_tokens)] for chunks in self._layers]
        return Segment(layers, num_tokens)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The first `length` tokens of a segment."""

    segment: Segment
    length: int


def first_pieces(pieces: Iterable[Piece], num_tokens: int) -> tuple[Piece, ...]:
    taken: list[Piece] = []
    for piece in pieces:
        if num_tokens <= 0:
            break
        taken.append(Piece(segment=piece.segment, length=min(piece.length, num_tokens)))
        num_tokens -= piece.length
    return tuple(taken)


def piece_chunks(pieces: Iterable[Piece], layer: int) -> list[RowChunk]:
    return [chunk for piece in pieces for chunk in piece.segment.rows(layer, piece.length)]


def chunk_rows(chunks: Sequence[RowChunk]) -> LayerKV:
    """Return K and V `[H_kv, n, D]` of consecutive chunks; not copied if there is only one."""
    if len(chunks) == 1:
        return chunks[0].rows()
    rows = [chunk.rows() for chunk in chunks]
    if chunks[0].latent_dim:
        joined = torch.cat([keys for keys, _ in rows], dim=1)
        return joined, joined[..., : chunks[0].latent_dim]
    return torch.cat([keys for keys, _ in rows], dim=1), torch.cat([values for _, values in rows], dim=1)
