"""The version of an installed package is its metadata's, that of a source tree its pyproject.toml's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvferry

REPOSITORY = Path(__file__).parents[2]
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
VERSION = tomllib.loads(PYPROJECT)["project"]["version"]


def version_in(tree: Path) -> str:
    """What a tree's package says in an interpreter that has the standard library alone."""
    folder = str(tree / "src")
    script = f"import sys; sys.path.insert(0, {folder!r}); import kvferry; print(kvferry.__version__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("version", [VERSION, "12.3.4rc5"])
def test_a_tree_that_is_not_installed_has_pyproject_s_version(version: str, tmp_path: Path) -> None:
    """In a copy, because an installation may leave metadata beside the sources."""
    package = tmp_path / "src" / "kvferry"
    for path in ("__init__.py", "shared/__init__.py", "shared/process/version.py"):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "src" / "kvferry" / path, package / path)
    text = PYPROJECT.replace(f'\nversion = "{VERSION}"\n', f'\nversion = "{version}"\n')
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    assert version_in(tmp_path) == version


def test_the_installed_package_has_the_same() -> None:
    assert kvferry.__version__ == VERSION
