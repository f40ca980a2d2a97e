"""Compiles this folder's C code with the machine's C compiler, for its own processor, and loads it.

    first call of `library`: prebuilt or cached ──no──► compile (some seconds) ──► load ──► compare with torch
                                    └───────────────────yes──────────────────────────┘

The CPU image has no compiler, but files for some kinds of processors (`prebuild`). A file that is made here
is in the user's cache, or, if there is no safe folder for it, in one of this process. Where there is no such
folder or no compiler, or its code does not agree with torch, ops run in torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-pthread", "-shared", "-fPIC")
COMPILE_S = 60.0
PREBUILT = Path(sys.prefix) / "share" / "kvferry" / "native"
_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {
        "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
        "x86-64-v3": _V3,
    },
    "aarch64": {"armv8.2-a+fp16": frozenset({"asimdhp"}), "armv8-a": frozenset({"asimd"})},
}
"""By machine, the kinds of processors for which files are prebuilt, as compilers name them, the best first,
and the flags that Linux shows of them."""
CACHE = Path(".cache") / "kvferry" / "native"
"""In the user's home."""
KINDS: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`products.h`'s numbers of weights' dtypes."""
_TOLERANCE = 1e-5
_Check = Callable[[], dict[str, float]]
_checks: list[_Check] = []
_int, _pointer, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_HEADS = (_pointer, _int, _int, _pointer, _int)
_PACKED = (_pointer, _int, _pointer, _int)
_STEP = (_int, _int, _pointer, _pointer, _pointer, _float, _pointer)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "multiply": (None, (_pointer, _int, _int, _pointer, _pointer)),
    "project": (None, (_pointer, _int, _int, *[_pointer] * 8)),
    "finish": (None, (_pointer, _int, _int, *[_pointer] * 4)),
    "logits": (None, (_pointer, _pointer, _int, _int, *[_pointer] * 3)),
    "attend_in_threads": (ctypes.c_int, (_pointer, _int, *_HEADS, *_PACKED, *_STEP)),
    "attend": (ctypes.c_int, (*_HEADS, *_STEP)),
    "attend_sparse": (ctypes.c_int, (*_HEADS, *_STEP)),
    "attend_packed": (ctypes.c_int, (*_HEADS, *_PACKED, *_STEP)),
    "attend_packed_sparse": (ctypes.c_int, (*_HEADS, *_PACKED, *_STEP)),
    "chunk_scores": (
        ctypes.c_int,
        (*[_pointer] * 3, *[_int] * 5, ctypes.c_int, _int, _int, _float, _pointer),
    ),
}
"""The return and argument types of the library's functions, by name without prefix."""


class Norm(ctypes.Structure):
    """`norm` of `decoder.c`."""

    _fields_ = [("weight", _pointer), ("eps", _float)]


class Product(ctypes.Structure):
    """`product` of `products.h`."""

    _fields_ = [("weight", _pointer), ("bias", _pointer), ("rows", _int), ("columns", _int), ("kind", _int)]


class Layer(ctypes.Structure):
    """`layer` of `decoder.c`."""

    _fields_ = [
        *((name, Norm) for name in ("input", "queries_norm", "keys_norm", "inner")),
        *((name, Product) for name in ("queries", "keys", "values", "output", "gate", "up", "down")),
        ("head_dim", _int),
    ]


class NativeUnavailable(RuntimeError):
    """There is no native code on this machine, and why."""


class _Compared(threading.local):
    """The library that this thread compares with torch, before any other may have it."""

    library: ctypes.CDLL | None = None


_compared = _Compared()


def is_compared() -> bool:
    """Return whether this thread compares a library with torch: batches then use it in any case."""
    return _compared.library is not None


@functools.lru_cache(maxsize=1)
def find_library() -> ctypes.CDLL | NativeUnavailable:
    """Return the library, or why there is none. It is compiled at the first call."""
    try:
        return load(_compiled())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return NativeUnavailable(f"{type(error).__name__}: {error}")


def library() -> ctypes.CDLL:
    """Return the library. Raises: NativeUnavailable."""
    found = _compared.library or find_library()
    if isinstance(found, NativeUnavailable):
        raise found
    return found


def in_threads(name: str) -> Callable[..., int]:
    """Return an attention of the library that runs the heads of a batch in several threads."""
    found = library()
    function = ctypes.cast(getattr(found, name), ctypes.c_void_p).value
    return functools.partial(found.kvferry_attend_in_threads, function)


