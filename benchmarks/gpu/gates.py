"""What each kernel's machine code must keep to, on sm_80 and sm_90, at every shape that is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compiler import Facts

_LOGARITHM = "tl.log2("
_TOKENS_OF_A_PAGE = "count = tl.minimum(length - p * page_size, page_size)"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Beside these: no byte of stack.

    Attributes:
        registers: a thread's, at most.
        streams: the loads of what it streams, by a part of their source line: bits a thread gets, at least.
        conversions: source lines, by a part of them, that may make floats of integers; no other may.
    """

    registers: int
    streams: Mapping[str, int] = field(default_factory=dict)
    conversions: tuple[str, ...] = (_LOGARITHM,)


GATES = {
    "_append_rows_kernel": Gate(registers=64),
    "_dense_decode_kernel": Gate(
        registers=128,
        streams={"tl.load(key_ptr + key_offset + at": 128, "tl.load(value_ptr + value_offset + at": 128},
    ),
    "_score_pages_kernel": Gate(
        registers=224, streams={"arena_ptr + start[:, None]": 128}, conversions=(_TOKENS_OF_A_PAGE,)
    ),
    "_select_tokens_kernel": Gate(registers=128),
    "_gather_attend_kernel": Gate(
        registers=128,
        streams={"tl.load(arena_ptr + key_offset + at": 128, "tl.load(arena_ptr + value_offset + at": 128},
    ),
    "_prologue_kernel": Gate(registers=128),
    "_trizone_kernel": Gate(
        registers=255,
        streams={
            # 64 channels of 16 words by 256 threads
            "tl.load(words_ptr + start[None": 64,
            "tl.load(words_ptr + at": 64,
            # a row of 2-bit codes has 8 words at head_dim 64
            "tl.load(words_ptr + rows + at": 64,
            "tl.load(halves_ptr + rows + at": 128,
            "tl.load(key_ptr + key_offset + at": 128,
            "tl.load(value_ptr + value_offset + at": 128,
        },
    ),
    "_key_ranges_kernel": Gate(registers=128, streams={"x = tl.load(key_ptr + at": 128}),
    "_pack_keys_kernel": Gate(registers=255),
    "_pack_values_kernel": Gate(
        registers=128, streams={"tl.load(values_ptr + position": 128, "tl.load(from_row + p * STRIDE": 128}
    ),
    "_row_lse_kernel": Gate(
        registers=255, streams={"q = tl.load(query_ptr + row": 128, "k = tl.load(key_ptr + at": 128}
    ),
    "_column_sums_kernel": Gate(
        registers=255, streams={"q = tl.load(query_ptr + row": 128, "k = tl.load(key_ptr + at": 128}
    ),
    "_chunk_scores_kernel": Gate(registers=168, streams={"tl.load(ptr + at": 128}),
}


def breaks(facts: Facts) -> list[str]:
    """What a kernel's machine code does not keep to, in words."""
    gate = GATES[facts.kernel]
    found = []
    if facts.registers > gate.registers:
        found.append(f"{facts.registers} registers; at most {gate.registers}")
    if facts.stack_bytes:
        found.append(f"{facts.stack_bytes} bytes of spilled registers; there must be none")
    for fragment, bits in gate.streams.items():
        loads = facts.loads(fragment)
        if min(loads, default=0) < bits:
            found.append(f"loads of {sorted(set(loads))} bits at `{fragment}`; at least {bits}")
    if conversions := facts.conversions(gate.conversions):
        found.append(f"{conversions} conversions of integers to floats outside {gate.conversions}; none")
    return found
