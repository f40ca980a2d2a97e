"""What a GPU has. Kernels' tiles and grids are chosen by it."""

from __future__ import annotations

from functools import lru_cache

import torch

RESERVED_BYTES = 1 << 10


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory of a CUDA device's multiprocessor: 228 KiB on an H100, 100 KiB on an L4. Of it each
    program takes `RESERVED_BYTES` beside its own."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
