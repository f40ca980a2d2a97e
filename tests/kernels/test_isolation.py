"""A value that is not finite in one sequence stays there: it is no address and changes no neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvtest.lanes import some
from kvtest.triton_guard import guarded
from torch import Tensor

from kvferry.kernels import dispatch, hsa
from kvferry.kernels.decode_batch import BatchShape, CachedRows, NewTokens, WindowRows
from kvferry.kernels.dense_decode.batch import DenseBatch, WindowBatch
from kvferry.kernels.hsa.batch import HsaBatch, SparseRows
from kvferry.kernels.kivi.batch import KiviBatch, QuantisedRows
from kvferry.kernels.kivi.rows import KiviRows, kivi_quantise
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch

SPOILT = 1
"""The slot that is spoilt, of three."""
LENGTH, CAPACITY = 140, 144
SHAPE = BatchShape(
    num_layers=1,
    num_slots=3,
    num_kv_heads=1,
    group_size=4,
    head_dim=64,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
NAN, INF = float("nan"), float("inf")
FAULTS = ("one NaN in q", "one infinity in q", "all NaN", "a NaN in K", "an infinity in K", "a NaN in V")


@pytest.fixture(autouse=True, params=some([1, 2], 1))
def guard(request: pytest.FixtureRequest) -> Iterator[int]:
    """Instead of the folder's: several orders of programs. Returns the seed."""
    with guarded(seed=request.param):
        yield request.param


