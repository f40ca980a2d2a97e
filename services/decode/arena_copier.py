"""Copies payloads from the wire's memory into the arena. Used by the writers of `cache_writer.py` and
`packed_writer.py`; knows no layout.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class ArenaCopier:
    """Copies payloads from the wire's memory into the arena; on CUDA by way of pinned memory.

    Used by the receiver's thread alone.
    """

    def __init__(self, max_payload_bytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._pinned = torch.empty(max_payload_bytes, dtype=torch.uint8, pin_memory=True) if on_cuda else None
        self._payload = np.empty(0, np.uint8)

    def load(self, payload: memoryview) -> None:
        """The payload that `copy` takes from, until the next call."""
        self._payload = np.frombuffer(payload, np.uint8)
        if self._pinned is not None:
            self._pinned.numpy()[: payload.nbytes] = self._payload

    def copy(self, target: Tensor, offset: int) -> None:
        """Fill `target`, uint8 `[n]` in the arena, with the payload's bytes from `offset` on."""
        end = offset + target.numel()
        if self._pinned is not None:
            target.copy_(self._pinned[offset:end])
        else:
            # not torch's copy: it would divide a block among torch's threads, and wait for busy processors
            target.numpy()[:] = self._payload[offset:end]
