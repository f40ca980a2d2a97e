"""Which devices launch kernels dependently, and that each kernel that takes part waits before all else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia.compiler import CUDAOptions

from kvferry import kernels
from kvferry.kernels import dependent_launch
from kvferry.kernels.dependent_launch import dependent
from kvferry.kernels.device_limits import compute_capability

CPU = torch.device("cpu")
BEGINS = "begin_after_others(PDL)"


@pytest.mark.parametrize(
    ("capability", "takes_part"),
    [(0, False), (80, False), (89, False), (90, True), (100, True), (120, True)],
)
def test_gpus_of_capability_9_and_newer_take_part(
    capability: int, takes_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependent_launch, "compute_capability", lambda device: capability)
    monkeypatch.setattr(dependent_launch, "interpreting", lambda: False)
    expected = {"PDL": True, "launch_pdl": True} if takes_part else {"PDL": False}
    assert dict(dependent(CPU)) == expected
    assert set(expected) - {"PDL"} <= set(CUDAOptions.__dataclass_fields__)


def test_the_interpreter_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(dependent(CPU)) == {"PDL": False}
    monkeypatch.setattr(dependent_launch, "compute_capability", lambda device: 90)
    monkeypatch.setattr(dependent_launch, "interpreting", lambda: True)
    assert dict(dependent(CPU)) == {"PDL": False}


def test_a_device_says_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert (compute_capability(CPU), compute_capability(torch.device("cuda", 0))) == (0, 89)
    compute_capability.cache_clear()


def kernels_that_take_part() -> Iterator[ast.FunctionDef]:
    for path in Path(kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "PDL" in (argument.arg for argument in node.args.args):
                yield node


def test_each_kernel_that_takes_part_waits_before_all_else() -> None:
    found = {}
    for kernel in kernels_that_take_part():
        if kernel.name == dependent_launch.begin_after_others.__name__:
            continue
        first, *others = (node for node in kernel.body if not is_text(node))
        found[kernel.name] = ast.unparse(first)
        assert not any(BEGINS in ast.unparse(node) for node in others), kernel.name
    assert found == dict.fromkeys(found, BEGINS)
    assert len(found) >= 10


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
