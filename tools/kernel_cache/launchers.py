"""Builds what Triton has a C compiler build beside a kernel: its signature's launcher, the driver's module.

Both go to Triton's cache under the keys that Triton looks up, which depend on their source alone. They need
libcuda only when they are loaded, so a library of that name with functions that do nothing is enough to link
them. It has the functions that they call, because a linker does not record a library that has none of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from triton.backends.nvidia import driver
from triton.runtime import build
from triton.runtime.cache import get_cache_manager

_TIMEOUT_S = 60
_DRIVER_CALL = re.compile(r"\b(cu[A-Z]\w*)\s*\(")


def build_launchers(compiled: Iterable[Any]) -> int:
    """Build what is not in the cache. Args: compiled: `CompiledKernel`. Returns: how many were built.

    Raises: FileNotFoundError, subprocess.CalledProcessError: there is no C compiler, or it fails.
    """
    sources = {(Path(driver.dirname) / "driver.c").read_text(): "cuda_utils"}
    for one in compiled:
        names = one.src.fn.arg_names
        constants = {
            (names.index(at),) if isinstance(at, str) else at: value
            for at, value in one.src.constants.items()
        }
        described = getattr(one.metadata, "tensordesc_meta", None)
        sources[driver.make_launcher(constants, dict(one.src.signature), described)] = "__triton_launcher"
    with tempfile.TemporaryDirectory() as folder:
        _hollow_libcuda(Path(folder), sources)
        return sum(_build(source, name, folder) for source, name in sources.items())


def _build(source: str, name: str, libcuda: str) -> bool:
    """See `triton.runtime.build.compile_module_from_src`, which would also load the module."""
    cache = get_cache_manager(hashlib.sha256((source + build.platform_key()).encode()).hexdigest())
    file = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if cache.get_file(file) is not None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.c"
        path.write_text(source)
        libraries = [driver.libdevice_dir, libcuda]
        built = build._build(name, str(path), folder, libraries, driver.include_dirs, driver.libraries, [])
        cache.put(Path(built).read_bytes(), file, binary=True)
    return True


def _hollow_libcuda(folder: Path, sources: Iterable[str]) -> None:
    names = sorted({name for source in sources for name in _DRIVER_CALL.findall(source)})
    (folder / "libcuda.c").write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    library, source = str(folder / "libcuda.so.1"), str(folder / "libcuda.c")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S)
