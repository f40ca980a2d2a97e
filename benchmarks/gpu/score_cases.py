"""Rows 5 and 8: scores of a prompt's tokens."""

from __future__ import annotations

import torch
from case import Case, Device, Model

from kvferry.kernels import attention_mass
from kvferry.kernels.chunk_scores import chunk_scores_torch
from kvferry.kernels.chunk_scores import triton_kernel as chunk_scores
from kvferry.kernels.column_sums import column_sums_torch


def window_case(
    model: Model, *, window: int, length: int, device: Device, seed: int, target: float | None
) -> Case:
    """Row 5: window scores of one prompt."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (model.num_kv_heads, model.group_size, window, model.head_dim)
    queries = torch.randn(shape, generator=generator, device=device).to(model.dtype)
    keys = torch.randn(model.num_kv_heads, length, model.head_dim, generator=generator, device=device)
    keys = keys.to(model.dtype)
    scaling = model.head_dim**-0.5
    return Case(
        row=5,
        kernel="window_scores",
        model=model.name,
        shape=f"T={length} W={window}",
        num_bytes=2 * keys.numel() * keys.element_size() + model.num_kv_heads * length * 4,
        launch=lambda: attention_mass.attention_mass(queries, keys, scaling=scaling, per_query_head=False),
        expected=lambda: column_sums_torch(queries, keys, scaling).sums,
        tolerance=1e-3,
        kernels=(attention_mass._row_lse_kernel, attention_mass._column_sums_kernel),
        target=target,
    )


def chunk_case(model: Model, *, chunk: int, length: int, device: Device, seed: int) -> Case:
    """Row 8: Compactor's column sums, bound by arithmetic: four products of Q and K."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (model.num_kv_heads, model.group_size, length, model.head_dim)
    queries = torch.randn(shape, generator=generator, device=device).to(model.dtype)
    keys = torch.randn(shape[0], length, model.head_dim, generator=generator, device=device).to(model.dtype)
    scaling = model.head_dim**-0.5
    return Case(
        row=8,
        kernel="chunk_scores",
        model=model.name,
        shape=f"T={length} chunk={chunk}",
        num_bytes=(queries.numel() + keys.numel()) * keys.element_size(),
        flops=4 * queries.numel() * chunk,
        launch=lambda: chunk_scores.chunk_scores(
            queries, keys, chunk_tokens=chunk, scaling=scaling, shared=False
        ),
        expected=lambda: chunk_scores_torch(queries, keys, chunk, scaling),
        tolerance=1e-3,
        kernels=(chunk_scores._chunk_scores_kernel,),
        target=0.40,
    )
