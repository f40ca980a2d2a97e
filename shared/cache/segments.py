"""A packed layer's generated tokens, packed in their turn: streaming re-budgeting, RDKV's future work.

Decode appends each new token here instead of to K and V; whenever these hold a whole segment, its bits are
allocated and it is packed as the prompt was, and K and V begin anew. Attends on nothing.

    K, V       | 0 ... R - 1: rows of the segment under way |      one more row comes, and they are full:
    packed     | segment 0 | segment 1 | ...                |  ◄── packed behind the others, R rows free again
    queries    | the last W of the segment under way        |
    rows       host copies of what has been packed, where the session's history wants them
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.packed import PackedLayer, view_packed_layer
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.rdkv.compress import compress_layer_rdkv
from kvferry.shared.compression.representation import Rebudgeting
from kvferry.shared.errors import KvferryError


class PackedSegments:
    """One layer's segments of one sequence.

    Legend: R tokens of a segment, W queries that a packing looks at.

    Args:
        packed: uint8, room for all segments.
        queries: `[H_kv, G, W, D]`, this object's to fill.
        keeps_rows: whether K and V are copied to the host before they are packed.

    Attributes:
        layers: the segments packed so far, oldest first.
        rows: host copies of their K and V, `[H_kv, R, D]` each; empty unless wanted.
    """

    def __init__(
        self, rebudgeting: Rebudgeting, packed: Tensor, queries: Tensor, *, keeps_rows: bool
    ) -> None:
        self.layers: list[PackedLayer] = []
        self.rows: list[tuple[Tensor, Tensor]] = []
        self._rebudgeting = rebudgeting
        self._packed = packed
        self._queries = queries
        self._keeps_rows = keeps_rows

    @property
    def packed_bytes(self) -> int:
        """Bytes of the segments packed so far."""
        return sum(layer.layout.size_bytes for layer in self.layers)

    @property
    def num_packed(self) -> int:
        """Tokens in the segments packed so far."""
        return len(self.layers) * self._rebudgeting.segment_tokens

    def make_room(
        self, keys: Tensor, values: Tensor, queries: Tensor, *, num_appended: int, scaling: float
    ) -> int:
        """Before a row is appended: pack the rows there are, if they are a whole segment.

        Args:
            keys, values: `[H_kv, R or fewer, D]`, the segment under way.
            queries: `[H_kv, G, D]` of the token to be appended.
            num_appended: tokens appended before.

        Returns: the row of K and V that the token gets.

        Raises:
            KvferryError: K or V are not finite, or beyond what a packed layer holds.
        """
        size = self._rebudgeting.segment_tokens
        if num_appended - self.num_packed == size:
            self._pack(keys, values, scaling)
        row = num_appended - self.num_packed
        beyond = row - (size - self._rebudgeting.window)
        if beyond >= 0:
            self._queries[:, :, beyond] = queries
        return row

    def _pack(self, keys: Tensor, values: Tensor, scaling: float) -> None:
        inputs = LayerInputs(layer=0, queries=self._queries, keys=keys, values=values, scaling=scaling)
        try:
            packed = compress_layer_rdkv(self._rebudgeting.settings, inputs).packed
        except ValueError as error:
            raise KvferryError(f"generated tokens cannot be packed: {error}", reason="packing") from error
        start = self.packed_bytes
        place = self._packed[start : start + packed.layout.size_bytes]
        place.copy_(packed.buffer)
        if self._keeps_rows:
            self.rows.append((_on_host(keys), _on_host(values)))
        self.layers.append(view_packed_layer(packed.layout, place))


def _on_host(rows: Tensor) -> Tensor:
    return rows.to("cpu", copy=True, memory_format=torch.contiguous_format)
