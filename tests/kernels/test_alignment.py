"""Rows that a kernel could not load 16 bytes at a time are refused when a sequence is placed: on a GPU such a
load ends the process's device. The interpreter loads any rows, so it would not notice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from kvtest.lanes import some
from torch import Tensor

from kvferry.kernels import cases, decode_cases, dispatch
from kvferry.kernels.decode_batch import BatchShape, CachedRows, NewTokens, SlotBatch, WindowRows
from kvferry.kernels.dense_decode.batch import DenseBatch, WindowBatch
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.hsa.batch import HsaBatch, SparseRows
from kvferry.kernels.kivi.batch import KiviBatch, QuantisedRows
from kvferry.kernels.kivi.rows import kivi_quantise
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch

HEADS, CAPACITY, DIM, PAGE_SIZE, LENGTH = 2, 44, 16, 4, 37
SHAPE = BatchShape(
    num_layers=1, num_slots=1, num_kv_heads=HEADS, group_size=2, head_dim=DIM, dtype=torch.float16,
    device=torch.device("cpu"),
)  # fmt: skip
DECODE_OPS = ("dense_decode", "hsa", "kivi", "trizone")
Batches = tuple[SlotBatch[Any, Any], CachedRows]
pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture(autouse=True)
def guard() -> None:
    """Instead of the folder's: no kernel runs."""


