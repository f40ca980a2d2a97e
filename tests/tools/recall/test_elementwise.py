"""Training's rotary positions and norm are the textbook's, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.tools.recall.elementwise import rms_norm, rotate


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def angles(num_tokens: int, size: int) -> tuple[Tensor, Tensor]:
    half = draw(2, 1, num_tokens, size // 2, seed=1).detach()
    both = torch.cat([half, half], -1)
    return both.cos(), both.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin, as Llama's own code has it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@pytest.mark.parametrize(("num_heads", "num_tokens", "size"), [(1, 1, 2), (3, 5, 8), (8, 7, 64)])
def test_rotation_and_its_gradient(num_heads: int, num_tokens: int, size: int) -> None:
    x, weight = draw(2, num_heads, num_tokens, size), draw(2, num_heads, num_tokens, size, seed=2).detach()
    cos, sin = angles(num_tokens, size)
    ours, expected = rotate(x, cos, sin), rotated(x, cos, sin)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, x, weight), torch.autograd.grad(expected, x, weight))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 32), (3, 1, 7)])
def test_norm_and_its_gradients(shape: tuple[int, ...]) -> None:
    x, scale, weight = draw(*shape), draw(shape[-1], seed=3), draw(*shape, seed=4).detach()
    ours, expected = rms_norm(x, scale, 1e-5), F.rms_norm(x, shape[-1:], scale, 1e-5)
    torch.testing.assert_close(ours, expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (x, scale), weight),
        torch.autograd.grad(expected, (x, scale), weight),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_norm_in_bf16_is_as_close_to_float32_as_bf16_is() -> None:
    x, scale = draw(4, 9, 256).detach().float(), draw(256, seed=5).detach().float()
    ours = rms_norm(x.bfloat16(), scale, 1e-5)
    assert ours.dtype == torch.bfloat16
    # Three roundings to eight bits: the input's, the scale's and the output's, one more for the root.
    torch.testing.assert_close(ours.float(), F.rms_norm(x, (256,), scale, 1e-5), rtol=4 * 2**-8, atol=1e-6)
