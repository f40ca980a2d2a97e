"""Writes one layer of a delta: rows that were held are copied within the arena, the others come in blocks.

Called by `cache_writer.py` once the layer's positions are known. Bytes that come are gathered on the host,
being few, and put in their places with the section's last byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.held_rows import HeldSelections, Positions
from kvferry.shared.wire.messages import BlockHeader, Section


class DeltaLayerWriter:
    """One layer of rows.

    Args:
        positions: int32 `[H_kv, n]`, the rows that the layer is to have.
        held: what is there of the last turns; held_rows: K and V `[H_kv, cap, D]` that each of them lies in.
        rows: K and V `[H_kv, cap, D]` to fill.
    """

    def __init__(
        self,
        layer: int,
        positions: Positions,
        *,
        held: HeldSelections,
        held_rows: Sequence[tuple[Tensor, Tensor]],
        rows: tuple[Tensor, Tensor],
    ) -> None:
        self._layer = layer
        self._rows = dict(zip((Section.KEYS, Section.VALUES), rows, strict=True))
        which, numbers = held.find(layer, positions)
        self._counts = (which < 0).sum(1, dtype=np.int32)
        self._heads, self._slots = (torch.from_numpy(its) for its in np.nonzero(which < 0))
        for selection, sources in enumerate(held_rows):
            heads, slots = np.nonzero(which == selection)
            copied = torch.from_numpy(numbers[heads, slots])
            of_head, to_row = torch.from_numpy(heads), torch.from_numpy(slots)
            for source, target in zip(sources, rows, strict=True):
                target[of_head, to_row] = source[of_head, copied]
        self._pending: dict[Section, bytearray] = {Section.KEYS: bytearray(), Section.VALUES: bytearray()}
        self._sizes = bytearray()
        self.missing_bytes = 2 * len(self._heads) * rows[0].shape[2] * rows[0].itemsize
        """Of rows that are still to come."""

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Take one block of NEW_ROWS, KEYS or VALUES, in order.

        Raises: TransferFailed: the sender counts on other rows being here (`held_rows`).
        """
        if header.section is Section.NEW_ROWS:
            self._sizes += payload
            if len(self._sizes) == header.section_bytes:
                self._check_counts()
            return
        pending = self._pending[header.section]
        pending += payload
        if len(pending) == header.section_bytes:
            target = self._rows[header.section]
            came = torch.frombuffer(pending, dtype=target.dtype).view(len(self._heads), target.shape[2])
            target[self._heads, self._slots] = came.to(target.device)
            self.missing_bytes -= len(pending)
            self._pending[header.section] = bytearray()

    def _check_counts(self) -> None:
        counts = np.frombuffer(self._sizes, np.dtype("<i4"))
        if not np.array_equal(counts, self._counts):
            raise TransferFailed(
                f"layer {self._layer}: {counts.tolist()} rows of the heads are to come; this worker lacks "
                f"{self._counts.tolist()}",
                reason="held_rows",
            )
