"""Programs divide a batch's tiles by the heads' lengths, which are on the device."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kvferry.kernels.descriptors import MAX_SPLITS
from kvferry.kernels.split_attention import place_of, row_tiles


@triton.jit
def _places_kernel(heads_ptr, out_ptr, num_heads, MIN_TILES: tl.constexpr):
    program = tl.program_id(0)
    head, begin, end, first, splits = place_of(
        heads_ptr, num_heads, program, tl.num_programs(0), row_tiles, MIN_TILES, 16, 3, False
    )
    tl.store(out_ptr + program * 5, head)
    tl.store(out_ptr + program * 5 + 1, begin)
    tl.store(out_ptr + program * 5 + 2, end)
    tl.store(out_ptr + program * 5 + 3, first)
    tl.store(out_ptr + program * 5 + 4, splits)


def places(lengths: list[int], more: int, min_tiles: int = 1) -> list[list[int]]:
    """Head, begin, end, first program and splits of each program that has a head."""
    heads = torch.tensor([(0, 0, length) for length in lengths])
    out = torch.full((len(lengths) + more, 5), -1, dtype=torch.int32)
    _places_kernel[(len(out),)](heads, out, len(lengths), MIN_TILES=min_tiles)
    rows: list[list[int]] = out.tolist()
    return [row for row in rows if row[0] < len(lengths)]


@pytest.mark.parametrize(
    ("lengths", "more", "min_tiles"),
    [
        ([0], 1, 1),
        ([1, 0, 0, 5], 3, 1),
        ([40000] + [100] * 7, 20, 2),
        ([0, 17, 16, 15, 0, 70000], 100, 1),
        # more heads than are read at once, the long one among the last
        ([33] * 140 + [9000] + [0] * 3, 30, 1),
    ],
)
def test_every_tile_of_every_head_is_one_programs(lengths: list[int], more: int, min_tiles: int) -> None:
    rows = places(lengths, more, min_tiles)
    for head, length in enumerate(lengths):
        ours = [(program, row) for program, row in enumerate(rows) if row[0] == head]
        assert 1 <= len(ours) <= MAX_SPLITS
        assert all(row[3:] == [ours[0][0], len(ours)] for _, row in ours)
        bounds = [ours[0][1][1], *(row[2] for _, row in ours)]
        assert (bounds[0], bounds[-1]) == (0, -(-length // 16))
        assert [row[1] for _, row in ours] == bounds[:-1]
        assert len(ours) == 1 or all(a < b for a, b in pairwise(bounds))


def test_a_long_sequence_among_short_ones_has_most_of_the_programs() -> None:
    rows = places([16 * 640] + [16] * 7, 40)
    assert max(end - begin for _, begin, end, *_ in rows) <= 17
    assert sum(head == 0 for head, *_ in rows) >= 38


def test_the_roofline_divides_programs_as_the_kernel_does() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu" / "mixed_batch.py"
    spec = importlib.util.spec_from_file_location("mixed_batch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lengths = [16 * 900, 0, 170, 33]
    divided = module.by_length([-(-length // 16) for length in lengths], 30, 2)
    assert divided == [end - begin for _, begin, end, *_ in places(lengths, 26, 2)]
