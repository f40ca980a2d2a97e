"""The origin of a result: the model, the machine, and the commit of the sources that measured it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kvferry.shared.model.checkpoint import model_fingerprint, resolve_model_path
from kvferry.shared.model.spec import DTYPE_BYTES


def hardware(device: str) -> str:
    """Return the GPU's name, or the number of processors."""
    import torch

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.get_device_name(torch.device(device if device != "auto" else "cuda"))
    return f"{os.cpu_count()} CPU cores"


def commit() -> str:
    """Return the commit of the sources, with a plus if they have changes; "unknown" outside a repository."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    short = git("rev-parse", "--short=12", "HEAD")
    if short is None:
        return "unknown"
    return short + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def fingerprints(model: str) -> dict[str, str]:
    """Return a model's fingerprints by the dtype in which it computes. Args: model: as of `load_model`."""
    folder = resolve_model_path(model, weights=True)
    return {dtype: model_fingerprint(folder, dtype=dtype) for dtype in DTYPE_BYTES}
