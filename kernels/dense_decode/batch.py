"""Dense decode attention of a batch with rows of any lengths, in two launches (append, attend)."""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.checks import shape_problem
from kvferry.kernels.decode_batch import BatchShape, CachedRows, SlotBatch
from kvferry.kernels.dense_decode.torch_path import dense_decode
from kvferry.kernels.descriptors import ROW_FIELDS
from kvferry.kernels.dispatch import planned_path
from kvferry.kernels.split_workspace import choose_num_splits


class DenseBatch(SlotBatch[CachedRows]):
    """A `SlotBatch` by dense attention."""

    def __init__(self, shape: BatchShape, base: Tensor) -> None:
        problem = shape_problem(shape.dtype, shape.group_size, shape.head_dim)
        is_launched = planned_path("dense_decode", shape.device, problem) != "torch"
        super().__init__("dense_decode", shape, base, is_launched=is_launched, empty=[0] * ROW_FIELDS)
        if is_launched:
            self._num_splits = choose_num_splits(shape.num_heads, shape.device)
            self._workspace = shape.workspace(shape.num_heads * self._num_splits)

    def _attend_one(
        self,
        layer: int,
        slot: int,
        rows: CachedRows,
        queries: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
    ) -> Tensor:
        keys, values = rows.append(key, value, position=rows.length + self._num_steps - 1)
        return dense_decode(queries, keys, values, scaling=scaling)

    def _launch(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        # a CPU install has no Triton
        from kvferry.kernels.append_rows import append_rows
        from kvferry.kernels.dense_decode.triton_kernel import dense_decode_batch

        heads = self._tables.layer(layer)
        append_rows(self._base, heads, keys, values)
        dense_decode_batch(
            queries,
            self._base,
            self._base,
            heads,
            row_stride=self._shape.head_dim,
            scaling=scaling,
            workspace=self._workspace,
            num_splits=self._num_splits,
            output=self._output,
        )
