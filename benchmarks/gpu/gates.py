"""What each kernel's machine code must keep to at every shape that is served.

Registers, spills, loads and conversions on sm_80 and sm_90; shared memory on every architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compiler import Facts

SHARED_BYTES = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}  # fmt: skip
"""Shared memory that one program may have (CUDA C++ programming guide, technical specifications)."""
TUNED = ("sm_80", "sm_90")
"""The architectures whose registers, spills and loads are held; the others run the same tiles or smaller."""
_LOGARITHM = "tl.log2("


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What one kernel must keep to.

    Attributes:
        registers: a thread's, at most.
        stack_bytes: that registers are spilled to, at most: none, but where more warps were measured to be
            slower.
        streams: the loads of what it streams, by a part of their source line. A thread gets 128 bits at
            least, or what is said here by head_dim.
        conversions: source lines, by a part of them, that may make floats of integers; no other may.
    """

    registers: int
    stack_bytes: int = 0
    streams: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    conversions: tuple[str, ...] = (_LOGARITHM,)


_WIDE: Mapping[int, int] = {}
_SHORT_ROWS = {96: 64}
"""A row of V at 2 bits has 24 bytes, so every other one begins between two pieces of 16."""
_EIGHT_WARPS = {256: 64}
"""A tile of 64 channels has 1024 words of 16 bits for 256 threads; with 128 channels more is spilled."""
_NARROW_TILES = {64: 64, 96: 64}
"""And of 64 channels, a tile of 64 rows has 1024 bytes, 64 bits for each thread."""
_TWO_GROUPS = {64: 64}
"""Two groups of K, or of V, at 2 bits are 1024 bytes; four of them spill."""
_FOUR_PROGRAMS_SPILL = 152
"""Bytes, of 16 query heads a KV head. With more registers an SM has three programs, and a batch of eight
takes 1.15 times as long on an H200 (benchmarks/results/gpu/2026-11-29/call-2)."""
_WIDE_HEADS_SPILL = 8
"""Bytes, on sm_80 at 256 channels; with more registers than 128 an SM has one program of eight warps, not
two."""
_ONE_QUERY_SPILL = 16
"""The same, of one query head a KV head."""

GATES = {
    "_append_rows_kernel": Gate(registers=64),
    "_add_norm_kernel": Gate(registers=128, conversions=("tl.sum(x * x, 0) / n",)),
    "_rotate_kernel": Gate(registers=128),
    "_silu_product_kernel": Gate(registers=64),
    "_nucleus_kernel": Gate(registers=128),
    "_dense_decode_kernel": Gate(
        registers=192,
        streams={"tl.load(key_ptr + key_offset + at": _WIDE, "tl.load(value_ptr + value_offset + at": _WIDE},
    ),
    "_score_pages_kernel": Gate(
        registers=255,
        streams={"start[:, None] + p[None, :]": _WIDE},
    ),
    "_score_rows_kernel": Gate(registers=232, streams={"arena_ptr + start + p[:, None]": _WIDE}),
    "_select_tokens_kernel": Gate(registers=128),
    "_gather_attend_kernel": Gate(
        registers=168,
        streams={
            "tl.load(arena_ptr + key_offset + at": _WIDE,
            "tl.load(arena_ptr + value_offset + at": _WIDE,
        },
    ),
    "_kivi_decode_kernel": Gate(
        registers=168,
        stack_bytes=_WIDE_HEADS_SPILL,
        streams={
            "words = tl.load(word_ptr + at, ": _TWO_GROUPS,
            "words = tl.load(word_ptr + at[:, None]": {**_TWO_GROUPS, **_SHORT_ROWS},
            "k = tl.load(key_ptr + at": _WIDE,
            "v = tl.load(value_ptr + at": _WIDE,
        },
    ),
    "_prologue_kernel": Gate(registers=128),
    "_trizone_kernel": Gate(
        registers=128,
        stack_bytes=_FOUR_PROGRAMS_SPILL,
        streams={
            "tl.load(words_ptr + word * 16 + lane": _EIGHT_WARPS,
            "tl.load(words_ptr + row, ": _NARROW_TILES,
            "tl.load(key_ptr + key_offset + at": _WIDE,
            "tl.load(value_ptr + value_offset + at": _WIDE,
        },
    ),
    "_count_widths_kernel": Gate(registers=128),
    "_place_kernel": Gate(registers=128),
    "_index_kernel": Gate(registers=64),
    "_refuse_kernel": Gate(registers=64),
    "_check_kernel": Gate(registers=128),
    "_take_increments_kernel": Gate(registers=168),
    "_pack_keys_kernel": Gate(registers=255),
    "_pack_values_kernel": Gate(
        registers=128,
        streams={"tl.load(values_ptr + position": _WIDE, "tl.load(from_row + p * STRIDE": _WIDE},
    ),
    "_row_lse_kernel": Gate(
        registers=255, streams={"q = tl.load(query_ptr + row": _WIDE, "k = tl.load(key_ptr + at": _WIDE}
    ),
    "_column_sums_kernel": Gate(
        registers=255, streams={"q = tl.load(query_ptr + row": _WIDE, "k = tl.load(key_ptr + at": _WIDE}
    ),
    "_chunk_scores_kernel": Gate(
        registers=192, stack_bytes=_ONE_QUERY_SPILL, streams={"tl.load(ptr + at": _WIDE}
    ),
}


def breaks(facts: Facts, head_dim: int) -> list[str]:
    """What a kernel's machine code does not keep to, in words."""
    gate, limit = GATES[facts.kernel], SHARED_BYTES[facts.arch]
    found = []
    if facts.shared_bytes > limit:
        found.append(f"{facts.shared_bytes} bytes of shared memory; at most {limit}")
    if facts.arch not in TUNED:
        return found
    if facts.registers > gate.registers:
        found.append(f"{facts.registers} registers; at most {gate.registers}")
    if facts.stack_bytes > gate.stack_bytes:
        found.append(f"{facts.stack_bytes} bytes of spilled registers; at most {gate.stack_bytes}")
    for fragment, narrower in gate.streams.items():
        loads, least = facts.loads(fragment), narrower.get(head_dim, 128)
        if min(loads, default=0) < least:
            found.append(f"loads of {sorted(set(loads))} bits at `{fragment}`; at least {least}")
    if conversions := facts.conversions(gate.conversions):
        found.append(f"{conversions} conversions of integers to floats outside {gate.conversions}; none")
    return found
