"""The self-test's cases (`kernels/cases.py`) at the shapes of several models, with the time of each."""

from __future__ import annotations

import time
from typing import Any

import torch
from timing import Clock

from kvferry.kernels.case import OpCheck
from kvferry.kernels.decode_batch import BatchShape

NAMES = ("llama-8b", "demo", "one-head", "seven")
TINY_NAMES = ("tiny",)


def op_check_shape(name: str, device: torch.device) -> BatchShape:
    """Return the shape of this name."""
    num_kv_heads, group_size, head_dim, dtype, has_windows = {
        "llama-8b": (8, 4, 128, torch.bfloat16, True),
        "demo": (2, 4, 64, torch.float16, False),
        "one-head": (1, 4, 256, torch.bfloat16, False),
        "seven": (4, 7, 128, torch.bfloat16, False),
        "tiny": (2, 2, 16, torch.float16, True),
    }[name]
    return BatchShape(
        num_layers=1, num_slots=1, num_kv_heads=num_kv_heads, group_size=group_size, head_dim=head_dim,
        dtype=dtype, device=device, has_windows=has_windows,
    )  # fmt: skip


@torch.inference_mode()
def op_check_row(shape: str, check: OpCheck, clock: Clock) -> dict[str, Any]:
    """Run one case. Returns its row: what is wrong, None if nothing, and seconds until it was compiled and
    launched, and from then until it was compared."""
    begin_s = time.perf_counter()
    found = check.launch()
    launched_s = time.perf_counter()
    clock.wait()
    problem = check.problem(found)
    return {
        "shape": shape, "op": check.op, "case": check.name, "problem": problem and ": ".join(problem),
        "launch_s": launched_s - begin_s, "check_s": time.perf_counter() - launched_s,
    }  # fmt: skip