def aligned(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Random rows; torch's own memory starts at a multiple of 64 bytes."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def one_element_on(tensor: Tensor) -> Tensor:
    """The same, one element after a multiple of 16 bytes."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


def in_heads_apart(tensor: Tensor, elements: int) -> Tensor:
    """The same, whose heads are so many elements more apart."""
    size = tensor[0].numel()
    memory = torch.zeros(len(tensor), size + elements, dtype=tensor.dtype)
    return memory[:, :size].view(tensor.shape).copy_(tensor)


def dense() -> Batches:
    keys, values = aligned(2, HEADS, CAPACITY, DIM)
    return DenseBatch(SHAPE, keys.view(-1)), CachedRows(keys=keys, values=values, length=LENGTH)


def windows() -> Batches:
    keys, values = aligned(2, HEADS, CAPACITY, DIM)
    rows = WindowRows(keys=keys, values=values, length=LENGTH, window=7, rows_before=None)
    return WindowBatch(SHAPE, keys.view(-1)), rows


def hsa() -> Batches:
    keys, values = aligned(2, HEADS, CAPACITY, DIM)
    # eleven pages, and room for sixteen, which are 32 bytes
    page_max, page_min = aligned(2, HEADS, DIM, 16)[..., : CAPACITY // PAGE_SIZE].mT
    rows = SparseRows(
        keys=keys, values=values, length=LENGTH, page_max=page_max, page_min=page_min, page_size=PAGE_SIZE,
        num_channels=8, num_tokens=9,
    )  # fmt: skip
    return HsaBatch(SHAPE, keys.view(-1)), rows


def hsa_of_tokens() -> Batches:
    """Pages of one token, which have no extremes of their own."""
    batch, rows = hsa()
    assert isinstance(rows, SparseRows)
    return batch, replace(rows, page_max=rows.keys, page_min=rows.keys, page_size=1)


def kivi(num_rows: int = LENGTH) -> Batches:
    keys, values = aligned(2, HEADS, CAPACITY, DIM)
    quantised = kivi_quantise(*aligned(2, HEADS, num_rows, DIM), 4)
    batch = KiviBatch(SHAPE, keys.view(-1), keys.view(-1).view(torch.uint8))
    return batch, QuantisedRows(keys=keys, values=values, length=0, quantised=quantised)


def trizone() -> Batches:
    keys, values = aligned(2, HEADS, CAPACITY, DIM)
    prompt = aligned(2, HEADS, LENGTH, DIM, dtype=torch.float32)
    bits = [torch.full((HEADS, units), 4, dtype=torch.uint8) for units in (DIM, LENGTH)]
    packed = pack_layer(*prompt, *bits)
    batch = TriZoneBatch(SHAPE, keys.view(-1), keys.view(-1).view(torch.uint8))
    return batch, PackedRows(keys=keys, values=values, length=0, packed=packed)


BATCHES: dict[str, Callable[[], Batches]] = {
    made.__name__: made for made in (dense, windows, hsa, hsa_of_tokens, kivi, trizone)
}


def changed(rows: CachedRows, name: str, change: Callable[[Tensor], Tensor]) -> CachedRows:
    """The rows with one tensor changed, which may be a part's: `quantised.codes`."""
    part, _, of_part = name.rpartition(".")
    if not part:
        return replace(rows, **{name: change(getattr(rows, name))})
    inner = getattr(rows, part)
    inner = replace(inner, **{of_part: change(getattr(inner, of_part))})
    return replace(rows, **cast("dict[str, Any]", {part: inner}))


@pytest.mark.parametrize("kind", BATCHES)
def test_aligned_rows_are_placed(kind: str) -> None:
    batch, rows = BATCHES[kind]()
    batch.place(0, {0: rows})
    assert batch.has_tables


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("kind", BATCHES)
def test_rows_that_do_not_start_aligned_are_refused(kind: str, name: str) -> None:
    batch, rows = BATCHES[kind]()
    with pytest.raises(ValueError, match=rf"{name} does not start at a multiple of 16 bytes"):
        batch.place(0, {0: changed(rows, name, one_element_on)})


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("kind", BATCHES)
def test_heads_that_are_not_aligned_are_refused(kind: str, name: str) -> None:
    batch, rows = BATCHES[kind]()
    with pytest.raises(ValueError, match=rf"{name} has strides .* multiples of 16 bytes"):
        batch.place(0, {0: changed(rows, name, lambda tensor: in_heads_apart(tensor, 4))})
    batch.place(0, {0: changed(rows, name, lambda tensor: in_heads_apart(tensor, 8))})


@pytest.mark.parametrize("name", ["page_max", "page_min"])
def test_page_extremes_are_aligned_along_pages(name: str) -> None:
    """A channel's pages are loaded together, so channels are what must be aligned."""
    batch, rows = hsa()
    pages = CAPACITY // PAGE_SIZE

    def channels_apart(extremes: Tensor, stride: int) -> Tensor:
        return torch.zeros(HEADS, DIM, stride, dtype=torch.float16)[..., :pages].mT.copy_(extremes)

    for stride in (pages, 12):
        with pytest.raises(ValueError, match=rf"{name} has strides"):
            batch.place(
                0, {0: changed(rows, name, lambda tensor, stride=stride: channels_apart(tensor, stride))}
            )
    with pytest.raises(ValueError, match=rf"{name} has strides"):
        batch.place(0, {0: changed(rows, name, Tensor.contiguous)})
    with pytest.raises(ValueError, match=rf"{name} does not start"):
        batch.place(
            0, {0: changed(rows, name, lambda tensor: one_element_on(aligned(HEADS, DIM, 16))[..., :11].mT)}
        )
    batch.place(0, {0: changed(rows, name, lambda tensor: channels_apart(tensor, 24))})


@pytest.mark.parametrize(
    ("name", "shown"),
    [("codes", "codes"), ("scales", "scales"), ("keys", "left_keys"), ("values", "left_values")],
)
def test_parts_of_a_quantised_prompt_are_aligned(name: str, shown: str) -> None:
    batch, rows = kivi()
    with pytest.raises(ValueError, match=rf"{shown} does not start at a multiple of 16 bytes"):
        batch.place(0, {0: changed(rows, f"quantised.{name}", one_element_on)})
    unit = ALIGNMENT_BYTES // getattr(rows.quantised, name).element_size()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=rf"{shown} has strides"):
        batch.place(
            0, {0: changed(rows, f"quantised.{name}", lambda tensor: in_heads_apart(tensor, unit // 2))}
        )
    batch.place(0, {0: changed(rows, f"quantised.{name}", lambda tensor: in_heads_apart(tensor, unit))})


@pytest.mark.parametrize(("num_rows", "empty"), [(5, ("codes", "scales")), (64, ("keys", "values"))])
def test_parts_without_elements_have_no_address_and_pass(num_rows: int, empty: tuple[str, ...]) -> None:
    batch, rows = kivi(num_rows)
    for name in empty:
        assert not getattr(rows.quantised, name).numel()  # type: ignore[attr-defined]
        rows = changed(
            rows,
            f"quantised.{name}",
            lambda tensor: torch.empty(1, dtype=tensor.dtype)[1:].view(tensor.shape),
        )
    batch.place(0, {0: rows})


def test_a_packed_prompt_is_aligned() -> None:
    batch, rows = trizone()
    with pytest.raises(ValueError, match="packed does not start at a multiple of 16 bytes"):
        batch.place(0, {0: changed(rows, "packed.buffer", one_element_on)})


def test_a_refused_sequence_leaves_the_slot_empty() -> None:
    batch, rows = dense()
    with pytest.raises(ValueError, match="keys does not start"):
        batch.place(0, {0: changed(rows, "keys", one_element_on)})
    assert not batch._tables.layer(0, 1).any()
    batch.place(0, {0: rows})
    batch.remove(0)


def test_where_no_kernel_runs_any_rows_are_placed() -> None:
    dispatch.configure("torch", torch.device("cpu"))
    batch, rows = dense()
    assert not batch.has_tables
    batch.place(0, {0: changed(rows, "keys", one_element_on)})


@pytest.mark.parametrize(
    "head_dim_and_dtype",
    some(
        itertools.product((8, 16, 24, 40, 64, 72, 96, 128, 192, 256), dispatch.DTYPES),
        (8, torch.float16), (16, torch.bfloat16), (24, torch.float32), (64, torch.float16),
        (96, torch.bfloat16),
    ),
    ids=str,
)  # fmt: skip
def test_the_self_test_s_sequences_are_placed_at_every_shape(
    head_dim_and_dtype: tuple[int, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At those of the other tests, too, which make them smaller. Nothing is launched."""
    head_dim, dtype = head_dim_and_dtype
    placed: list[str] = []

    def attend(batch: SlotBatch[Any, Any], layer: int, step: NewTokens, scratch: object) -> Tensor:
        placed.append(batch.op)
        return torch.zeros_like(step.queries)

    monkeypatch.setattr(SlotBatch, "attend_launched", attend)
    shape = replace(
        SHAPE, num_kv_heads=3, head_dim=head_dim, dtype=dtype, has_windows=True, has_plain_softmax=False
    )
    for capacity, lengths in ((decode_cases.CAPACITY, decode_cases.LENGTHS), (52, (5, 14, 45))):
        monkeypatch.setattr(decode_cases, "CAPACITY", capacity)
        monkeypatch.setattr(decode_cases, "LENGTHS", lengths)
        for op in DECODE_OPS:
            for case in cases.op_checks(op, shape):
                case.launch()
    assert set(placed) == set(DECODE_OPS)
