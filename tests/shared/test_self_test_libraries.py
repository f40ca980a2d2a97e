"""Before a self-test's child says that it is ready, it has used the libraries that references use: the first
use of one takes seconds, which a kernel's time limit must not have in it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvferry.shared.device import self_test


class Seen(TorchFunctionMode):
    """Which functions were called, and with which dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[tuple[str, torch.dtype]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            self.called.add((func.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_libraries_are_loaded_before_the_child_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, whose standard output stays as it is."""
    happened: list[str] = []

    class Reports:
        def write(self, line: str) -> None:
            happened.append(json.loads(line)["phase"])

    of_process = SimpleNamespace(dup=lambda fd: fd, dup2=lambda *_: None, fdopen=lambda *_, **__: Reports())
    monkeypatch.setattr(self_test, "os", of_process)
    monkeypatch.setattr(self_test, "_end_with_parent", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(self_test, "_load_libraries", lambda device: happened.append(f"loaded on {device}"))
    shape = {
        "num_layers": 1, "num_slots": 1, "num_kv_heads": 1, "group_size": 1, "head_dim": 16,
        "dtype": "float16", "device": "cuda",
    }  # fmt: skip
    task = {"ops": [], "shape": shape, "mode": "auto", "num_threads": 1}
    assert self_test.run_child([json.dumps(task)]) == 0
    assert happened == ["loaded on cuda", "ready"]


def test_they_are_those_of_products_sorts_and_solvers_for_every_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = torch.device("cpu")
    with Seen() as seen:
        self_test._load_libraries(device)
        assert waited == [device], "a launch alone has loaded nothing by then"
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert {("bmm", dtype), ("softmax", dtype), ("sort", dtype)} <= seen.called
    assert {"linalg_cholesky", "linalg_cholesky_ex", "linalg_eigh"} & {name for name, _ in seen.called}
