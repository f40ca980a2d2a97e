"""The limits of a GPU, by which kernels' tiles and grids are chosen."""

from __future__ import annotations

from functools import lru_cache

import torch

RESERVED_BYTES = 1 << 10


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of a CUDA device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def compute_capability(device: torch.device) -> int:
    """Return a CUDA device's compute capability, 90 for sm_90; 0 for any other device."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory of a CUDA device's multiprocessor: 228 KiB on an H100, 100 KiB on an L4. Each
    program takes `RESERVED_BYTES` of it beside its own."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
