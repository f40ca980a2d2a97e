"""A Docker engine of our own, images on a stand-in base, and the CPU stack of docker-compose.yml running."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str) -> ModuleType:
    """A helper module beside this file (tests are no package)."""
    qualified = f"kvferry_containers_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    return sys.modules[qualified]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running engine; skips where the machine cannot have one, fails where it should but does not.

    Its files stay until pytest removes old temporary folders: deleting so many takes minutes.
    """
    module = _load("engine")
    reason = module.why_impossible()
    if reason:
        pytest.skip(f"containers cannot be run here: {reason}")
    folder = tmp_path_factory.mktemp("containers")
    with module.running_engine(folder) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", engine.address)
        yield engine


@pytest.fixture(scope="session")
def stack(engine: Any) -> Iterator[Any]:
    """The stack, built and up."""
    _load("stand_ins").make(engine)
    with _load("stack").up(engine) as stack:
        yield stack
