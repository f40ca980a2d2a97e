"""Linear layers of float32 rows on a CPU, whose weights are stored in their original bfloat16.

    few rows    C code, or torch with weights that are converted in each call: what float32 weights give
    a prompt    oneDNN, by the processor's instructions for bfloat16: twice as fast

`loading.py` makes them of a checkpoint in bfloat16 where the processor has these instructions. The rows of a
prompt are rounded to bfloat16 before each product, and its results after it; sums are float32, as is
everything between products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvferry.kernels.decoder_ops import native
from kvferry.kernels.dispatch import uses_native

PROMPT_ROWS = 32
"""From this many rows on, products in bfloat16 are faster than exact ones."""


class NarrowLinear(nn.Linear):
    """A linear layer with a bfloat16 weight and, if any, a float32 bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the product. Args: float32 `[..., m]`. Returns: float32 `[..., n]`."""
        rows = input
        if rows.numel() >= PROMPT_ROWS * self.in_features:
            products = linear(rows.bfloat16(), self.weight).float()
            return products if self.bias is None else products.add_(self.bias)
        if self.in_features % native.COLUMNS == 0 and uses_native("decoder_ops", rows.device):
            return native.linear(rows, self.weight, self.bias)
        return linear(rows, self.weight.float(), self.bias)


def multiplies_in_bfloat16() -> bool:
    """Return whether the processor has instructions for products in bfloat16, as far as torch knows."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def narrow(model: Any) -> None:
    """Make a `NarrowLinear` of each plain linear layer whose weight has only bfloat16 numbers.

    Args: model: in float32 on the CPU, with modules that use weights in linear layers alone.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = module.weight.bfloat16()
            if torch.equal(weight.float(), module.weight):
                module.weight = nn.Parameter(weight, requires_grad=False)
                module.__class__ = NarrowLinear
