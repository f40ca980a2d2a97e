"""KIVI attention of a batch: quantised prompts and the rows of their new tokens, in one launch per layer that
appends and one per width that attends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvferry.kernels.decode_batch import (
    BatchShape,
    CachedRows,
    Fields,
    NewToken,
    NewTokens,
    SlotBatch,
    row_fields,
)
from kvferry.kernels.descriptors import ROW_FIELDS, SplitWorkspace, choose_num_programs, split_workspace
from kvferry.kernels.dispatch import alignment_problem
from kvferry.kernels.kivi.rows import KiviRows
from kvferry.kernels.kivi.torch_path import attend
from kvferry.kernels.softmax import plain

FIELDS = ROW_FIELDS + 7
LEFT_KEY_OFFSET, LEFT_VALUE_OFFSET, NUM_LEFT, CODE_OFFSET, SCALE_OFFSET, NUM_GROUPS, BITS = range(
    ROW_FIELDS, FIELDS
)
"""Columns, after those of the new rows: the prompt's rows that are not quantised; codes, counted in int32,
and scales, counted in float16, of the first group; groups; width of a code."""
_OFFSETS = LEFT_KEY_OFFSET, LEFT_VALUE_OFFSET, CODE_OFFSET, SCALE_OFFSET
WORD_BYTES, HEADER_BYTES = 4, 2


@dataclass(frozen=True, kw_only=True)
class QuantisedRows(CachedRows):
    """One sequence's quantised prompt in one layer, and the rows of its new tokens."""

    quantised: KiviRows


@dataclass(frozen=True, kw_only=True)
class KiviScratch:
    """What steps over some slots need. Attributes: widths: of their codes, a launch each."""

    widths: tuple[int, ...]
    splits: SplitWorkspace


def kivi_fields(base: Tensor, rows: QuantisedRows) -> Fields:
    """Return `row_fields` for this kernel's descriptors."""
    quantised, start = rows.quantised, base.data_ptr()
    first, step = row_fields(base, rows, quantised.keys, quantised.values)
    codes, scales = quantised.codes, quantised.scales
    first.append(quantised.keys.shape[1])
    first += [(codes.data_ptr() - start) // WORD_BYTES, (scales.data_ptr() - start) // HEADER_BYTES]
    # tensors without elements have no address
    for tensor, column in zip((quantised.keys, quantised.values, codes, scales), _OFFSETS, strict=True):
        first[column] = first[column] if tensor.numel() else 0
    step += [0, codes.stride(0) // WORD_BYTES, scales.stride(0)]
    return [*first, quantised.codes.shape[1], quantised.bits], [*step, 0, 0]


class KiviBatch(SlotBatch[QuantisedRows, KiviScratch]):
    """A `SlotBatch` by `kivi_decode`. Args: codes: the arena as uint8."""

    def __init__(self, shape: BatchShape, base: Tensor, codes: Tensor) -> None:
        super().__init__("kivi", shape, base, empty=[0] * FIELDS)
        self._codes = codes[: len(codes) // WORD_BYTES * WORD_BYTES]
        self._widths: dict[int, frozenset[int]] = {}

    def place(self, slot: int, layers: Mapping[int, QuantisedRows]) -> None:
        super().place(slot, layers)
        self._widths[slot] = frozenset(rows.quantised.bits for rows in layers.values())

    def remove(self, slot: int) -> None:
        super().remove(slot)
        del self._widths[slot]

    def size(self) -> tuple[int, ...]:
        """See `SlotBatch.size`: the widths, rising."""
        return tuple(sorted(frozenset[int]().union(*self._widths.values())))

    def scratch(self, num_slots: int) -> KiviScratch:
        num_heads = num_slots * self._shape.num_kv_heads
        num_programs = choose_num_programs(num_heads, self._shape.device)
        splits = split_workspace(self._output[:num_slots], num_programs)
        return KiviScratch(widths=self.size(), splits=splits)

    def _attend_one(self, layer: int, slot: int, rows: QuantisedRows, token: NewToken) -> Tensor:
        return attend(token.queries, rows.quantised, *rows.append(token), scaling=plain(token.scaling))

    def _fields(self, rows: QuantisedRows) -> Fields:
        return kivi_fields(self._base, rows)

    def _problem(self, rows: QuantisedRows) -> str | None:
        quantised = rows.quantised
        parts = {
            "codes": quantised.codes,
            "scales": quantised.scales,
            "left_keys": quantised.keys,
            "left_values": quantised.values,
        }
        # tensors without elements have no address
        there = {name: part for name, part in parts.items() if part.numel()}
        return super()._problem(rows) or alignment_problem(**there)

    def _launch(
        self, layer: int, heads: Tensor, step: NewTokens, scratch: KiviScratch, output: Tensor
    ) -> None:
        # a CPU install has no Triton
        from kvferry.kernels.kivi.triton_kernel import Buffers, kivi_decode_batch
        from kvferry.kernels.split_attention import append_rows

        append_rows(self._base, heads, step.keys, step.values)
        buffers = Buffers.of_arena(self._base, self._codes)
        for bits in scratch.widths:
            kivi_decode_batch(
                step.queries,
                buffers,
                heads,
                bits=bits,
                row_stride=self._shape.head_dim,
                scaling=plain(step.scaling),
                workspace=scratch.splits,
                output=output,
            )
