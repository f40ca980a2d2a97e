"""kvferry: long-context chat whose KV cache is compressed before it travels.

In Python, `compress` makes a cache for transformers' `generate`, and `load` reads a saved one. Both import
torch when they are first used.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.tools.caches.cache import CompressedCache, compress, load


def _version() -> str:
    """The installed version, or in a source tree that is not installed its pyproject.toml's."""
    try:
        return version("kvferry")
    except PackageNotFoundError:
        text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
        found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
        assert found is not None, "pyproject.toml has no version"
        return found[1]


__version__ = _version()
__all__ = ["CompressedCache", "__version__", "compress", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.tools.caches import cache

    return getattr(cache, name)