@pytest.fixture(params=["torch", "triton"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    dispatch.configure(request.param, torch.device("cpu"))
    yield request.param
    dispatch.configure("auto", torch.device("cpu"))


def slot_rows(arena: Tensor, slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """A slot's K and V `[H_kv, cap, D]`, and the rest of its part of the arena."""
    part = arena.view(SHAPE.num_slots, -1)[slot]
    size = SHAPE.num_kv_heads * CAPACITY * SHAPE.head_dim
    keys, values = part[: 2 * size].view(2, SHAPE.num_kv_heads, CAPACITY, SHAPE.head_dim)
    return keys, values, part[2 * size :]


def spoil_rows(fault: str, slot: int, keys: Tensor, values: Tensor) -> None:
    if slot == SPOILT and fault.endswith(" in K"):
        keys[0, 37, 5] = NAN if "NaN" in fault else INF
    if slot == SPOILT and fault.endswith(" in V"):
        values[0, 37, 5] = NAN


def placed(batch: Any, rows: dict[int, Any]) -> Any:
    for slot, of_slot in rows.items():
        batch.place(slot, {0: of_slot})
    return batch


def sparse_batch(arena: Tensor, fault: str, page_size: int) -> Any:
    rows = {}
    num_pages = -(-CAPACITY // page_size)
    for slot in range(SHAPE.num_slots):
        keys, values, rest = slot_rows(arena, slot)
        spoil_rows(fault, slot, keys, values)
        page_max, page_min = keys, keys
        if page_size > 1:
            size = SHAPE.num_kv_heads * SHAPE.head_dim * num_pages
            page_max, page_min = rest[: 2 * size].view(2, SHAPE.num_kv_heads, SHAPE.head_dim, num_pages).mT
            hsa.page_extremes(keys, page_max, page_min, length=LENGTH, page_size=page_size)
        rows[slot] = SparseRows(
            keys=keys,
            values=values,
            length=LENGTH,
            page_max=page_max,
            page_min=page_min,
            page_size=page_size,
            num_channels=32,
            num_tokens=24,
        )
    return placed(HsaBatch(SHAPE, arena), rows)


def pages_of_four(arena: Tensor, fault: str) -> Any:
    return sparse_batch(arena, fault, page_size=4)


def pages_of_one(arena: Tensor, fault: str) -> Any:
    return sparse_batch(arena, fault, page_size=1)


def dense_batch(arena: Tensor, fault: str) -> Any:
    rows = {}
    for slot in range(SHAPE.num_slots):
        keys, values, _ = slot_rows(arena, slot)
        spoil_rows(fault, slot, keys, values)
        rows[slot] = CachedRows(keys=keys, values=values, length=LENGTH)
    return placed(DenseBatch(SHAPE, arena), rows)


def window_batch(arena: Tensor, fault: str) -> Any:
    """Chunks in the last slot; the faulty row is in the spoilt slot's window."""
    rows = {}
    for slot, (window, before) in enumerate(((30, None), (120, None), (50, 11))):
        keys, values, _ = slot_rows(arena, slot)
        spoil_rows(fault, slot, keys, values)
        rows[slot] = WindowRows(keys=keys, values=values, length=LENGTH, window=window, rows_before=before)
    return placed(WindowBatch(SHAPE, arena), rows)


def packed_batch(arena: Tensor, fault: str) -> Any:
    """The packed prompt is checked when it is received; the rows of new tokens are not."""
    rows = {}
    for slot in range(SHAPE.num_slots):
        keys, values, rest = slot_rows(arena, slot)
        bits = [
            torch.full((SHAPE.num_kv_heads, units), 4, dtype=torch.uint8)
            for units in (SHAPE.head_dim, LENGTH)
        ]
        piece = pack_layer(keys[:, :LENGTH], values[:, :LENGTH], *bits)
        buffer = rest.view(torch.uint8)[: piece.layout.size_bytes]
        buffer.copy_(piece.buffer)
        spoil_rows(fault, slot, keys, values)
        packed = view_packed_layer(piece.layout, buffer)
        rows[slot] = PackedRows(keys=keys, values=values, length=50, packed=packed)
    return placed(TriZoneBatch(SHAPE, arena, arena.view(torch.uint8)), rows)


def quantised_batch(arena: Tensor, fault: str) -> Any:
    """The quantised groups are checked when they are received; their other rows and new ones are not."""
    rows = {}
    for slot, bits in enumerate((4, 4, 2)):
        keys, values, rest = slot_rows(arena, slot)
        made, start = kivi_quantise(keys[:, :LENGTH], values[:, :LENGTH], bits), 0
        parts = []
        for part in (made.codes, made.scales, made.keys, made.values):
            place = rest.view(torch.uint8)[start : start + part.nbytes].view(part.dtype).view(part.shape)
            place.copy_(part)
            parts.append(place)
            start += -(-part.nbytes // 64) * 64
        codes, scales, left_keys, left_values = parts
        spoil_rows(fault, slot, keys, values)
        if slot == SPOILT and fault == "an infinity in K":
            left_keys[0, 3, 5] = INF
        quantised = KiviRows(bits=bits, codes=codes, scales=scales, keys=left_keys, values=left_values)
        rows[slot] = QuantisedRows(keys=keys, values=values, length=50, quantised=quantised)
    return placed(KiviBatch(SHAPE, arena, arena.view(torch.uint8)), rows)


def outputs(make_batch: Callable[[Tensor, str], Any], num_steps: int, fault: str, seed: int) -> Tensor:
    """`[num_steps, S, H_kv, G, D]`."""
    generator = torch.Generator().manual_seed(seed)
    per_slot = 6 * SHAPE.num_kv_heads * CAPACITY * SHAPE.head_dim
    batch = make_batch(torch.randn(SHAPE.num_slots * per_slot, generator=generator), fault)
    scratch = batch.scratch(SHAPE.num_slots) if batch.is_launched else None
    attended = []
    scaling: Scaling = SHAPE.head_dim**-0.5
    if make_batch in (pages_of_four, window_batch):
        sinks = torch.linspace(-2, 2, SHAPE.group_size)[None]
        scaling = Softmax(scaling=scaling, softcap=4.0, sinks=sinks)
    for _ in range(num_steps):
        heads = (SHAPE.num_slots, SHAPE.num_kv_heads)
        queries = torch.randn(*heads, SHAPE.group_size, SHAPE.head_dim, generator=generator)
        keys, values = torch.randn(2, *heads, SHAPE.head_dim, generator=generator)
        if fault.endswith(" in q"):
            queries[SPOILT, 0, 0, 3] = NAN if "NaN" in fault else INF
        if fault == "all NaN":
            queries[SPOILT], keys[SPOILT], values[SPOILT] = NAN, NAN, NAN
        errors: dict[int, Exception] = {}
        step = NewTokens(queries, keys, values, scaling)
        output = batch.attend(0, step, errors=errors, scratch=scratch)
        assert not errors
        attended.append(output.clone())
        batch.advance(torch.ones(SHAPE.num_slots, dtype=torch.int64))
    return torch.stack(attended)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(
    ("make_batch", "num_steps"),
    # TriZone's launches are the slowest to interpret
    [
        (pages_of_four, 2),
        (pages_of_one, 2),
        (dense_batch, 2),
        (window_batch, 1),
        (packed_batch, 1),
        (quantised_batch, 2),
    ],
)
def test_a_spoilt_sequence_leaves_its_neighbours_bit_by_bit_as_they_are(
    make_batch: Callable[[Tensor, str], Any], num_steps: int, path: str, guard: int
) -> None:
    clean = outputs(make_batch, num_steps, "none", guard)
    assert clean.isfinite().all()
    for fault in FAULTS:
        spoilt = outputs(make_batch, num_steps, fault, guard)
        assert torch.equal(spoilt[:, 0], clean[:, 0]), fault
        assert torch.equal(spoilt[:, 2], clean[:, 2]), fault
        if fault == "all NaN":
            assert spoilt[:, SPOILT].isnan().all()
