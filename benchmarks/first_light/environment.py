"""Stage `env`: machine, driver, packages, compiler, and what the device's first use takes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

import script
from record import Record

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "grpcio", "protobuf", "pydantic",
    "fastapi", "uvicorn", "pyzmq", "msgspec", "structlog", "cyclopts", "cryptography", "redis", "llguidance",
    "openai", "opentelemetry-sdk", "prometheus-client", "httpx", "pytest",
)  # fmt: skip
COMMANDS = {
    "gpu": "nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free,clocks.max.sm,clocks.max.mem,"
    "power.limit,compute_mode,mig.mode.current --format=csv,noheader",
    "driver": "head -1 /proc/driver/nvidia/version",
    "kernel": "uname -r",
    "memory": "grep -E 'MemTotal|MemAvailable' /proc/meminfo",
    "shared memory": "df -h /dev/shm | tail -1",
    "disk": "df -h . | tail -1",
    "files": "ulimit -n",
    "compiler": "gcc --version | head -1",
    "commit": "git rev-parse --short HEAD",
}


def env(record: Record, given: script.Given) -> None:
    """Add a row for each line, so that a driver that hangs leaves those before it."""

    def say(name: str, value: object) -> None:
        record.add("machine", {"name": name, "value": str(value)})

    for name, command in COMMANDS.items():
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=given.left_s, check=False
        )
        say(name, " ".join((done.stdout + done.stderr).split()))
    say("processors", len(os.sched_getaffinity(0)))
    say("python", platform.python_version())
    say("Python.h", Path(sysconfig.get_path("include"), "Python.h").is_file())
    for name in PACKAGES:
        try:
            say(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            say(name, "missing")
    begin_s = time.perf_counter()
    import torch

    say("import torch, s", f"{time.perf_counter() - begin_s:.2f}")
    say("CUDA", torch.version.cuda)
    if given.is_tiny:
        return
    for what in ("first", "second"):
        begin_s = time.perf_counter()
        a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
        (a @ a).sum().item()
        say(f"{what} product, s", f"{time.perf_counter() - begin_s:.3f}")
    say("device", torch.cuda.get_device_properties(0))


if __name__ == "__main__":
    sys.exit(script.run(env))
