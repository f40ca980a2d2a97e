"""Every kernel compiled for sm_80 and sm_90 without a GPU, and what its machine code must keep to.

Needs no GPU and takes no times: registers, spills, shared memory, load widths, conversions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from case import MODELS, Case, Model
from compiler import Facts, Launch, caught, compile_launch
from dense_cases import append_case, dense_case
from hsa_cases import HsaSize, hsa_cases
from packed_cases import pack_case, trizone_case
from score_cases import chunk_case, window_case

ARCHITECTURES = (80, 90)
MAX_REGISTERS = 255
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What one kernel's machine code must keep to.

    Attributes:
        registers: at most.
        wide_loads: 128-bit global loads, at least: of what it streams.
        conversions: integers to floats, at most. A logarithm needs two; an unpack loop none.
    """

    registers: int
    wide_loads: int
    conversions: int


GATES = {
    "_append_rows_kernel": Gate(registers=64, wide_loads=0, conversions=0),
    "_dense_decode_kernel": Gate(registers=255, wide_loads=8, conversions=8),
    "_score_pages_kernel": Gate(registers=224, wide_loads=2, conversions=8),
    "_select_tokens_kernel": Gate(registers=224, wide_loads=0, conversions=8),
    "_gather_attend_kernel": Gate(registers=255, wide_loads=8, conversions=8),
    "_prologue_kernel": Gate(registers=128, wide_loads=0, conversions=0),
    "_trizone_kernel": Gate(registers=255, wide_loads=16, conversions=12),
    "_key_ranges_kernel": Gate(registers=168, wide_loads=0, conversions=0),
    "_pack_keys_kernel": Gate(registers=255, wide_loads=0, conversions=0),
    "_pack_values_kernel": Gate(registers=255, wide_loads=2, conversions=0),
    "_row_lse_kernel": Gate(registers=255, wide_loads=4, conversions=8),
    "_column_sums_kernel": Gate(registers=255, wide_loads=4, conversions=8),
    "_chunk_scores_kernel": Gate(registers=255, wide_loads=4, conversions=8),
}


def models() -> tuple[Model, ...]:
    """The models' shapes with one KV head, and the ends of what is served.

    Models of one attention shape compile to the same code; each is there by name.
    """
    return (
        *(replace(model, num_kv_heads=1) for model in MODELS),
        Model(name="wide", num_kv_heads=1, group_size=16, head_dim=256, dtype=torch.float16),
        Model(name="narrow", num_kv_heads=1, group_size=1, head_dim=64, dtype=torch.float16),
        Model(name="odd", num_kv_heads=1, group_size=7, head_dim=96),
    )


def compile_cases(model: Model) -> list[Callable[[], Case]]:
    """Launches whose constants are those of a real shape, on as few rows as give them."""
    return [
        lambda: dense_case(model, batch_size=1, length=64, device=_CPU, seed=0, target=None),
        lambda: append_case(model, batch_size=1, device=_CPU, seed=0),
        lambda: hsa_cases(
            model,
            HsaSize(batch_size=1, length=4096, page_size=4, num_channels=model.head_dim // 2, num_tokens=256),
            device=_CPU,
            seed=0,
            targets=(None, None),
        )[-1],
        lambda: trizone_case(model, batch_size=1, kept=300, new=16, device=_CPU, seed=0, target=None),
        lambda: window_case(model, window=32, length=64, device=_CPU, seed=0, target=None),
        lambda: pack_case(model, length=300, device=_CPU, seed=0, target=None),
        lambda: chunk_case(model, chunk=512, length=512, device=_CPU, seed=0),
    ]


def launches_of(case: Case) -> list[Launch]:
    with caught(list(case.kernels)) as launches:
        case.launch()
    return launches


def compile_all(only: str = "", model_names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Facts of every kernel whose name holds `only`, at the named models' shapes (all where none is named).

    Raises: whatever the compiler raises where a kernel does not compile.
    """
    rows = []
    for model in models():
        if model_names and model.name not in model_names:
            continue
        for make in compile_cases(model):
            for launch in launches_of(make()):
                if only not in launch.kernel.__name__:
                    continue
                for arch in ARCHITECTURES:
                    facts = compile_launch(launch, arch)
                    shape = {"model": model.name, "head_dim": model.head_dim, "group_size": model.group_size}
                    rows.append({**shape, "dtype": str(model.dtype), **facts.row(), "breaks": breaks(facts)})
    return rows


def breaks(facts: Facts) -> list[str]:
    """What a kernel's machine code does not keep to, in words."""
    gate = GATES[facts.kernel]
    found = []
    if facts.registers > min(gate.registers, MAX_REGISTERS):
        found.append(f"{facts.registers} registers; at most {gate.registers}")
    if facts.stack_bytes:
        found.append(f"{facts.stack_bytes} bytes of spilled registers; there must be none")
    if facts.wide_loads < gate.wide_loads:
        found.append(f"{facts.wide_loads} loads of 128 bits; at least {gate.wide_loads}")
    if facts.int_to_float > gate.conversions:
        found.append(f"{facts.int_to_float} conversions of integers to floats; at most {gate.conversions}")
    return found
