"""Dense decode attention of a whole batch: rows of any lengths, appended to and attended by two launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import Alone, BatchShape, CachedRows, HeadTables, row_fields
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.descriptors import ROW_FIELDS, shape_problem
from kvferry.kernels.dispatch import decided_path, path_for
from kvferry.kernels.split_workspace import choose_num_splits, split_workspace


class DenseBatch:
    """Implements `LaunchBatch` by `dense_decode`.

    Args: base: what descriptors count from, one-dimensional in the rows' dtype; the arena.
    """

    def __init__(self, shape: BatchShape, base: Tensor) -> None:
        self._shape = shape
        self._base = base
        self._layers: Sequence[Mapping[int, CachedRows]] = ()
        self._num_steps = 1
        self._problem = shape_problem(shape.dtype, shape.group_size, shape.head_dim)
        self.is_launched = decided_path("dense_decode", shape.device, self._problem) != "torch"
        if self.is_launched:
            self._allocate()

    def fill(self, layers: Sequence[Mapping[int, CachedRows]]) -> None:
        """Place a batch. Args: layers: for each, the rows of the slots that attend densely there."""
        self._layers = layers
        self._num_steps = 1
        if self.is_launched:
            self._tables.fill(
                [{slot: row_fields(self._base, rows) for slot, rows in layer.items()} for layer in layers]
            )

    def release(self) -> None:
        """See `LaunchBatch.release`."""
        self._layers = ()

    def advance(self, active: Tensor) -> None:
        """See `LaunchBatch.advance`."""
        self._num_steps += 1
        if self.is_launched:
            self._tables.advance(active)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, alone: Alone
    ) -> Tensor:
        """See `LaunchBatch.attend`."""
        if self.is_launched:
            path_for("dense_decode", self._shape.device)
            return self._launch(layer, queries, keys, values, scaling)
        output = torch.zeros_like(queries)
        for slot, rows in self._layers[layer].items():
            attended = alone(
                slot, partial(self._attend_one, rows, queries[slot], keys[slot], values[slot], scaling)
            )
            if attended is not None:
                output[slot] = attended
        return output

    def _attend_one(
        self, rows: CachedRows, queries: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        length = rows.length + self._num_steps
        rows.keys[:, length - 1] = key
        rows.values[:, length - 1] = value
        return dense_decode(queries, rows.keys[:, :length], rows.values[:, :length], scaling=scaling)

    def _allocate(self) -> None:
        shape = self._shape
        self._tables = HeadTables(shape, [0] * ROW_FIELDS)
        self._num_splits = choose_num_splits(shape.num_heads, shape.device)
        self._workspace = split_workspace(
            num_heads=shape.num_heads,
            num_slots=shape.num_heads * self._num_splits,
            group_size=shape.group_size,
            head_dim=shape.head_dim,
            device=shape.device,
        )
        size = (shape.num_slots, shape.num_kv_heads, shape.group_size, shape.head_dim)
        self._output = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def _launch(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        # Here, because a CPU install has no Triton.
        from kvferry.kernels.append_rows import append_rows
        from kvferry.kernels.dense_decode.triton_kernel import dense_decode_batch

        heads = self._tables.layer(layer)
        append_rows(self._base, heads, keys.contiguous(), values.contiguous())
        dense_decode_batch(
            queries.contiguous(),
            self._base,
            self._base,
            heads,
            row_stride=self._shape.head_dim,
            scaling=scaling,
            workspace=self._workspace,
            num_splits=self._num_splits,
            output=self._output,
        )
        return self._output
