"""What pyproject lists against what the repository holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
TOP_LEVEL = ("baselines", "kernels", "models", "proto", "services", "shared", "tools")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_links_to_every_top_level_folder() -> None:
    package = REPOSITORY / "src" / "kvferry"
    links = {path.name: path.readlink() for path in package.iterdir() if path.is_symlink()}
    assert links == {top: Path("../..") / top for top in TOP_LEVEL}


def test_every_package_has_its_init_file() -> None:
    for top in TOP_LEVEL:
        for path in (REPOSITORY / top).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_package_data_patterns_all_match_files(pyproject: dict[str, Any]) -> None:
    for package, patterns in pyproject["tool"]["setuptools"]["package-data"].items():
        folder = REPOSITORY / "src" / package.replace(".", "/")
        for pattern in patterns:
            assert any(folder.glob(pattern)), f"{package}: {pattern}"


def test_constraints_pin_only_what_pyproject_needs(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"].values()
    needed = {
        re.split(r"[<>=;\[ ]", requirement)[0]
        for group in (pyproject["project"]["dependencies"], *extras)
        for requirement in group
    }
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {re.split(r"[<>=]", line)[0] for line in lines if line and not line.startswith("#")}
    assert pinned <= needed
