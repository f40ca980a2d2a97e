"""Descriptors of a batch: where heads lie, and lengths that grow for the slots that go on."""

from __future__ import annotations

import torch

from kvferry.kernels.decode_batch import BatchShape, CachedRows, HeadTables, in_buckets, row_fields

SHAPE = BatchShape(
    num_layers=2,
    num_slots=3,
    num_kv_heads=2,
    group_size=1,
    head_dim=8,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def test_tables_place_every_head_and_lengths_grow_where_active() -> None:
    arena = torch.zeros(400)
    keys, values = arena[16:112].view(2, 6, 8), arena[128:224].view(2, 6, 8)
    fields = row_fields(arena, CachedRows(keys=keys, values=values, length=4))
    tables = HeadTables(SHAPE, [0, 0, 0])
    tables.place(0, {0: fields})
    tables.place(2, {0: fields, 1: fields})
    here, nothing = [[16, 128, 5], [64, 176, 5]], [[0, 0, 0]] * 2
    assert tables.layer(0, 3).tolist() == [*here, *nothing, *here]
    assert tables.layer(1, 3).tolist() == [*nothing, *nothing, *here]
    tables.advance(torch.tensor([1, 1, 0]))
    assert tables.layer(0, 3)[:, 2].tolist() == [6, 6, 0, 0, 0, 0]
    assert not tables.layer(1, 3)[:, 2].any()
    tables.advance(torch.tensor([1, 1, 0]))
    assert tables.layer(0, 3)[:, 2].tolist() == [7, 7, 0, 0, 0, 0]
    tables.place(0, {})
    tables.place(1, {0: fields})
    assert tables.layer(0, 2).tolist() == [*nothing, *here]
    tables.show(torch.tensor([0, 1, 1]))
    assert tables.layer(0, 3)[:, 2].tolist() == [0, 0, 5, 5, 5, 5]


def test_heads_without_rows_have_the_fields_they_are_given() -> None:
    tables = HeadTables(SHAPE, [0, 0, 0, 1])
    tables.place(0, {0: ([8, 16, 2, 5], [24, 24, 0, 0])})
    assert tables.layer(0, 3).tolist() == [[8, 16, 2, 5], [32, 40, 2, 5], *[[0, 0, 0, 1]] * 4]


def test_buckets_are_the_next_power_of_two() -> None:
    assert [in_buckets(n) for n in (0, 1, 2, 3, 5, 8, 9)] == [1, 1, 2, 4, 8, 8, 16]
    assert in_buckets(3, least=16) == 16
