"""What a model costs to compute."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.shared.model.spec import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What one token costs to compute.

    Attributes:
        num_parameters: all of them, which are in memory.
        num_active: those that one token meets: of a mixture of experts, its chosen experts' only.
    """

    spec: ModelSpec
    num_parameters: int
    num_active: int

    @property
    def weights_bytes(self) -> int:
        return self.num_parameters * DTYPE_BYTES[self.spec.dtype]

    def prefill_flops(self, num_tokens: int) -> float:
        """Of one prompt: two a parameter and token, and causal attention's two products."""
        return 2.0 * self.num_active * num_tokens + sum(
            2.0
            * self.spec.num_heads
            * self.spec.head_dim
            * num_tokens
            * min(num_tokens, its.window or num_tokens)
            for its in (self.spec.layer(layer) for layer in self.spec.row_layers)
        )
