"""Row 10: what a decode step does beside attention and matrix products."""

from __future__ import annotations

import torch
from case import Case, Device, Model, tolerance_of

from kvferry.kernels import decoder_ops
from kvferry.kernels.decoder_ops import triton_kernel

VOCABULARY, SMALL_VOCABULARY = 128256, 600
"""Llama's, and one for the interpreter."""


def decoder_cases(model: Model, *, batch_size: int, device: Device, seed: int) -> list[Case]:
    """Norm, rotary positions with and without norms, and SwiGLU's product, at a hidden size of all heads;
    and top_p over a vocabulary."""
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads, head_dim = model.num_kv_heads, model.head_dim
    size = kv_heads * model.group_size * head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(model.dtype)

    hidden, residual, weight = random(batch_size, size), random(batch_size, size), random(size)
    keys, cos, sin = (random(batch_size, num_heads * head_dim) for num_heads in (kv_heads, 1, 1))
    norms = random(head_dim), random(head_dim), 1e-5
    calls = {
        "add_norm": (
            lambda ops: ops(hidden, residual, weight, 1e-5)[1], triton_kernel.add_norm,
            decoder_ops.add_norm_torch, triton_kernel._add_norm_kernel, 4 * hidden.numel() + size,
        ),
        "rotate": (
            lambda ops: ops(hidden, keys, keys, cos, sin, None)[0], triton_kernel.rotate,
            decoder_ops.rotate_torch, triton_kernel._rotate_kernel,
            2 * (hidden.numel() + 2 * keys.numel() + cos.numel()),
        ),
        "rotate after norms": (
            lambda ops: ops(hidden, keys, keys, cos, sin, norms)[0], triton_kernel.rotate,
            decoder_ops.rotate_torch, triton_kernel._rotate_kernel,
            2 * (hidden.numel() + 2 * keys.numel() + cos.numel()),
        ),
        "silu_product": (
            lambda ops: ops(hidden, residual), triton_kernel.silu_product,
            decoder_ops.silu_product_torch, triton_kernel._silu_product_kernel, 3 * hidden.numel(),
        ),
    }  # fmt: skip
    return [
        *(
            Case(
                row=10,
                kernel=name,
                model=model.name,
                shape=f"B={batch_size}",
                num_bytes=elements * hidden.element_size(),
                launch=lambda call=call, launched=launched: call(launched),
                expected=lambda call=call, in_torch=in_torch: call(in_torch).float(),
                tolerance=tolerance_of(model.dtype),
                kernels=(kernel,),
            )
            for name, (call, launched, in_torch, kernel, elements) in calls.items()
        ),
        nucleus_case(model, batch_size=batch_size, device=device, seed=seed),
    ]


def nucleus_case(model: Model, *, batch_size: int, device: Device, seed: int) -> Case:
    """The smallest weight that top_p selects, in 16 launches that read all weights."""
    size = VOCABULARY if device.type == "cuda" else SMALL_VOCABULARY
    generator = torch.Generator(device).manual_seed(seed)
    weights = torch.rand(batch_size, size, generator=generator, dtype=torch.float64, device=device).pow(9)
    goal = 0.9 * weights.sum(1, keepdim=True)
    return Case(
        row=10,
        kernel="nucleus",
        model=model.name,
        shape=f"B={batch_size} V={size}",
        num_bytes=16 * weights.numel() * weights.element_size(),
        launch=lambda: triton_kernel.nucleus(weights, goal),
        expected=lambda: decoder_ops.nucleus_torch(weights, goal).float(),
        tolerance=tolerance_of(torch.float32),
        kernels=(triton_kernel._nucleus_kernel,),
    )
