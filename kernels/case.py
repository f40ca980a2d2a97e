"""One case of a kernel: the kernel on inputs of its own, and the same in torch (`cases.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.quarantine import Reason

SPOILT = 1
"""The slot, or head, with NaN."""
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Norm of the difference, relative to the reference's. Torch rounds probabilities to the rows' dtype."""


@dataclass(frozen=True, kw_only=True)
class OpCheck:
    """One case. Both functions return float32 `[parts, n]`; a part is a sequence or a head.

    Attributes:
        launch: runs the kernel on inputs of its own.
        expected: the same in torch.
        spoilt: a part that is not compared.
    """

    op: str
    name: str
    launch: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    tolerance: float
    spoilt: int | None = None

    def problem(self, result: Tensor) -> tuple[Reason, str] | None:
        """Say why a result of `launch` is wrong; None if it is right."""
        finite = self._compared(result).isfinite()
        if not bool(finite.all()):
            return "nan", f"{self.name}: {int((~finite).sum())} of {finite.numel()} values are not finite"
        if (error := self.error(result)) > self.tolerance:
            worst = f"{error:.2e} relative to torch, allowed {self.tolerance:.0e}"
            return "wrong_result", f"{self.name}: the error is {worst}"
        return None

    def error(self, result: Tensor) -> float:
        """Return the norm of a result's difference from torch, relative to torch's, for the worst part."""
        expected = self._compared(self.expected())
        error = (self._compared(result) - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)
        return float(error.max())

    def _compared(self, result: Tensor) -> Tensor:
        return result[[part for part in range(len(result)) if part != self.spoilt]]


def bits_of(shape: BatchShape, length: int) -> tuple[Tensor, Tensor]:
    """Return widths of channels and tokens that differ from head to head."""
    generator = torch.Generator().manual_seed(length)
    widths = torch.tensor([0, 2, 2, 4, 4, 8, 16], dtype=torch.uint8)
    channels, tokens = (
        widths[torch.randint(len(widths), (shape.num_kv_heads, count), generator=generator)]
        for count in (shape.head_dim, length)
    )
    return channels.to(shape.device), tokens.to(shape.device)
