"""Rows of full KV in host memory: immutable segments, which records share by slicing.

A record is a list of pieces, each the first `length` tokens of a segment. A record that branches off shares
the pieces up to that point without copying. Locking and accounting are the store's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvferry.shared.history.precision import LayerKV, RowChunk


def part_of(chunks: Iterable[RowChunk], start: int, stop: int) -> list[RowChunk]:
    """Rows [start, stop) of consecutive chunks: the chunks that lie inside, and views of those that are
    cut."""
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
        """Args: layers: consecutive chunks of each layer. A chunk with rows beyond `num_tokens` is copied
        without them, so that their memory is freed."""
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
        """The first `num_tokens` tokens' rows of a layer."""
        return part_of(self._layers[layer], 0, num_tokens)

    def first(self, num_tokens: int) -> Segment:
        """A segment with copies of the first `num_tokens` tokens' rows."""
        layers = [[chunk.copy() for chunk in part_of(chunks, 0, num_tokens)] for chunks in self._layers]
        return Segment(layers, num_tokens)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The first `length` tokens of a segment."""

    segment: Segment
    length: int


def first_pieces(pieces: Iterable[Piece], num_tokens: int) -> tuple[Piece, ...]:
    """The pieces that make up the first `num_tokens` tokens."""
    taken: list[Piece] = []
    for piece in pieces:
        if num_tokens <= 0:
            break
        taken.append(Piece(segment=piece.segment, length=min(piece.length, num_tokens)))
        num_tokens -= piece.length
    return tuple(taken)


def piece_chunks(pieces: Iterable[Piece], layer: int) -> list[RowChunk]:
    """The chunks of consecutive pieces."""
    return [chunk for piece in pieces for chunk in piece.segment.rows(layer, piece.length)]


def chunk_rows(chunks: Sequence[RowChunk]) -> LayerKV:
    """K and V `[H_kv, n, D]` of consecutive chunks; not copied if there is only one."""
    if len(chunks) == 1:
        return chunks[0].rows()
    rows = [chunk.rows() for chunk in chunks]
    return torch.cat([keys for keys, _ in rows], dim=1), torch.cat([values for _, values in rows], dim=1)
