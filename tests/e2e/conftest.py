"""The real stack for end-to-end tests: `kvferry serve`, its services as separate processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.shared.model.tokenizer import ChatTokenizer


def _load(name: str) -> ModuleType:
    """A helper module beside this file (tests are no package)."""
    qualified = f"kvferry_e2e_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    return sys.modules[qualified]


@pytest.fixture(scope="session")
def make_document() -> Callable[..., object]:
    return _load("documents").make_document


@pytest.fixture(scope="session")
def start_stack() -> Callable[..., object]:
    """`start_stack(*options)`: a context manager that serves; see `stack.py`."""
    return _load("stack").serving


@pytest.fixture(scope="session")
def stack(start_stack: Callable[..., object]) -> Iterator[object]:
    """The default stack, shared by the tests of a worker."""
    with start_stack() as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(demo_model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(demo_model_dir)
