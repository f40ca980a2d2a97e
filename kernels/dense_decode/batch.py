"""Dense decode attention of a batch with rows of any lengths: two launches (append, attend), or one call of C
code.

A batch with windows attends to a part of each sequence's rows, which follows from their number alone, so that
nothing but lengths changes from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvferry.kernels.decode_batch import (
    BatchShape,
    CachedRows,
    Fields,
    NewToken,
    NewTokens,
    SlotBatch,
    WindowRows,
    row_fields,
)
from kvferry.kernels.descriptors import ROW_FIELDS, SplitWorkspace, choose_num_programs, split_workspace
from kvferry.kernels.torch_attention import attend_rows


class DenseBatch(SlotBatch[CachedRows, SplitWorkspace]):
    """A `SlotBatch` by dense attention. Args: empty: see `SlotBatch`."""

    C_FUNCTION = "kvferry_attend"

    def __init__(self, shape: BatchShape, base: Tensor, *, empty: Sequence[int] = (0,) * ROW_FIELDS) -> None:
        super().__init__("dense_decode", shape, base, empty=empty)

    def size(self) -> None:
        """See `SlotBatch.size`: the memory depends on nothing else."""

    def scratch(self, num_slots: int) -> SplitWorkspace:
        num_heads = num_slots * self._shape.num_kv_heads
        return split_workspace(self._output[:num_slots], choose_num_programs(num_heads, self._shape.device))

    def _attend_one(self, layer: int, slot: int, rows: CachedRows, token: NewToken) -> Tensor:
        return attend_rows(token.queries, *rows.append(token), scaling=token.scaling)

    def _launch(
        self, layer: int, heads: Tensor, step: NewTokens, scratch: SplitWorkspace, output: Tensor
    ) -> None:
        # a CPU install has no Triton
        from kvferry.kernels.dense_decode.triton_kernel import dense_decode_batch
        from kvferry.kernels.split_attention import append_rows

        append_rows(self._base, heads, step.keys, step.values)
        dense_decode_batch(
            step.queries,
            self._base,
            self._base,
            heads,
            row_stride=self._shape.head_dim,
            scaling=step.scaling,
            workspace=scratch,
            output=output,
        )


class WindowBatch(DenseBatch):
    """A `SlotBatch` by dense attention to windows; its rows are `WindowRows`."""

    def __init__(self, shape: BatchShape, base: Tensor) -> None:
        # kernels divide by the window
        super().__init__(shape, base, empty=[*([0] * ROW_FIELDS), 1, -1])

    @classmethod
    def _fits_native(cls, shape: BatchShape) -> bool:
        return False

    def _fields(self, rows: CachedRows) -> Fields:
        assert isinstance(rows, WindowRows), f"rows are {type(rows).__name__}; they must have a window"
        first, step = row_fields(self._base, rows)
        before = -1 if rows.rows_before is None else rows.rows_before
        return [*first, rows.window, before], [*step, 0, 0]
