"""What captures, and what asks whether the device is lost: a capture holds the lock that the question takes,
and the question is about an error, because memory that ran out is no loss."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.kernels.quarantine import capturing
from kvferry.shared.device.cuda_device import CudaDevice

REPOSITORY = Path(__file__).parents[2]


class Stream:
    """Instead of CUDA's."""

    device_index = 0

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        pass


class Graph:
    """Instead of CUDA's. Attributes: held: whether the lock was held at each call."""

    held: list[tuple[str, bool]]

    def capture_begin(self, **_: Any) -> None:
        Graph.held.append(("begin", capturing.locked()))

    def capture_end(self) -> None:
        Graph.held.append(("end", capturing.locked()))

    def replay(self) -> None:
        Graph.held.append(("replay", capturing.locked()))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    Graph.held = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None, raising=False)
    return CudaDevice(torch.device("cuda:0"))


def test_a_capture_holds_the_lock_and_nothing_before_and_after_it_does(device: CudaDevice) -> None:
    """Eager runs before it may compile for seconds."""
    replay = device.capture(lambda: Graph.held.append(("run", capturing.locked())))
    replay()
    *eager, begin, captured, end, replayed = Graph.held
    assert eager
    assert eager == [("run", False)] * len(eager)
    assert [begin, captured, end] == [("begin", True), ("run", True), ("end", True)]
    assert replayed == ("replay", False)


def test_a_capture_that_fails_lets_the_lock_go(device: CudaDevice) -> None:
    def run() -> None:
        if capturing.locked():
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(run)
    assert not capturing.locked()


def questions(tree: ast.AST, is_after: Callable[[ast.AST], bool]) -> list[ast.Call]:
    """Calls of `is_lost` in what `is_after` is true of."""
    return [
        call
        for place in ast.walk(tree)
        if is_after(place)
        for call in ast.walk(place)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "is_lost"
    ]


def test_whoever_asks_after_an_error_asks_about_it() -> None:
    asked = 0
    for path in (
        source for folder in ("services", "shared") for source in (REPOSITORY / folder).rglob("*.py")
    ):
        text = path.read_text(encoding="utf-8")
        if "is_lost(" not in text:
            continue
        for call in questions(ast.parse(text), lambda place: isinstance(place, ast.ExceptHandler)):
            assert call.args, f"{path}:{call.lineno}"
            asked += 1
    assert asked >= 3
