"""Checks that the NVIDIA driver is new enough for the CUDA of torch's build, for workers to act if not.

torch says only that there is no CUDA device. With device auto the model would then run on the CPU, which
nobody wants on a machine with a GPU; so the reason is found here, before the model is loaded.
"""

from __future__ import annotations

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import structlog

from kvferry.shared.errors import ConfigurationError

_log = structlog.get_logger(__name__)

DRIVER_FILE = Path("/proc/driver/nvidia/version")
LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The first driver branch that runs each major version of CUDA, as NVIDIA documents it."""


def driver_version(path: Path = DRIVER_FILE) -> str | None:
    """Return the version of the loaded NVIDIA driver; None without one."""
    try:
        found = re.search(r"Kernel Module.*?\b(\d+\.\d+(?:\.\d+)?)\b", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def driver_problem(driver: str | None, cuda: str | None) -> str | None:
    """Say why torch cannot use a GPU with this driver; None if the driver is not the reason.

    Args: cuda: of torch's build, None for one without.
    """
    if cuda is None:
        return "this torch is a build for CPUs; install one for CUDA"
    if driver is None:
        return "no NVIDIA driver is loaded; in a container, give it a GPU (the NVIDIA container toolkit)"
    major = int(cuda.partition(".")[0])
    least = LEAST_DRIVERS.get(major, max(LEAST_DRIVERS.values()))
    if int(driver.partition(".")[0]) < least:
        return (
            f"the NVIDIA driver is {driver}, and torch's CUDA {cuda} needs {least} or newer; update the "
            "driver, or install a torch for an older CUDA"
        )
    return None


def torch_build() -> tuple[str | None, str | None]:
    """Return the versions of CUDA and ROCm that torch is built for, each or none; torch is not imported."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    names = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return names.get("cuda"), names.get("hip")


def check_device(device: str) -> None:
    """Refuse a CUDA device that torch cannot use, with the reason; warn if `auto` means the CPU although
    there is a GPU.

    Args: device: as a worker's option.
    Raises: ConfigurationError.
    """
    import torch

    if torch.cuda.is_available() or not device.startswith(("cuda", "auto")):
        return
    if device.startswith("cuda"):
        raise no_cuda(device, torch.version.cuda)
    if (driver := driver_version()) is not None:
        reason = driver_problem(driver, torch.version.cuda) or ""
        _log.warning("this machine has an NVIDIA driver, and the model runs on the CPU", reason=reason)


def no_cuda(device: str, cuda: str | None) -> ConfigurationError:
    """Return the error of a CUDA device that there is not. Args: cuda: as of `driver_problem`."""
    reason = driver_problem(driver_version(), cuda) or (
        "the driver fits, so look at nvidia-smi, CUDA_VISIBLE_DEVICES and the devices' state"
    )
    return ConfigurationError(f"device is {device!r}, and torch finds no CUDA device: {reason}")