def is_available() -> bool:
    """Return whether this machine has the library."""
    return not isinstance(find_library(), NativeUnavailable)


def load(path: Path) -> ctypes.CDLL:
    """Load a compiled file. Raises: NativeUnavailable: it does not compute what torch does."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, f"kvferry_{name}")
        function.restype, function.argtypes = result, arguments
    assert _checks, "kvferry.kernels registers one"
    _compared.library = loaded
    try:
        for name, error in (item for check in _checks for item in check().items()):
            if not error <= _TOLERANCE:
                raise NativeUnavailable(
                    f"{path} computes {name} with an error of {error:.1e} relative to torch"
                )
    finally:
        _compared.library = None
    return loaded


def register_check(errors: _Check) -> _Check:
    """Have every file that is loaded compared with torch first.

    Args: errors: relative to torch, by what is computed. It imports ops, which ask for this library.
    """
    _checks.append(errors)
    return errors


def has_halves() -> bool:
    """Return whether the library reads float16. Raises: NativeUnavailable."""
    return bool(library().kvferry_kinds() >> KINDS[torch.float16] & 1)


def prebuild(folder: Path = PREBUILT) -> list[Path]:
    """Compile a file for each of this machine's `LEVELS`, for processes without a compiler.

    Raises: NativeUnavailable, OSError, SubprocessError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_made(folder, level, "") for level in LEVELS.get(platform.machine(), ())]


def _compiled() -> Path:
    """Return a prebuilt file for this processor, or one compiled for it, made if it is missing.

    Raises: NativeUnavailable, OSError, SubprocessError.
    """
    processor = _processor()
    flags = set(processor.replace("'", " ").split())
    if PREBUILT.is_dir() and is_safe(PREBUILT.resolve()):
        for level, needed in LEVELS.get(platform.machine(), {}).items():
            path = _path(PREBUILT, level, "")
            if needed <= flags and path.exists():
                return path
    return _made(_folder(), "native", processor)


def _path(folder: Path, level: str, processor: str) -> Path:
    sources = [file.read_bytes() for file in sorted(FOLDER.glob("*.[ch]"))]
    key = hashlib.sha256(b"\0".join([*sources, repr((FLAGS, level, processor)).encode()]))
    return folder / f"decoder-{key.hexdigest()[:20]}.so"


def _made(folder: Path, level: str, processor: str) -> Path:
    """Return the file of a level, compiled if it is missing."""
    path = _path(folder, level, processor)
    if not path.exists():
        compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            raise NativeUnavailable(f"there is no C compiler: none of {', '.join(COMPILERS)}")
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / path.name
            sources = map(str, sorted(FOLDER.glob("*.c")))
            command = [compiler, *FLAGS, f"-march={level}", "-o", str(made), *sources, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
            if done.returncode:
                raise NativeUnavailable(f"{compiler} failed: {done.stderr.strip()[-500:]}")
            made.replace(path)  # atomically, for processes that start at the same time
    return path


def _folder() -> Path:
    """Return a folder that only this user can write to. Raises: NativeUnavailable, OSError."""
    try:
        folder = Path.home() / CACHE
        for each in (*reversed(folder.parents), folder):
            each.mkdir(exist_ok=True, mode=0o700)
        folder = folder.resolve()
        if is_safe(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home, or a file system that is read only
        pass
    folder = Path(tempfile.mkdtemp(prefix="kvferry-native-")).resolve()
    if not is_safe(folder):
        folder.rmdir()
        raise NativeUnavailable(f"{folder} is below a folder that others own or can write to")
    return folder


def is_safe(folder: Path) -> bool:
    """Return whether nobody but this user and root can change what is in a folder, or replace it or a folder
    above it, between a look at a file and its use. `/tmp`, in which nobody can replace what others own, is a
    safe place above."""
    for each in (folder, *folder.parents):
        found = each.stat()
        is_shared = found.st_mode & 0o022 and (each == folder or not found.st_mode & stat.S_ISVTX)
        if found.st_uid not in (0, os.getuid()) or is_shared:
            return False
    return True


def _processor() -> str:
    """Describe what `-march=native` depends on: machines may share a home."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = ("model name", "flags", "Features", "CPU part")
    shown = {line for line in lines if line.split("\t", 1)[0].rstrip(": ") in named}
    return repr((platform.machine(), platform.processor(), sorted(shown)))
