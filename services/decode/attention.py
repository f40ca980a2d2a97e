"""Attention of one decode step over sequences in the arena, each in its own layout and method.

Handed to the model by the engine for each step; the model calls it once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.shared.cache.layout import LayerCache
from kvferry.shared.compression.attention import packed_attention


class BatchAttention:
    """Implements `DecodeAttention` for a batch.

    What goes wrong in one sequence stays there: it is recorded in `errors`, that sequence's output is zero
    from then on, and the others go on.

    Args:
        caches: one entry a sequence: its layers' views.
        num_appended: rows that each sequence has appended before this step.
    """

    def __init__(self, caches: Sequence[tuple[LayerCache, ...]], num_appended: Sequence[int]) -> None:
        self.errors: dict[int, Exception] = {}
        self._caches = caches
        self._num_appended = num_appended

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See `DecodeAttention.__call__`."""
        output = torch.zeros_like(queries)
        for i, caches in enumerate(self._caches):
            if i in self.errors:
                continue
            try:
                output[i] = append_and_attend(
                    caches[layer],
                    queries[i],
                    keys[i],
                    values[i],
                    num_appended=self._num_appended[i],
                    scaling=scaling,
                )
            except Exception as error:  # the edge between one sequence and its batch-mates
                self.errors[i] = error
        return output


def append_and_attend(
    cache: LayerCache, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: float
) -> Tensor:
    """Append one token's row to a layer and attend as its plan says: to what is packed as it is.

    Where a row is evicted for it, its own K and V are also kept apart, if the layer has room for that.

    Args:
        queries: `[H_kv, G, D]`.
        key, value: `[H_kv, D]`.
        num_appended: rows appended to this layer before.

    Returns: `[H_kv, G, D]`.
    """
    position = cache.layout.rows + num_appended
    packed = [] if cache.packed is None else [cache.packed]
    if cache.segments is not None:
        position = cache.segments.make_room(
            cache.keys, cache.values, queries, num_appended=num_appended, scaling=scaling
        )
        packed += cache.segments.layers
    attention = cache.layout.attention
    if cache.generated is not None:
        for own_rows, row in zip(cache.generated, (key, value), strict=True):
            own_rows[:, num_appended] = row
    if packed:
        kind = packed_attention(attention)
        kind.append_packed(packed, cache.keys, cache.values, cache.auxiliary, key, value, position=position)
        return kind.attend_packed(
            queries, packed, cache.keys, cache.values, cache.auxiliary, length=position + 1, scaling=scaling
        )
    attention.append(cache.keys, cache.values, cache.auxiliary, key, value, position=position)
    if cache.stored is not None:
        new_keys, new_values = cache.keys[:, : position + 1], cache.values[:, : position + 1]
        return cache.stored.attend(queries, new_keys, new_values, scaling=scaling)
    return attention.attend(
        queries, cache.keys, cache.values, cache.auxiliary, length=position + 1, scaling=scaling
    )
