"""Prints what pyproject.toml says that the package needs, one requirement a line.

So that an image's layer with the dependencies stays as it is until pyproject.toml or constraints.txt changes.
Run at image build by the interpreter of the base, before anything is installed.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Build requirements, the package's own, and those of the named extras."""
    described = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = described["project"]
    return [
        *described["build-system"]["requires"],
        *project["dependencies"],
        *(entry for extra in extras for entry in project["optional-dependencies"][extra]),
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])) + "\n")
