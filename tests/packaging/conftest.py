"""This repository's wheel, built and installed once for the tests of a worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kvtest.wheels import build_wheel, install_wheel

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that no build folder appears in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "tests")
    shutil.copytree(REPOSITORY, folder / "source", symlinks=True, ignore=left_out)
    return build_wheel(folder / "source", folder)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that has it."""
    return install_wheel(wheel, tmp_path_factory.mktemp("elsewhere") / "env")
