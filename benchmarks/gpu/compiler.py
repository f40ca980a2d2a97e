"""Compiles Triton kernels for a GPU that is not there and reads facts off the machine code.

A wrapper from `kernels/` is called with CPU tensors while its kernel's launches are caught, so what is
compiled is what would be launched: the same constants, warps and stages. Needs no GPU and takes no times.
"""

from __future__ import annotations

import linecache
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WARP_SIZE = 32
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.uint16: "*u16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_LOAD_BITS = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One caught launch: arguments by name, and options such as num_warps."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One machine instruction, and the text of the source line that it was compiled from."""

    opcode: str
    source: str

    @property
    def load_bits(self) -> int:
        """Of a load from global memory, how much a thread gets; 0 for any other instruction."""
        name, *suffixes = self.opcode.split(".")
        if name not in ("LDG", "LDGSTS"):
            return 0
        return next((bits for suffix, bits in _LOAD_BITS.items() if suffix in suffixes), 32)

    @property
    def is_conversion(self) -> bool:
        """Whether it makes a float of an integer; not for a division of integers, which rounds up (`.RP`)."""
        return self.opcode.startswith("I2F") and ".RP" not in self.opcode


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one kernel compiled to. Attributes: stack_bytes: a thread's; above 0 where registers spill."""

    kernel: str
    arch: str
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    code: tuple[Instruction, ...]

    def loads(self, fragment: str = "") -> list[int]:
        """Bits of each global load that comes from a source line with this in it."""
        return [i.load_bits for i in self.code if i.load_bits and fragment in i.source]

    def conversions(self, excused: Sequence[str] = ()) -> int:
        """Integers made floats on lines that have none of these in them."""
        return sum(i.is_conversion and not any(text in i.source for text in excused) for i in self.code)

    def row(self) -> dict[str, Any]:
        """For a table. wide_loads, narrow_loads: global loads of 128 bits, and of fewer."""
        families = Counter(i.opcode.partition(".")[0] for i in self.code)
        wide = self.loads().count(128)
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "num_warps": self.num_warps,
            "registers": self.registers,
            "stack_bytes": self.stack_bytes,
            "shared_bytes": self.shared_bytes,
            "wide_loads": wide,
            "narrow_loads": len(self.loads()) - wide,
            "int_to_float": self.conversions(),
            "tensor_core_ops": families["HMMA"] + families["HGMMA"],
            "instructions": len(self.code),
        }


@contextmanager
def caught(kernels: list[Any]) -> Iterator[list[Launch]]:
    """While open, launches of these kernels are listed instead of run.

    What they would have written reads as zeros, where it would otherwise be whatever memory holds.
    """
    launches: list[Launch] = []

    def catcher(kernel: Any) -> Callable[..., None]:
        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False))
            options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
            named |= {k: v for k, v in kwargs.items() if k in kernel.arg_names}
            launches.append(Launch(kernel=kernel, arguments=named, options=options))

        return run

    empty, torch.empty = torch.empty, torch.zeros
    for kernel in kernels:
        kernel.run = catcher(kernel)
    try:
        yield launches
    finally:
        torch.empty = empty
        for kernel in kernels:
            del kernel.run


def compile_launch(launch: Launch, arch: str) -> Facts:
    """Args: arch: such as "sm_90". Raises: whatever the compiler raises where a kernel does not compile."""
    signature, constants, attributes = specialised(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", int(arch[3:]), WARP_SIZE), options=launch.options
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        code = tuple(_instructions(_tool("nvdisasm", "-c", "-g", str(cubin))))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None or not any(instruction.source for instruction in code):
        raise RuntimeError(f"the disassembler says nothing of {launch.kernel.__name__}: {usage[:200]}")
    return Facts(
        kernel=launch.kernel.__name__,
        arch=arch,
        num_warps=compiled.metadata.num_warps,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=compiled.metadata.shared,
        code=code,
    )


def _instructions(listing: str) -> Iterator[Instruction]:
    """Args: listing: of the disassembler, with a remark where an instruction's source line is another."""
    source = ""
    for line in listing.splitlines():
        if place := re.search(r'//## File "([^"]+)", line (\d+)', line):
            source = linecache.getline(place[1], int(place[2])).strip()
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", line):
            yield Instruction(opcode=found[1], source=source)


def specialised(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[Any]]]:
    """Signature, constants and divisibility, as Triton's own launcher derives them from the arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments[name]
        if parameter.do_not_specialize:
            signature[name] = "i32"
        elif parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[index,] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return signature, constants, attributes


def folded(launch: Launch) -> list[str]:
    """Return the arguments that are constants of the code because they are 1 in this launch."""
    signature, _, _ = specialised(launch)
    parameters = launch.kernel.params
    return [
        parameter.name
        for parameter in parameters
        if signature[parameter.name] == "constexpr" and not parameter.is_constexpr
    ]


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, text=True, check=True, timeout=60
    ).stdout
