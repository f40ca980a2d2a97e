"""kvferry: long-context chat whose KV cache is compressed before it travels.

In Python, `compress` makes a cache for transformers' `generate`, and `load` reads a saved one. Both import
torch when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.shared.process.version import VERSION

if TYPE_CHECKING:
    from kvferry.tools.caches.cache import CompressedCache, compress, load

__version__ = VERSION
__all__ = ["CompressedCache", "__version__", "compress", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.tools.caches import cache

    return getattr(cache, name)
