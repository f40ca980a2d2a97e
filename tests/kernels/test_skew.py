"""One long sequence among short ones: what the program with most to read reads is bounded, by kernel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from kvtest.triton_guard import guarded
from torch import Tensor

from kvferry.kernels import hsa
from kvferry.kernels.decode_batch import BatchShape, NewTokens
from kvferry.kernels.hsa.batch import BLOCK_PAGES, BLOCKS_A_PROGRAM, HsaBatch, SparseRows
from kvferry.kernels.kivi import batch as kivi_batch
from kvferry.kernels.kivi.batch import KiviBatch, QuantisedRows
from kvferry.kernels.kivi.rows import GROUP_TOKENS, KiviRows, kivi_quantise
from kvferry.kernels.packed.key_words import BLOCK_TOKENS
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.trizone import batch as trizone_batch
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch
from kvferry.kernels.trizone.work_list import KIND_IDLE, KIND_ROWS, MAX_ITEM_BYTES

pytestmark = pytest.mark.usefixtures("interpreter")
DIM, SHORT, NUM_SHORT, NUM_NEW = 64, 40, 3, 8
TILE_TOKENS = 4 * GROUP_TOKENS
"""Of a tile of codes in the interpreter."""


def shape_of(num_slots: int) -> BatchShape:
    return BatchShape(
        num_layers=1, num_slots=num_slots, num_kv_heads=1, group_size=2, head_dim=DIM, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip


class Arena:
    """Memory of all sequences of a batch."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        self.floats = self.bytes.view(torch.float32)
        self._start = 0

    def take(self, tensor: Tensor) -> Tensor:
        part = self.bytes[self._start : self._start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._start += -(-tensor.nbytes // 64) * 64
        return part.copy_(tensor)


def loaded(batch: Any, arena: Arena) -> Counter[tuple[str, tuple[int, int, int]]]:
    """Bytes of the arena that each program loads in one step."""
    generator = torch.Generator().manual_seed(1)
    num_slots = NUM_SHORT + 1
    queries = torch.randn(num_slots, 1, 2, DIM, generator=generator)
    keys, values = torch.randn(2, num_slots, 1, DIM, generator=generator)
    scratch = batch.scratch(num_slots)
    with guarded(seed=3) as guard:
        guard.watch(arena.bytes)
        batch.attend_launched(0, NewTokens(queries, keys, values, DIM**-0.5), scratch)
    return guard.loaded


def most(counts: Counter[tuple[str, tuple[int, int, int]]], kernel: str) -> int:
    return max(size for (name, _), size in counts.items() if name == kernel)


def test_kivi_divides_programs_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile beside an equal share of all tiles; with as many splits for each head it was half of the long
    one."""
    spare, bits, num_tiles = 8, 4, 40
    monkeypatch.setattr(kivi_batch, "choose_num_programs", lambda heads, device: heads + spare)
    arena = Arena(4 << 20)
    batch = KiviBatch(shape_of(NUM_SHORT + 1), arena.floats, arena.bytes)
    for slot in range(NUM_SHORT + 1):
        rows = torch.randn(2, 1, num_tiles * TILE_TOKENS if slot == 2 else SHORT, DIM)
        made = kivi_quantise(*rows, bits)
        parts = [arena.take(tensor) for tensor in (made.codes, made.scales, made.keys, made.values)]
        quantised = KiviRows(bits=bits, codes=parts[0], scales=parts[1], keys=parts[2], values=parts[3])
        new = arena.take(torch.zeros(2, 1, NUM_NEW, DIM))
        batch.place(slot, {0: QuantisedRows(keys=new[0], values=new[1], length=0, quantised=quantised)})
    counts = loaded(batch, arena)
    # codes, and scales and minima of K's channels and V's tokens
    group_bytes = GROUP_TOKENS * DIM * bits // 4 + 2 * 2 * (DIM + GROUP_TOKENS)
    tile_bytes = TILE_TOKENS // GROUP_TOKENS * group_bytes
    # every slot's new row and the short ones' prompts are a few tiles more
    share = -(-(num_tiles + 3 * NUM_SHORT + 1) // spare)
    assert most(counts, "_kivi_decode_kernel") <= (share + 1) * tile_bytes
    assert counts.total() >= num_tiles * tile_bytes


@pytest.mark.parametrize("page_size", [1, 4])
def test_hsa_reads_as_much_a_program_however_long_one_sequence_is(page_size: int) -> None:
    """Attention reads k2 rows of K and V at most, and a program scores a limited number of pages."""
    num_channels, num_tokens = 16, 24
    for long in (700, 2100):
        arena = Arena(8 << 20)
        batch = HsaBatch(shape_of(NUM_SHORT + 1), arena.floats)
        for slot in range(NUM_SHORT + 1):
            length = long if slot == 2 else SHORT
            rows = arena.take(torch.randn(2, 1, length + NUM_NEW, DIM))
            page_max = page_min = rows[0]
            if page_size > 1:
                num_pages = -(-(length + NUM_NEW) // page_size)
                page_max, page_min = arena.take(torch.zeros(2, 1, DIM, -(-num_pages // 16) * 16)).mT[
                    :, :, :num_pages
                ]
                hsa.page_extremes(rows[0], page_max, page_min, length=length, page_size=page_size)
            sparse = SparseRows(
                keys=rows[0], values=rows[1], length=length, page_max=page_max, page_min=page_min,
                page_size=page_size, num_channels=num_channels, num_tokens=num_tokens,
            )  # fmt: skip
            batch.place(slot, {0: sparse})
        counts = loaded(batch, arena)
        assert most(counts, "_gather_attend_kernel") <= 2 * num_tokens * DIM * 4
        largest = most(counts, "_score_rows_kernel" if page_size == 1 else "_score_pages_kernel")
        # its pages' channels, and those of the page that the new row changes
        block = BLOCK_PAGES * (DIM if page_size == 1 else num_channels) + 4 * DIM
        assert largest <= 4 * BLOCKS_A_PROGRAM * block


def test_trizone_gives_a_long_sequence_more_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the work list: K of 8-bit channels and V of 8-bit tokens. As many programs for each head
    would be two, of 400 KB."""
    monkeypatch.setattr(trizone_batch, "programs_at_once", lambda device: 16)
    arena = Arena(4 << 20)
    batch = TriZoneBatch(shape_of(NUM_SHORT + 1), arena.floats, arena.bytes)
    num_tokens = {slot: 6000 if slot == 2 else SHORT for slot in range(NUM_SHORT + 1)}
    for slot, count in num_tokens.items():
        bits = [torch.full((1, units), 8, dtype=torch.uint8) for units in (DIM, count)]
        piece = pack_layer(*torch.randn(2, 1, count, DIM), *bits)
        packed = view_packed_layer(piece.layout, arena.take(piece.buffer))
        new = arena.take(torch.zeros(2, 1, NUM_NEW, DIM))
        batch.place(slot, {0: PackedRows(keys=new[0], values=new[1], length=0, packed=packed)})
    scratch = batch.scratch(NUM_SHORT + 1)
    found = Counter[int]()
    largest = 0
    for kind, _, begin, end, head, *_ in scratch.works[0].items.tolist():
        if kind in (KIND_IDLE, KIND_ROWS):
            continue
        tiles = end - begin
        found[head] += tiles
        # K and V of half a block's tokens at 8 bits
        largest = max(largest, tiles * BLOCK_TOKENS * DIM)
    # two halves of each block, the last one shorter
    assert found[2] == 2 * -(-num_tokens[2] // BLOCK_TOKENS)
    assert largest < MAX_ITEM_BYTES + BLOCK_TOKENS * DIM
