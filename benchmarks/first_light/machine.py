"""The environment of first light's stages: kvferry where it is not installed, and kernels compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
WHEELS, KERNELS = ".whl", ".triton.tgz"
_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def find_gpu() -> bool:
    """Return whether the driver has a device, without loading anything that might hang."""
    return any(path.exists() for path in _DEVICES)


def prebuilt_folder(variables: Mapping[str, str]) -> Path:
    """Return the folder in which `kernels/prebuilt_cache.py` looks."""
    return Path(variables.get("TRITON_PREBUILT_DIR") or Path(sys.prefix, "share", "kvferry", "triton"))


def prepare(work: Path, log: IO[str], *, has_gpu: bool, root: Path = ROOT) -> dict[str, str]:
    """Return the environment variables of stages. Args: work: a folder that lives as long as they.

    Raises: subprocess.CalledProcessError: the wheels cannot be installed here.
    """
    variables = dict(os.environ)
    paths = [str(root / "src"), *filter(None, [variables.get("PYTHONPATH")])]
    if not _is_installed():
        site = work / "site"
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
        options = ("--no-cache-dir", "--target", str(site))
        if wheels := sorted(map(str, (root / WHEELS).glob("*.whl"))):
            subprocess.run([*pip, *options, *wheels], stdout=log, stderr=log, check=True, timeout=300)
        paths.insert(1, str(site))
    kernels = root / KERNELS
    if has_gpu and kernels.exists():
        with tarfile.open(kernels) as archive:
            archive.extractall(prebuilt_folder(variables), filter="data")
        variables["TRITON_CACHE_MANAGER"] = "kvferry.kernels.prebuilt_cache:PrebuiltCache"
    return variables | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # a process that is killed at its limit says where it was
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _is_installed() -> bool:
    try:
        metadata.version("kvferry")
    except metadata.PackageNotFoundError:
        return False
    return True
