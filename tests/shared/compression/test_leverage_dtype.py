"""The Gram matrix of leverage scores is in float64 on every device: it squares the condition number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvferry.shared.compression.leverage import solve_leverage


class Solvers(TorchFunctionMode):
    """Which dtypes matrices are factorised in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith(("linalg_cholesky", "linalg_eigh")):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_factorised_in_float64(device: str) -> None:
    """A device without memory stands for those that are no CPU."""
    rows = torch.ones(2, 50, 8, device=device) + torch.eye(50, 8, device=device)
    with Solvers() as solvers:
        scores = solve_leverage(rows, "gram")
    assert solvers.dtypes == {torch.float64}
    assert (scores.dtype, scores.shape, scores.device.type) == (torch.float32, (2, 50), device)
