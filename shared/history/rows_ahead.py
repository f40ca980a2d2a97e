"""A turn's reused rows, made ready on other threads one layer ahead of the prompt's pass, from every tier.

Place in the request's path: between a staged turn, whose `load` the prefill engine calls layer by layer, and
host memory and the tiers behind it. Rows are decoded and joined, and on a GPU copied to the device, while the
layer before is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch

from kvferry.shared.errors import HistoryMiss
from kvferry.shared.history.back_tier import BackRows
from kvferry.shared.history.rows import LayerKV, Piece, RowChunk, chunk_rows, piece_chunks

T = TypeVar("T")

_MEMORY_TIMEOUT_S = 60.0
"""Rows in memory are made ready in milliseconds; a thread that does not do so is stuck."""


class RowsAhead:
    """`take` is called by one thread, `cancel` by any.

        take(layer) ──► begin(layer) unless it is begun, begin(layer + 1) ──► wait for layer

    Args:
        pool: threads that prepare rows if all are in memory; others are prepared where they were read.
        pieces: the rows in memory.
        back_rows: those of the tokens that follow, in a tier behind it; None if there are none.
    """

    def __init__(
        self, pool: Executor, pieces: Sequence[Piece], back_rows: BackRows | None, num_layers: int
    ) -> None:
        self._pool = pool
        self._pieces = pieces
        self._back_rows = back_rows
        self._num_layers = num_layers
        self._begun: dict[int, Future[tuple[list[RowChunk], Any]]] = {}

    def take(self, layer: int, prepare: Callable[[LayerKV], T]) -> tuple[list[RowChunk], T]:
        """Wait for a layer's rows, and begin the next layer's.

        Args: prepare: called with K and V on another thread; for the next layer, before or after this
            returns.
        Returns: the chunks that came from a tier behind memory, and what `prepare` returned.
        Raises: HistoryMiss: as `BackRows.wait`.
        """
        begun = self._begun.pop(layer, None) or self._begin(layer, prepare)
        if layer + 1 < self._num_layers and layer + 1 not in self._begun:
            self._begun[layer + 1] = self._begin(layer + 1, prepare)
        if self._back_rows is not None:
            return self._back_rows.wait(begun, f"layer {layer} was")
        try:
            return begun.result(_MEMORY_TIMEOUT_S)
        except FutureTimeout:
            message = f"layer {layer} of the rows in memory was not ready within {_MEMORY_TIMEOUT_S} s"
            raise HistoryMiss(message, reason="memory_slow") from None

    def cancel(self) -> None:
        """Cancel what has not begun. Idempotent."""
        for begun in list(self._begun.values()):
            begun.cancel()
        self._begun.clear()

    def _begin(self, layer: int, prepare: Callable[[LayerKV], T]) -> Future[tuple[list[RowChunk], T]]:
        pieces = self._pieces

        def ready(fetched: list[RowChunk]) -> T:
            with torch.inference_mode():
                return prepare(chunk_rows(piece_chunks(pieces, layer) + fetched))

        if self._back_rows is not None:
            return self._back_rows.fetch(layer, ready)
        return self._pool.submit(lambda: ([], ready([])))
