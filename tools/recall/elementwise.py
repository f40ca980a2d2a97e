"""Rotary positions and RMS norm for training the demo model, in as few passes over memory as torch allows.

A CPU with matrix units spends more of a step on these than on matrix products: torch composes each from a
dozen operations, and from as many in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x `[B, H, T, D]` by angles whose cosines and sines are `[B, 1, T, D]`, both halves alike."""
    out: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x `[..., D]` by its root mean square along D, and multiply by weight `[D]`, in x's dtype."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _Rotation(torch.autograd.Function):
    """The gradient is the opposite rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out, sin = x * cos, sin[..., :half]
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=weight.dtype)
        inverse = (norm.square() / x.shape[-1] + eps).rsqrt().to(x.dtype)
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        out: Tensor = normed * weight.to(x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        (wanted,), scale = gradients, weight.to(normed.dtype)
        products = wanted * normed
        d_weight = products.flatten(0, -2).sum(0, dtype=weight.dtype)
        # d(x / |x|): the part of the gradient along x itself is taken out.
        along = (products @ scale / normed.shape[-1])[..., None]
        return torch.addcmul(wanted * scale, normed, along, value=-1).mul_(inverse), d_weight, None
