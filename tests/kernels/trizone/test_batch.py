"""A batch's two divisions of packed prompts: both cover every sequence, and neither outgrows the device."""

from __future__ import annotations

import pytest
import torch
from kvtest.lanes import some
from torch import Tensor

from kvferry.kernels.decode_batch import BatchShape, NewTokens
from kvferry.kernels.packed.layer import PackedLayer, view_packed_layer
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.trizone import batch as trizone_batch
from kvferry.kernels.trizone import torch_path
from kvferry.kernels.trizone.batch import FEW_SLOTS, MANY_SLOTS, PackedRows, TriZoneBatch
from kvferry.kernels.trizone.work_list import KIND_IDLE

pytestmark = pytest.mark.usefixtures("interpreter")
LAYERS, HEADS, GROUP, DIM, ROOM = 2, 2, 3, 32, 4
SLOTS = MANY_SLOTS
SHAPE = BatchShape(
    num_layers=LAYERS, num_slots=SLOTS, num_kv_heads=HEADS, group_size=GROUP, head_dim=DIM,
    dtype=torch.float32, device=torch.device("cpu"),
)  # fmt: skip


class Sequences:
    """Packed prompts of several lengths in one arena."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.arena = torch.zeros(8 << 20, dtype=torch.uint8)
        self.batch = TriZoneBatch(SHAPE, self.arena.view(torch.float32), self.arena)
        self._start = 0

    def take(self, tensor: Tensor) -> Tensor:
        part = self.arena[self._start : self._start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._start += -(-tensor.nbytes // 64) * 64
        return part.copy_(tensor)

    def place(self, slot: int, num_tokens: int) -> dict[int, PackedRows]:
        layers = {}
        for layer in range(LAYERS):
            keys, values = torch.randn(2, HEADS, num_tokens, DIM, generator=self.generator)
            bits = [
                torch.tensor([0, 2, 2, 4, 8, 16], dtype=torch.uint8)[
                    torch.randint(6, (HEADS, count), generator=self.generator)
                ]
                for count in (DIM, num_tokens)
            ]
            packed: PackedLayer = pack_layer(keys, values, *bits)
            packed = view_packed_layer(packed.layout, self.take(packed.buffer))
            new = self.take(torch.zeros(2, HEADS, ROOM, DIM))
            layers[layer] = PackedRows(keys=new[0], values=new[1], length=0, packed=packed)
        self.batch.place(slot, layers)
        return layers


def items_of(batch: TriZoneBatch, num_slots: int) -> list[int]:
    """The items of each slot that are not idle, in the first layer."""
    work = batch.scratch(num_slots).works[0]
    return [int((part[:, 0] != KIND_IDLE).sum()) for part in work.items.chunk(num_slots)]


@pytest.mark.parametrize("num_slots", some([1, FEW_SLOTS, FEW_SLOTS + 1, SLOTS], 1, FEW_SLOTS + 1))
def test_both_divisions_attend_as_torch_does(monkeypatch: pytest.MonkeyPatch, num_slots: int) -> None:
    monkeypatch.setattr(trizone_batch, "programs_at_once", lambda device: 96)
    sequences = Sequences()
    placed = {slot: sequences.place(slot, 30 + 20 * slot) for slot in range(num_slots)}
    # a slot is emptied and taken again, by a longer sequence than any before
    sequences.batch.remove(0)
    placed[0] = sequences.place(0, 200)
    queries = torch.randn(num_slots, HEADS, GROUP, DIM, generator=sequences.generator)
    keys, values = torch.randn(2, num_slots, HEADS, DIM, generator=sequences.generator)
    scratch = sequences.batch.scratch(num_slots)
    for layer in range(LAYERS):
        step = NewTokens(queries, keys, values, DIM**-0.5)
        attended = sequences.batch.attend_launched(layer, step, scratch)
        for slot, layers in placed.items():
            rows = layers[layer]
            assert torch.equal(rows.keys[:, 0], keys[slot])
            assert torch.equal(rows.values[:, 0], values[slot])
            expected = torch_path.trizone_decode_segments(
                queries[slot], (rows.packed,), rows.keys[:, :1], rows.values[:, :1], scaling=DIM**-0.5
            )
            error = (attended[slot] - expected).norm() / expected.norm()
            assert error < 3e-3, (slot, layer, float(error))


def test_a_large_batch_has_fewer_items_a_sequence_and_all_of_them_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = 256
    monkeypatch.setattr(trizone_batch, "programs_at_once", lambda device: at_once)
    sequences = Sequences()
    layers = sequences.place(0, 2000)
    for slot in range(1, SLOTS):
        sequences.batch.place(slot, layers)
    few, many = (items_of(sequences.batch, slots) for slots in (FEW_SLOTS, SLOTS))
    assert max(many) < min(few)
    assert sum(few) <= at_once
    assert sum(many) <= at_once


def test_batches_of_both_kinds_keep_their_lists_apart() -> None:
    sequences = Sequences()
    sequences.place(0, 700)
    before = sequences.batch.size()
    small = sequences.batch.scratch(1).works[0].items.clone()
    for slot in range(1, SLOTS):
        sequences.place(slot, 90)
    assert sequences.batch.size() == before
    assert torch.equal(sequences.batch.scratch(1).works[0].items, small)
