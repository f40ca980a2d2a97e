"""The version of the code that runs."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path


def _version() -> str:
    """Return the installed version, or that of pyproject.toml in a source tree that is not installed."""
    try:
        return metadata.version("kvferry")
    except metadata.PackageNotFoundError:
        # below src/kvferry, which has links to the packages
        text = Path(__file__).parents[4].joinpath("pyproject.toml").read_text(encoding="utf-8")
        found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
        assert found is not None, "pyproject.toml has no version"
        return found[1]


VERSION = _version()
