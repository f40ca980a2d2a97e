"""A Docker engine of our own, images on a stand-in base, and the CPU stack of docker-compose.yml running."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from kvtest.containers import engine as engines
from kvtest.containers import stack as compose
from kvtest.containers import stand_ins


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running engine; skips where the machine cannot have one, and says why.

    Its files stay until pytest removes old temporary folders: deleting so many takes minutes.
    """
    reason = engines.why_impossible()
    if reason:
        _cannot(reason)
    folder = tmp_path_factory.mktemp("containers")
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(engines.running_engine(folder))
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
    try:
        stand_ins.make(engine)
    except stand_ins.NoBase as error:
        _cannot(str(error))
    with compose.up(engine) as stack:
        yield stack
