"""Programmatic dependent launch: a kernel is put on the device while the one before it still runs.

A GPU of compute capability 9 or newer puts the programs of a dependent launch on its multiprocessors once
all those of the grid before it have allowed that, so that one kernel's start overlaps the other's end. A
kernel that takes part

    has the constant PDL, and calls `begin_after_others(PDL)` before all else
    is launched with `**dependent(device)`, which gives PDL and Triton's option together

Nothing in global memory may be read or written before the call, descriptors and counters included. Then a
grid sees all that the grids before it in the stream have written, whichever of them take part, because each
ends only after its own wait. A kernel without the call must not be launched with the option.

Imported only by Triton modules, because it imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvferry.kernels.device_limits import compute_capability
from kvferry.kernels.dispatch import interpreting

FIRST_CAPABILITY = 90
"""An H100's."""
_DEPENDENT = MappingProxyType({"PDL": True, "launch_pdl": True})
_ALONE = MappingProxyType({"PDL": False})


@triton.jit
def begin_after_others(PDL: tl.constexpr):
    """Wait until all earlier grids have ended, and let the next one be put on the device; nothing without
    PDL."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def dependent(device: torch.device) -> Mapping[str, bool]:
    """Return the keywords with which a device launches a kernel that has the constant PDL.

    Where the device has no dependent launches, as a CPU has none, Triton's option is left out.
    """
    if compute_capability(device) >= FIRST_CAPABILITY and not interpreting():
        return _DEPENDENT
    return _ALONE
