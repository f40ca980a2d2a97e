"""Gates of compiled kernels: what keeps to one passes, and each way of not keeping to it is named."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
KEY, VALUE = (
    "k = tl.load(key_ptr + key_offset + at, mask)",
    "v = tl.load(value_ptr + value_offset + at, mask)",
)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """gates and compiler of the benchmark, whose modules are no package's."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("gates", "compiler")
    yield importlib.import_module(names[0]), importlib.import_module(names[1])
    for name in names:
        del sys.modules[name]


def facts(compiler: ModuleType, *code: tuple[str, str]) -> Any:
    return compiler.Facts(
        kernel="_dense_decode_kernel",
        arch="sm_90",
        num_warps=4,
        registers=128,
        stack_bytes=0,
        shared_bytes=0,
        code=tuple(compiler.Instruction(opcode=opcode, source=source) for opcode, source in code),
    )


GOOD = (
    ("LDGSTS.E.BYPASS.LTC128B.128", KEY),
    ("LDG.E.128", VALUE),
    ("LDG.E.U16", "token = tl.load(token_ptr + i)"),
    ("LDGDEPBAR", KEY),
    ("I2FP.F32.S32", "own = tl.log2(total)"),
    ("I2F.RP", "tile = n // block"),
)


def test_code_that_keeps_to_its_gate_passes(modules: tuple[ModuleType, ModuleType]) -> None:
    gates, compiler = modules
    good = facts(compiler, *GOOD)
    assert gates.breaks(good, 128) == []
    assert good.loads() == [128, 128, 16]
    assert good.row()["wide_loads"] == 2
    assert good.row()["narrow_loads"] == 1
    assert good.row()["int_to_float"] == 1


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"registers": 193}, (), "193 registers; at most 192"),
        ({"stack_bytes": 8}, (), "8 bytes of spilled registers; at most 0"),
        ({}, (("LDG.E.64", KEY),), r"loads of \[64, 128\] bits at .*key_offset"),
        ({}, (("LDGSTS.E.LTC128B", KEY),), r"loads of \[32, 128\] bits"),
        ({}, (("LDG.E.U16", VALUE),), r"loads of \[16, 128\] bits at .*value_offset"),
        ({}, (("I2F.U16", "code = (word & 3).to(tl.float32)"),), "1 conversions of integers"),
    ],
)
def test_what_does_not_keep_to_a_gate_is_named(
    modules: tuple[ModuleType, ModuleType],
    change: dict[str, int],
    code: tuple[tuple[str, str], ...],
    message: str,
) -> None:
    gates, compiler = modules
    (found,) = gates.breaks(replace(facts(compiler, *GOOD, *code), **change), 128)
    assert re.search(message, found)


@pytest.mark.parametrize(
    ("arch", "limit"), [("sm_86", 99), ("sm_89", 99), ("sm_90", 227), ("sm_100", 227), ("sm_120", 99)]
)
def test_shared_memory_is_held_to_what_the_architecture_has(
    modules: tuple[ModuleType, ModuleType], arch: str, limit: int
) -> None:
    gates, compiler = modules
    fits = replace(facts(compiler, *GOOD), arch=arch, shared_bytes=limit << 10)
    assert gates.breaks(fits, 128) == []
    (found,) = gates.breaks(replace(fits, shared_bytes=(limit << 10) + 1), 128)
    assert found == f"{(limit << 10) + 1} bytes of shared memory; at most {limit << 10}"


def test_spills_that_were_measured_to_be_faster_are_allowed(
    modules: tuple[ModuleType, ModuleType],
) -> None:
    gates, compiler = modules
    load = ("LDG.E.128", "x = tl.load(ptr + at, mask)")
    scoring = replace(facts(compiler, load), kernel="_chunk_scores_kernel")
    most = gates.GATES["_chunk_scores_kernel"].stack_bytes
    assert most > 0
    assert gates.breaks(replace(scoring, stack_bytes=most), 128) == []
    (found,) = gates.breaks(replace(scoring, stack_bytes=most + 8), 128)
    assert found == f"{most + 8} bytes of spilled registers; at most {most}"


def test_a_stream_that_is_not_found_breaks_the_gate(modules: tuple[ModuleType, ModuleType]) -> None:
    """Else a line that is worded anew would be watched no more."""
    gates, compiler = modules
    broken = gates.breaks(facts(compiler, *(one for one in GOOD if one[1] != VALUE)), 128)
    assert len(broken) == 1
    assert "loads of [] bits at `tl.load(value_ptr" in broken[0]


def test_every_line_that_a_gate_names_is_in_the_kernels(modules: tuple[ModuleType, ModuleType]) -> None:
    gates, _ = modules
    source = "\n".join(path.read_text() for path in (FOLDER.parents[1] / "kernels").rglob("*.py"))
    named = itertools.chain.from_iterable((*gate.streams, *gate.conversions) for gate in gates.GATES.values())
    assert [fragment for fragment in named if fragment not in source] == []


def test_an_argument_of_one_is_a_constant_of_the_code(modules: tuple[ModuleType, ModuleType]) -> None:
    """As Triton's launcher has it; so code for one head is another than that for several."""
    _, compiler = modules

    def parameter(name: str, *, is_constexpr: bool = False, do_not_specialize: bool = False) -> Any:
        return SimpleNamespace(name=name, is_constexpr=is_constexpr, do_not_specialize=do_not_specialize)

    kernel = SimpleNamespace(
        params=[
            parameter("num_heads"), parameter("shift", do_not_specialize=True), parameter("n"),
            parameter("D", is_constexpr=True),
        ]
    )  # fmt: skip

    def folded(**arguments: int) -> list[str]:
        found: list[str] = compiler.folded(compiler.Launch(kernel=kernel, arguments=arguments, options={}))
        return found

    assert folded(num_heads=1, shift=1, n=7, D=1) == ["num_heads"]
    assert folded(num_heads=16, shift=1, n=7, D=1) == []
