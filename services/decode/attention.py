"""Attention of one decode step over sequences in the arena, each in its own layout and method.

Handed to the model by the engine for each step; the model calls it once a layer. Sequences of one kind in a
layer are attended together: `kernels/*/batch.py` launches once for all of them where it has a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows, SlotBatch
from kvferry.kernels.dense_decode.batch import DenseBatch
from kvferry.kernels.hsa.batch import HsaBatch
from kvferry.kernels.trizone.batch import TriZoneBatch
from kvferry.services.decode.members import Members
from kvferry.shared.cache.layout import LayerCache
from kvferry.shared.compression.attention import packed_attention
from kvferry.shared.model.spec import ModelSpec


class BatchAttention:
    """Implements `DecodeAttention` for a batch: a slot a sequence, and empty ones behind them.

    What goes wrong in one sequence stays there: it is recorded in `errors`, that sequence's output is zero
    from then on, and the others go on.

        made: every slot empty ──place──► every layer once ──advance──► every layer once ...

    Args: members: a batch whose signature those have that are placed.
    """

    def __init__(self, members: Members) -> None:
        shape, base = members.shape, members.base
        self.errors: dict[int, Exception] = {}
        self._num_steps = 0
        self._num_appended: tuple[int, ...] = ()
        self._alone: Sequence[Mapping[int, LayerCache]] = [{}] * shape.num_layers
        self._has_alone = any(members.alone)
        self._dense = DenseBatch(shape, base) if any(members.dense) else None
        self._sparse = HsaBatch(shape, base, members.sparse_size) if any(members.sparse) else None
        self._packed = (
            TriZoneBatch(shape, base, members.codes, members.packed_size) if any(members.packed) else None
        )
        kinds: list[tuple[SlotBatch[Any] | None, Sequence[Mapping[int, CachedRows]]]] = [
            (self._dense, members.dense),
            (self._sparse, members.sparse),
            (self._packed, members.packed),
        ]
        self._batches = [(batch, tuple(map(bool, layers))) for batch, layers in kinds if batch is not None]

    @classmethod
    def of(
        cls, spec: ModelSpec, caches: Sequence[tuple[LayerCache, ...]], num_appended: Sequence[int]
    ) -> BatchAttention:
        """A batch placed. Args: caches: of each sequence, its layers' views; num_appended: rows it has
        appended before the first step."""
        members = Members.of(spec, caches, num_appended, num_slots=len(caches))
        attention = cls(members)
        attention.place(members)
        return attention

    def place(self, members: Members) -> None:
        """Take up a batch before its first step."""
        self.errors = {}
        self._num_steps = 0
        self._num_appended = members.num_appended
        self._alone = members.alone
        if self._dense is not None:
            self._dense.fill(members.dense)
        if self._sparse is not None:
            self._sparse.fill(members.sparse)
        if self._packed is not None:
            self._packed.fill(members.packed)
            if self._packed.is_launched:
                self._packed.take_up(members.works)

    def release(self) -> None:
        """Hold nothing of the batch any more."""
        self._alone = [{}] * len(self._alone)
        for batch, _ in self._batches:
            batch.release()

    @property
    def is_launched(self) -> bool:
        """Whether kernels attend everything, so that a step asks the device for nothing."""
        return not self._has_alone and all(batch.is_launched for batch, _ in self._batches)

    def advance(self, active: Tensor) -> None:
        """On to the next step. Args: active: int64 `[S]`, 1 for the slots that go on, else 0."""
        self._num_steps += 1
        for batch, _ in self._batches:
            batch.advance(active)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See `DecodeAttention.__call__`."""
        outputs = [
            batch.attend(layer, queries, keys, values, scaling=scaling, alone=self._run_alone)
            for batch, layers in self._batches
            if layers[layer]
        ]
        if self._alone[layer] or not outputs:
            outputs.append(self._attend_alone(layer, queries, keys, values, scaling))
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs).sum(0)

    def _attend_alone(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        output = torch.zeros_like(queries)
        for slot, cache in self._alone[layer].items():
            attend = partial(
                append_and_attend,
                cache,
                queries[slot],
                keys[slot],
                values[slot],
                num_appended=self._num_appended[slot] + self._num_steps,
                scaling=scaling,
            )
            attended = self._run_alone(slot, attend)
            if attended is not None:
                output[slot] = attended
        return output

    def _run_alone(self, slot: int, attend: Callable[[], Tensor]) -> Tensor | None:
        """See `kernels.decode_batch.Alone`."""
        if slot in self.errors:
            return None
        try:
            return attend()
        except Exception as error:  # the edge between one sequence and its batch-mates
            self.errors[slot] = error
            return None


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
