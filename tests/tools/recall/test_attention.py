"""Training's CPU attention gives the outputs and gradients of torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.tools.recall.attention import causal_attention


def reference(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (3, 3), (5, 1)])
def test_outputs_and_gradients_are_those_of_dense_attention(
    num_tokens: int, heads: int, kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(num_heads: int) -> Tensor:
        # As the projections give it: heads and tokens swapped in memory.
        x = torch.randn(2, num_tokens, num_heads, 16, generator=generator, dtype=torch.float64)
        return x.transpose(1, 2).requires_grad_()

    inputs, weight = (draw(heads), draw(kv_heads), draw(kv_heads)), draw(heads).detach()
    ours, expected = causal_attention(*inputs), reference(*inputs)
    torch.testing.assert_close(ours, expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        # Keys' and values' gradients are summed in float32.
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_in_bf16_it_is_as_close_to_float32_as_torch_is() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(1, h, 400, 64, generator=generator) for h in (8, 2, 2))
    exact = reference(queries, keys, values)
    rounded = [x.bfloat16() for x in (queries, keys, values)]
    ours = (causal_attention(*rounded).float() - exact).abs().max()
    theirs = (reference(*rounded).float() - exact).abs().max()
    assert ours <= 2 * theirs
