"""Triton's cache with what was compiled before: read from a folder of the image, everything else as usual.

    TRITON_CACHE_MANAGER=kvferry.kernels.prebuilt_cache:PrebuiltCache

`kvferry compile --folder` fills the folder, which is TRITON_PREBUILT_DIR or share/kvferry/triton of the
environment. Keys that the folder has are read from it, so it may be read-only; all others are stored in
TRITON_CACHE_DIR. Imports Triton.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from triton.runtime.cache import FileCacheManager

PREBUILT_FOLDER = Path(
    os.environ.get("TRITON_PREBUILT_DIR") or Path(sys.prefix, "share", "kvferry", "triton")
)


class PrebuiltCache(FileCacheManager):  # type: ignore[misc]
    """The entry of one key."""

    folder = PREBUILT_FOLDER

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        built = self.folder / key
        if override or dump or not built.is_dir():
            super().__init__(key, override, dump)
            return
        self.key, self.lock_path, self.cache_dir = key, str(built / "lock"), str(built)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the entry's files by name, at their present paths: Triton records their original ones."""
        if self.cache_dir != str(self.folder / self.key):
            group: dict[str, str] | None = super().get_group(filename)
            return group
        listed = Path(self.cache_dir, f"__grp__{filename}")
        if not listed.is_file():
            return None
        names = json.loads(listed.read_text())["child_paths"]
        return {name: str(Path(self.cache_dir, name)) for name in names}
