"""The C code attends to packed rows as torch does, reads nothing beyond them, and keeps sequences apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import BatchShape, NewTokens
from kvferry.kernels.native import library as native
from kvferry.kernels.op_checks import op_checks
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed.packing import fill_in_torch, indexed_layer
from kvferry.kernels.quarantine import quarantined, release_all
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch

pytestmark = pytest.mark.skipif(not native.is_available(), reason="this machine has no C compiler")

HEADS, CAPACITY = 2, 12
WIDTHS = torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8)
CPU = torch.device("cpu")


class Sequences:
    """A batch of packed prompts and new rows in one arena, which is NaN wherever there is nothing."""

    def __init__(
        self, num_tokens: list[int], num_new: list[int], *, group_size: int, head_dim: int, seed: int = 0
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.num_slots = len(num_tokens)
        self.shape = BatchShape(
            num_layers=1,
            num_slots=self.num_slots,
            num_kv_heads=HEADS,
            group_size=group_size,
            head_dim=head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        packed = [self._packed(number) for number in num_tokens]
        num_rows = 2 * HEADS * CAPACITY * head_dim
        # each slot: new rows, packed bytes, and NaN behind them
        sizes = [num_rows + its.layout.size_bytes // 4 + 64 for its in packed]
        self.arena = torch.full((sum(sizes),), torch.nan)
        self.rows: list[PackedRows] = []
        for of_slot, layer, length in zip(self.arena.split(sizes), packed, num_new, strict=True):
            new = of_slot[:num_rows].view(2, HEADS, CAPACITY, head_dim)
            new[:, :, :length] = self.random(2, HEADS, length, head_dim)
            buffer = of_slot[num_rows:-64].view(torch.uint8)
            buffer.copy_(layer.buffer)
            self.rows.append(
                PackedRows(
                    keys=new[0], values=new[1], length=length, packed=view_packed_layer(layer.layout, buffer)
                )
            )
        self.batch = TriZoneBatch(self.shape, self.arena, self.arena.view(torch.uint8))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _packed(self, num_tokens: int):  # type: ignore[no-untyped-def]
        head_dim = self.shape.head_dim
        keys, values = self.random(2, HEADS, num_tokens, head_dim)
        drawn = [
            WIDTHS[torch.randint(len(WIDTHS), (HEADS, count), generator=self._generator)]
            for count in (head_dim, num_tokens)
        ]
        layer = indexed_layer(keys, values, *drawn)
        fill_in_torch(layer, keys, values)
        return layer

    def place(self, slots: list[int] | None = None) -> None:
        for slot in range(self.num_slots) if slots is None else slots:
            self.batch.place(slot, {0: self.rows[slot]})

    def step(self, size: float = 2.0) -> NewTokens:
        head_dim = self.shape.head_dim
        queries = size * self.random(self.num_slots, HEADS, self.shape.group_size, head_dim)
        keys, values = self.random(2, self.num_slots, HEADS, head_dim)
        return NewTokens(queries, keys, values, head_dim**-0.5)

    def attend(self, step: NewTokens) -> Tensor:
        output = self.batch.attend(0, step, errors={}, scratch=self.batch.scratch(self.num_slots))
        assert self.batch.is_launched
        return output.clone()


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group_size", [1, 3, 4, 6])
def test_steps_are_torch_s_and_write_its_rows(head_dim: int, group_size: int) -> None:
    sizes = ([0, 1, 7, 8, 127, 128, 129, 300], [0, 1, 2, 0, 5, 0, 9, 3])
    mine, plain = (Sequences(*sizes, group_size=group_size, head_dim=head_dim) for _ in range(2))
    for its in (mine, plain):
        its.place()
    active = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1])
    mine.batch.show(active)
    before = dispatch.calls().get(("trizone", "native"), 0)
    for _ in range(3):
        step = mine.step()
        output, expected = mine.attend(step), plain.batch.attend_slots(0, step, errors={})
        torch.testing.assert_close(output[active > 0], expected[active > 0], rtol=2e-5, atol=3e-6)
        assert not output[2].any(), "it is not active"
        mine.batch.advance(active)
        plain.batch.advance(active)
    assert dispatch.calls()["trizone", "native"] == before + 3
    for slot in torch.nonzero(active).flatten().tolist():
        for name in ("keys", "values"):
            written, wanted = getattr(mine.rows[slot], name), getattr(plain.rows[slot], name)
            torch.testing.assert_close(written, wanted, rtol=0, atol=0, equal_nan=True)
    assert mine.rows[2].keys[:, 2:].isnan().all()


@given(
    num_tokens=st.lists(st.integers(0, 400), min_size=1, max_size=3),
    group_size=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
def test_any_lengths_and_widths(num_tokens: list[int], group_size: int, seed: int) -> None:
    num_new = [number % 4 for number in num_tokens]
    its = Sequences(num_tokens, num_new, group_size=group_size, head_dim=32, seed=seed)
    its.place()
    step = its.step()
    output, expected = its.attend(step), its.batch.attend_slots(0, step, errors={})
    torch.testing.assert_close(output, expected, rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("head_dim", [32, 128])
def test_the_self_test_s_cases_pass(head_dim: int) -> None:
    shape = BatchShape(
        num_layers=1,
        num_slots=1,
        num_kv_heads=HEADS,
        group_size=4,
        head_dim=head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    cases = list(op_checks("trizone", shape))
    assert len(cases) == 2
    for case in cases:
        assert case.problem(case.launch()) is None


def test_a_neighbour_with_nan_changes_no_bit_and_none_that_left_does() -> None:
    sizes = ([150, 150, 20], [3, 3, 3])
    mine, alone = (Sequences(*sizes, group_size=4, head_dim=64) for _ in range(2))
    mine.place()
    alone.place([0, 2])
    mine.rows[1].keys[0, 1, 5] = torch.nan
    step = mine.step()
    step.queries[2] *= 1e4
    output, expected = mine.attend(step), alone.attend(step)
    assert output[1, 0].isnan().all()
    assert output[1, 1].isfinite().all()
    assert torch.equal(output[[0, 2]], expected[[0, 2]])
    assert output[2].isfinite().all()
    mine.batch.remove(1)
    assert not mine.attend(step)[1].any()


@pytest.mark.parametrize("field", ["channels", "tokens", "offset"])
def test_regions_outside_of_the_arena_are_an_error_and_torch_goes_on(field: str) -> None:
    its, plain = (Sequences([40, 40], [2, 2], group_size=2, head_dim=32) for _ in range(2))
    its.place()
    plain.place()
    column, value = {"channels": (1, 33), "tokens": (8, 1 << 40), "offset": (9, -8)}[field]
    its.batch._entries[0, 1, column] = value
    step = its.step()
    try:
        output = its.batch.attend(0, step, errors={}, scratch=its.batch.scratch(2))
        assert "outside of the arena" in quarantined()["trizone"].detail
        assert not its.batch.is_launched
    finally:
        release_all()
    torch.testing.assert_close(output, plain.batch.attend_slots(0, step, errors={}), rtol=0, atol=0)


def test_other_head_dims_are_torch_s() -> None:
    its = Sequences([40], [2], group_size=2, head_dim=48)
    assert not its.batch.is_launched
