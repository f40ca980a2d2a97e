"""Rows of full KV in host memory: immutable segments, shared between records by slicing.

A record is a list of pieces, each the first `length` tokens of a segment; a branch shares the pieces up to
where it leaves, without copying. Does no locking and no accounting; the store does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvferry.shared.history.precision import LayerKV, RowChunk


def first_rows(chunks: Iterable[RowChunk], num_tokens: int) -> list[RowChunk]:
    """Views of the first `num_tokens` rows of consecutive chunks; whole chunks come as they are."""
    return part_of(chunks, 0, num_tokens)


def part_of(chunks: Iterable[RowChunk], start: int, stop: int) -> list[RowChunk]:
    """Views of rows [start, stop) of consecutive chunks; whole chunks come as they are."""
    views: list[RowChunk] = []
    position = 0
    for chunk in chunks:
        if position >= stop:
            break
        low, high = max(start - position, 0), min(stop - position, chunk.num_tokens)
        if low < high:
            views.append(chunk if (low, high) == (0, chunk.num_tokens) else chunk.part(low, high))
        position += chunk.num_tokens
    assert position >= stop, f"{stop - position} of {stop} rows are missing"
    return views


class Segment:
    """What one turn added: `num_tokens` rows of every layer. Never changes.

    Attributes:
        size_bytes: host memory that it holds as long as anything names it, sliced or not.
        references: records and turns that name it; kept by the store under its lock.
    """

    def __init__(self, layers: Sequence[Sequence[RowChunk]], num_tokens: int) -> None:
        """Args: layers: consecutive chunks per layer. Rows beyond `num_tokens` are cut off, so that their
        memory is not kept."""
        self.num_tokens = num_tokens
        self._layers = tuple(self._trimmed(chunks, num_tokens) for chunks in layers)
        self.size_bytes = sum(chunk.size_bytes for chunks in self._layers for chunk in chunks)
        self.references = 0

    def rows(self, layer: int, num_tokens: int) -> list[RowChunk]:
        """Views of the first `num_tokens` tokens of a layer."""
        return first_rows(self._layers[layer], num_tokens)

    def first(self, num_tokens: int) -> Segment:
        """A segment of its own with copies of the first `num_tokens` tokens; nothing is shared."""
        layers = [[chunk.copy() for chunk in first_rows(chunks, num_tokens)] for chunks in self._layers]
        return Segment(layers, num_tokens)

    @staticmethod
    def _trimmed(chunks: Sequence[RowChunk], num_tokens: int) -> tuple[RowChunk, ...]:
        whole = {id(chunk) for chunk in chunks}
        return tuple(
            chunk if id(chunk) in whole else chunk.copy() for chunk in first_rows(chunks, num_tokens)
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


def piece_chunks(pieces: Iterable[Piece], layer: int) -> list[RowChunk]:
    """The chunks of consecutive pieces."""
    return [chunk for piece in pieces for chunk in piece.segment.rows(layer, piece.length)]


def chunk_rows(chunks: Sequence[RowChunk]) -> LayerKV:
    """K and V `[H_kv, n, D]` of consecutive chunks: those of the chunk where there is one, else one copy."""
    rows = [chunk.rows() for chunk in chunks]
    if len(rows) == 1:
        return rows[0]
    return torch.cat([keys for keys, _ in rows], dim=1), torch.cat([values for _, values in rows], dim=1)
