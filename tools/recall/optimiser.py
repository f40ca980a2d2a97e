"""Muon for the network's matrices and AdamW for its embedding and norms, as one optimiser.

Muon replaces a matrix's momentum by its nearest semi-orthogonal matrix, found by a quintic Newton-Schulz
iteration (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Pull the singular values of matrices `[N, rows, columns]` to about 1 (between 0.7 and 1.2), in fp32."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = x.mT if tall else x
    return result.float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; an update's size does not depend on the gradient's."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                by_shape[p.shape].append((p, p.grad.lerp(state["momentum"], group["momentum"])))
            for shape, updates in by_shape.items():
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (p, _), u in zip(
                    updates, orthogonalise(torch.stack([u for _, u in updates])), strict=True
                ):
                    p.add_(u, alpha=-group["lr"] * scale)


class RecallOptimiser:
    """Muon and AdamW under one learning-rate scale."""

    def __init__(self, network: nn.Module, *, lr_matrix: float, lr_other: float) -> None:
        named = list(network.named_parameters())
        matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in named if p.dim() != 2 or "embed" in n]
        self._optimisers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, lr=lr_matrix),
            torch.optim.AdamW(others, lr=lr_other, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )
        self._rates = (lr_matrix, lr_other)

    def step(self, lr_scale: float) -> None:
        """Make one update at `lr_scale` times the base learning rates; gradients are cleared."""
        for optimiser, rate in zip(self._optimisers, self._rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * lr_scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [o.state_dict() for o in self._optimisers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimiser, state in zip(self._optimisers, states, strict=True):
            optimiser.load_state_dict(state)
