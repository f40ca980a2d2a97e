"""A Docker engine of our own, images on a stand-in base, and the CPU stack of docker-compose.yml running."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

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
    """A running engine; skips where the machine cannot have one, and says why.

    Its files stay until pytest removes old temporary folders: deleting so many takes minutes.
    """
    module = _load("engine")
    reason = module.why_impossible()
    if reason:
        _cannot(reason)
    folder = tmp_path_factory.mktemp("containers")
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(module.running_engine(folder))
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            _cannot(f"{error}")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("NO_PROXY", engine.address)
        yield engine


def _cannot(reason: str) -> NoReturn:
    """Where REQUIRE_CONTAINERS is set, as on a machine made for these tests, it is a failure."""
    if os.environ.get("REQUIRE_CONTAINERS"):
        pytest.fail(f"containers cannot be run here: {reason}")
    pytest.skip(f"containers cannot be run here: {reason}")


@pytest.fixture(scope="session")
def stack(engine: Any) -> Iterator[Any]:
    """The stack, built and up."""
    stand_ins = _load("stand_ins")
    try:
        stand_ins.make(engine)
    except stand_ins.NoBase as error:
        _cannot(str(error))
    with _load("stack").up(engine) as stack:
        yield stack
