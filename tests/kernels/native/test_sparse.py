"""The C code of hybrid sparse attention chooses the tokens that torch chooses, over rows and over packed
prompts, and keeps sequences apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvtest.native_batches import (
    HEADS,
    Sequences,
    assert_refused_and_torch_goes_on,
    assert_steps_are_torch_s,
    batch_shape,
)
from torch import Tensor

from kvferry.kernels import hsa
from kvferry.kernels.cases import op_checks
from kvferry.kernels.hsa.batch import HsaBatch, SparseRows
from kvferry.kernels.native import library as native
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed_hsa import PageCodes, page_extremes
from kvferry.kernels.packed_hsa.batch import PackedHsaBatch, SparsePackedRows
from kvferry.kernels.softmax import Softmax

pytestmark = pytest.mark.skipif(not native.is_available(), reason="this machine has no C compiler")

ROOM = 16
SIZES = [(1, 6, 9), (2, 32, 5), (5, 11, 64), (4, 7, 17), (7, 5, 1), (3, 1, 40), (4, 9, 5000)]
"""Page size, channels and tokens of the slots, in turns. Random sequences have the first three: by the codes
of one channel many pages are equal, and rounding decides which of them is chosen."""


class SparseSequences(Sequences):
    """Sequences in one arena. Args: lengths: tokens before the first step; of packed ones of the prompt."""

    def __init__(
        self, lengths: list[int], *, is_packed: bool, group_size: int, head_dim: int = 32, seed: int = 0
    ) -> None:
        super().__init__(len(lengths), group_size=group_size, head_dim=head_dim, seed=seed)
        room = 2 * HEADS * head_dim * (4 * (max(lengths) + ROOM) + 64)
        self.arena = torch.full((len(lengths), 2 * room), torch.nan)
        flat, make = self.arena.view(-1), self._packed if is_packed else self._plain
        self.rows = [
            make(memory, length, slot)
            for slot, (memory, length) in enumerate(zip(self.arena, lengths, strict=True))
        ]
        self.op = "packed_hsa" if is_packed else "hsa"
        codes = flat.view(torch.uint8)
        self.batch = PackedHsaBatch(self.shape, flat, codes) if is_packed else HsaBatch(self.shape, flat)

    def _plain(self, memory: Tensor, length: int, slot: int) -> SparseRows:
        page_size, num_channels, num_tokens = SIZES[slot % len(SIZES)]
        head_dim, capacity = self.shape.head_dim, length + ROOM
        size = 2 * HEADS * capacity * head_dim
        keys, values = memory[:size].view(2, HEADS, capacity, head_dim)
        keys[:, :length], values[:, :length] = self.random(2, HEADS, length, head_dim)
        page_max = page_min = keys
        if page_size > 1:
            pages = -(-capacity // page_size)
            extremes = memory[size : size + 2 * HEADS * head_dim * pages].view(2, HEADS, head_dim, pages)
            page_max, page_min = extremes.mT
            if length:
                hsa.page_extremes(keys, page_max, page_min, length=length, page_size=page_size)
        return SparseRows(
            keys=keys,
            values=values,
            length=length,
            page_max=page_max,
            page_min=page_min,
            page_size=page_size,
            num_channels=min(num_channels, head_dim),
            num_tokens=num_tokens,
        )

    def _packed(self, memory: Tensor, length: int, slot: int) -> SparsePackedRows:
        page_size, num_channels, num_tokens = SIZES[slot % len(SIZES)]
        head_dim = self.shape.head_dim
        layer = self.packed_layer(length)
        pages = -(-(length + ROOM) // page_size)
        stride = -(-pages // 16) * 16
        parts = [2 * HEADS * ROOM * head_dim, -(-layer.layout.size_bytes // 16) * 4, 2 * HEADS * head_dim]
        parts = [*parts, -(-2 * HEADS * head_dim * stride // 16) * 4]
        # NaN between the parts
        begins = [sum(parts[:n]) + 16 * n for n in range(len(parts) + 1)]
        new, buffer, ranges, codes = (
            memory[begin : begin + size] for begin, size in zip(begins, parts, strict=False)
        )
        buffer = buffer.view(torch.uint8)[: layer.layout.size_bytes]
        buffer.copy_(layer.buffer)
        packed = view_packed_layer(layer.layout, buffer)
        both = codes.view(torch.uint8)[: 2 * HEADS * head_dim * stride].view(2, HEADS, head_dim, stride)
        extremes = PageCodes(*both[..., :pages].mT, *ranges.view(2, HEADS, head_dim))
        page_extremes(packed, extremes, page_size=page_size)
        rows = new.view(2, HEADS, ROOM, head_dim)
        return SparsePackedRows(
            keys=rows[0],
            values=rows[1],
            length=0,
            packed=packed,
            pages=extremes,
            page_size=page_size,
            num_channels=min(num_channels, head_dim),
            num_tokens=num_tokens,
        )


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("head_dim", [32, 96])
@pytest.mark.parametrize("group_size", [1, 3, 4, 6])
def test_steps_are_torch_s_and_write_what_it_writes(is_packed: bool, head_dim: int, group_size: int) -> None:
    lengths = [300, 129, 127, 64, 9, 260, 40]
    mine, plain = (
        SparseSequences(lengths, is_packed=is_packed, group_size=group_size, head_dim=head_dim, seed=1)
        for _ in range(2)
    )
    active = torch.tensor([1, 1, 0, 1, 1, 1, 1])
    assert_steps_are_torch_s(mine, plain, active, num_steps=9, rtol=3e-5, atol=5e-6)
    # rows and extremes; what is NaN stays NaN
    written, wanted = mine.arena[active > 0], plain.arena[active > 0]
    assert torch.equal(written.view(torch.int32), wanted.view(torch.int32))


@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=3),
    is_packed=st.booleans(),
    group_size=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
def test_any_lengths(lengths: list[int], is_packed: bool, group_size: int, seed: int) -> None:
    sequences = SparseSequences(lengths, is_packed=is_packed, group_size=group_size, seed=seed)
    sequences.place()
    step = sequences.step()
    errors: dict[int, Exception] = {}
    output, expected = sequences.attend(step), sequences.batch.attend_slots(0, step, errors)
    assert not errors
    torch.testing.assert_close(output, expected, rtol=3e-5, atol=5e-6)


@pytest.mark.parametrize("is_packed", [False, True])
def test_of_equal_pages_the_first_are_taken(is_packed: bool) -> None:
    """All tokens are alike, so every score is the same."""
    sequences = SparseSequences([200], is_packed=is_packed, group_size=2)
    rows = sequences.rows[0]
    if isinstance(rows, SparseRows):
        rows.keys[:, :200] = rows.keys[:, :1]
    else:
        rows.pages.highest.fill_(7)
        rows.pages.lowest.fill_(7)
    sequences.place()
    step = sequences.step()
    output, expected = sequences.attend(step), sequences.batch.attend_slots(0, step, errors={})
    torch.testing.assert_close(output, expected, rtol=3e-5, atol=5e-6)


@pytest.mark.parametrize(("op", "num_cases"), [("hsa", 4), ("trizone", 2)])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_the_self_test_s_cases_pass(head_dim: int, op: str, num_cases: int) -> None:
    cases = list(op_checks(op, batch_shape(1, group_size=4, head_dim=head_dim)))
    assert len(cases) == num_cases
    for case in cases:
        assert case.problem(case.launch()) is None


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_a_neighbour_that_is_not_finite_changes_no_bit(is_packed: bool, spoilt: float) -> None:
    mine, alone = (
        SparseSequences([300, 300, 50], is_packed=is_packed, group_size=4, head_dim=64) for _ in range(2)
    )
    mine.place()
    alone.place([0, 2])
    rows = mine.rows[1]
    if isinstance(rows, SparseRows):
        rows.keys[0, 5:9] = rows.page_max[0, 3:20] = spoilt
    else:
        rows.pages.step[0, :9] = rows.pages.low[0, 3] = spoilt
    step = mine.step()
    step.queries[1, 0, 1, 3] = spoilt
    output, expected = mine.attend(step), alone.attend(step)
    assert output[1, 1].isfinite().all()
    assert torch.equal(output[[0, 2]], expected[[0, 2]])
    mine.batch.remove(1)
    assert not mine.attend(step)[1].any()


@pytest.mark.parametrize(
    ("is_packed", "column"),
    [*((False, n) for n in (0, *range(2, 9))), *((True, n) for n in (0, *range(2, 11)))],
)
def test_tables_that_point_outside_are_an_error_and_torch_goes_on(is_packed: bool, column: int) -> None:
    mine, plain = (SparseSequences([90, 90], is_packed=is_packed, group_size=2) for _ in range(2))
    mine.place()
    # K, length, extremes, stride, P, k1, k2, ranges
    mine.batch._tables._table[0, -1, column] = -1 if column in (6, 8) else 1 << 40
    assert_refused_and_torch_goes_on(mine, plain)


def test_layers_with_another_softmax_run_in_torch() -> None:
    mine, plain = (SparseSequences([90, 200], is_packed=False, group_size=2) for _ in range(2))
    mine.place()
    plain.place()
    for _ in range(2):
        step = mine.step()._replace(scaling=Softmax(scaling=0.2, softcap=2.0, sinks=None))
        output = mine.batch.attend(0, step, errors={}, scratch=mine.batch.scratch(2)).clone()
        expected = plain.batch.attend(0, step, errors={}, scratch=None)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        for batch in (mine.batch, plain.batch):
            batch.advance(torch.ones(2, dtype=torch.int64))


def test_heads_that_c_code_cannot_run_are_torch_s() -> None:
    sequences = SparseSequences([40], is_packed=True, group_size=2, head_dim=48)
    assert not sequences.batch.is_launched
