"""Values that the host reads later, copied behind the work that computes them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostRead:
    """Begins to copy a tensor to the host. On a CPU there is nothing to copy.

    On CUDA the copy follows the current stream's work into pinned memory, and any thread may wait for it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The values, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.cpu()
