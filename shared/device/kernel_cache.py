"""The folder in which Triton stores what it compiles, and from which it loads what the C compiler built."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvferry.shared.errors import ConfigurationError

ADVICE = "set TRITON_CACHE_DIR to a writable folder on a file system without noexec"


def cache_folder() -> Path:
    """Triton's cache in this process. Triton must be installed."""
    from triton import knobs

    return Path(knobs.cache.dir)


def cache_problem(folder: Path) -> str | None:
    """Why kernels cannot be stored in a folder and loaded from it; None if they can. Makes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"{folder} is on a file system with noexec"
    return None


def check_cache(folder: Path) -> None:
    """Raises: ConfigurationError: every kernel would fail, and a worker be slow without a word."""
    if (problem := cache_problem(folder)) is not None:
        raise ConfigurationError(
            f"Triton's cache cannot be used: {problem}; {ADVICE}, or --kernels torch to do without kernels"
        )
