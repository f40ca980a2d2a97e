"""The C code attends to packed rows as torch does, reads nothing beyond them, and keeps sequences apart."""

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
)
from kvtest.packed import GROUP_BOUNDARIES, poison_padding
from kvtest.reference import dense as reference

from kvferry.kernels.native import library as native
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch

pytestmark = pytest.mark.skipif(not native.is_available(), reason="this machine has no C compiler")

CAPACITY = 12


class PackedSequences(Sequences):
    """A batch of packed prompts and new rows in one arena."""

    op = "trizone"

    def __init__(
        self, num_tokens: list[int], num_new: list[int], *, group_size: int, head_dim: int, seed: int = 0
    ) -> None:
        super().__init__(len(num_tokens), group_size=group_size, head_dim=head_dim, seed=seed)
        packed = [poison_padding(self.packed_layer(number)) for number in num_tokens]
        num_rows = 2 * HEADS * CAPACITY * head_dim
        # each slot: new rows, packed bytes, and NaN behind them
        sizes = [num_rows + prompt.layout.size_bytes // 4 + 64 for prompt in packed]
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


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("group_size", [1, 3, 4, 6])
def test_steps_are_torch_s_and_write_its_rows(head_dim: int, group_size: int) -> None:
    sizes = ([0, 1, 7, 64, 65, 128, 129, 300], [0, 1, 2, 0, 5, 0, 9, 3])
    mine, plain = (PackedSequences(*sizes, group_size=group_size, head_dim=head_dim) for _ in range(2))
    active = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1])
    assert_steps_are_torch_s(mine, plain, active, num_steps=3, rtol=2e-5, atol=3e-6)
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
    sequences = PackedSequences(num_tokens, num_new, group_size=group_size, head_dim=32, seed=seed)
    sequences.place()
    step = sequences.step()
    output, expected = sequences.attend(step), sequences.batch.attend_slots(0, step, errors={})
    torch.testing.assert_close(output, expected, rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("num_tokens", GROUP_BOUNDARIES)
def test_each_group_has_scales_of_its_own(num_tokens: int) -> None:
    sequences = PackedSequences([num_tokens], [1], group_size=3, head_dim=32)
    packed = sequences.rows[0].packed
    for head in packed.heads:
        sizes = 4.0 ** -torch.arange(len(head.key_scales))
        head.key_scales.mul_(sizes[:, None])
        head.key_minima.mul_(sizes[:, None])
    sequences.place()
    step = sequences.step()
    output, expected = sequences.attend(step), sequences.batch.attend_slots(0, step, errors={})
    torch.testing.assert_close(output, expected, rtol=2e-5, atol=3e-6)
    rows = sequences.rows[0]
    keys, values = rows.keys[:, :2], rows.values[:, :2]
    whole = reference.trizone_decode(step.queries[0], packed, keys, values, scaling=32**-0.5)
    torch.testing.assert_close(output[0], whole, rtol=1e-4, atol=1e-5)


def test_a_neighbour_with_nan_changes_no_bit_and_none_that_left_does() -> None:
    sizes = ([150, 150, 20], [3, 3, 3])
    mine, alone = (PackedSequences(*sizes, group_size=4, head_dim=64) for _ in range(2))
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


@pytest.mark.parametrize("field", ["channels", "tokens", "offset", "key scales"])
def test_regions_outside_of_the_arena_are_an_error_and_torch_goes_on(field: str) -> None:
    mine, plain = (PackedSequences([200, 40], [2, 2], group_size=2, head_dim=32) for _ in range(2))
    mine.place()
    groups, coded = mine.rows[0].packed.heads[1].key_scales.shape
    assert groups > 1
    # the arena ends before the last group's
    scales = mine.arena.nbytes // 2 - (groups - 1) * coded
    columns = {"channels": (1, 33), "tokens": (8, 1 << 40), "offset": (9, -8), "key scales": (11, scales)}
    column, value = columns[field]
    mine.batch._entries[0, 1, column] = value
    assert_refused_and_torch_goes_on(mine, plain)


def test_other_head_dims_are_torch_s() -> None:
    sequences = PackedSequences([40], [2], group_size=2, head_dim=48)
    assert not sequences.batch.is_launched
