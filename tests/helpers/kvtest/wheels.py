"""Wheels built from sources, each installed into an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def build_wheel(source: Path, folder: Path) -> Path:
    """Build a wheel into a folder that has none."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    _run([*command, str(source)], folder)
    (built,) = folder.glob("kvferry-*.whl")
    return built


def install_wheel(wheel: Path, folder: Path) -> Path:
    """A clean environment's folder with the wheel in it; dependencies come from this one's site-packages.

    A `.pth` line adds that folder to the path without reading the `.pth` files in it, so the editable install
    of the repository stays out.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
    options = ("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    _run([*command, str(folder / "bin" / "python"), *options], folder)
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
