"""Compiles Triton kernels for a GPU that is not there and reads facts off the machine code.

A wrapper from `kernels/` is called with CPU tensors while its kernel's launches are caught, so what is
compiled is what would be launched: the same constants, warps and stages. Needs no GPU and takes no times.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.uint16: "*u16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One caught launch: arguments by name, and options such as num_warps."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one kernel compiled to.

    Attributes:
        stack_bytes: a thread's local memory; more than 0 means spilled registers.
        wide_loads, narrow_loads: global load instructions of 128 bits, and of fewer.
        int_to_float: conversions of integers, those of integer divisions (rounded up, `.RP`) left out.
    """

    kernel: str
    arch: str
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    wide_loads: int
    narrow_loads: int
    int_to_float: int
    tensor_core_ops: int
    instructions: int

    def row(self) -> dict[str, Any]:
        return asdict(self)


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


def compile_launch(launch: Launch, arch: int) -> Facts:
    """Args: arch: 80 or 90. Raises: whatever the compiler raises where a kernel does not compile."""
    signature, constants, attributes = _specialise(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, WARP_SIZE), options=launch.options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
        opcodes = re.findall(
            r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", _tool("nvdisasm", "-c", str(cubin)), re.M
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None or not opcodes:
        raise RuntimeError(f"the disassembler says nothing of {launch.kernel.__name__}: {usage[:200]}")
    loads = [op for op in opcodes if op.startswith(("LDG", "LDGSTS"))]
    conversions = [op for op in opcodes if op.startswith(("I2F", "I2FP")) and ".RP" not in op]
    families = Counter(op.partition(".")[0] for op in opcodes)
    return Facts(
        kernel=launch.kernel.__name__,
        arch=f"sm_{arch}",
        num_warps=compiled.metadata.num_warps,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=compiled.metadata.shared,
        wide_loads=sum(".128" in op for op in loads),
        narrow_loads=sum(".128" not in op for op in loads),
        int_to_float=len(conversions),
        tensor_core_ops=families["HMMA"] + families["HGMMA"],
        instructions=len(opcodes),
    )


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[Any]]]:
    """Signature, constants and divisibility, as Triton's own launcher derives them from the arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments[name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
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


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [str(TOOLS / name), *arguments], capture_output=True, text=True, check=True, timeout=60
    ).stdout
