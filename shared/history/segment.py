"""Rows of full KV in host memory: immutable segments, shared between records by slicing.

A record is a list of pieces, each the first `length` tokens of a segment; a branch shares the pieces up to
where it leaves, without copying. Does no locking and no accounting; the store does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LayerKV = tuple[Tensor, Tensor]
"""K (post-RoPE) and V of one layer, `[H_kv, n, D]`, on the host, contiguous."""


def host_copy(rows: Tensor) -> Tensor:
    """A contiguous copy on the host that shares nothing with `rows`."""
    return torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)


def chunk_bytes(chunk: LayerKV) -> int:
    return chunk[0].nbytes + chunk[1].nbytes


def first_rows(chunks: Iterable[LayerKV], num_tokens: int) -> list[LayerKV]:
    """Views of the first `num_tokens` rows of consecutive chunks; whole chunks come as they are."""
    views: list[LayerKV] = []
    remaining = num_tokens
    for keys, values in chunks:
        if remaining <= 0:
            break
        if keys.shape[1] <= remaining:
            views.append((keys, values))
        else:
            views.append((keys[:, :remaining], values[:, :remaining]))
        remaining -= views[-1][0].shape[1]
    assert remaining <= 0, f"{remaining} of {num_tokens} rows are missing"
    return views


class Segment:
    """What one turn added: `num_tokens` rows of every layer. Never changes.

    Attributes:
        size_bytes: host memory that it holds as long as anything names it, sliced or not.
        references: records and turns that name it; kept by the store under its lock.
    """

    def __init__(self, layers: Sequence[Sequence[LayerKV]], num_tokens: int) -> None:
        """Args: layers: consecutive chunks per layer. Rows beyond `num_tokens` are cut off, so that their
        memory is not kept."""
        self.num_tokens = num_tokens
        self._layers = tuple(self._trimmed(chunks, num_tokens) for chunks in layers)
        self.size_bytes = sum(chunk_bytes(chunk) for chunks in self._layers for chunk in chunks)
        self.references = 0

    def rows(self, layer: int, num_tokens: int) -> list[LayerKV]:
        """Views of the first `num_tokens` tokens of a layer."""
        return first_rows(self._layers[layer], num_tokens)

    @staticmethod
    def _trimmed(chunks: Sequence[LayerKV], num_tokens: int) -> tuple[LayerKV, ...]:
        whole = {id(keys) for keys, _ in chunks}
        return tuple(
            (keys, values) if id(keys) in whole else (host_copy(keys), host_copy(values))
            for keys, values in first_rows(chunks, num_tokens)
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The first `length` tokens of a segment."""

    segment: Segment
    length: int


def first_pieces(pieces: Iterable[Piece], num_tokens: int) -> tuple[Piece, ...]:
    """The pieces that make up the first `num_tokens` tokens."""
    taken: list[Piece] = []
    remaining = num_tokens
    for piece in pieces:
        if remaining <= 0:
            break
        taken.append(Piece(segment=piece.segment, length=min(piece.length, remaining)))
        remaining -= piece.length
    return tuple(taken)


def load_rows(pieces: Sequence[Piece], layer: int) -> LayerKV:
    """K and V `[H_kv, n, D]` of consecutive pieces: a view where there is one chunk, else one copy."""
    chunks = [chunk for piece in pieces for chunk in piece.segment.rows(layer, piece.length)]
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat([keys for keys, _ in chunks], dim=1), torch.cat([values for _, values in chunks], dim=1)
