"""What a decode step does beside attention and matrix products: three launches a layer, and top_p.

Called by `shared/model/fused_decode.py` and `shared/sampling/truncation.py`. Each op of a layer rounds where
transformers' modules round, so that results differ from theirs by the order of a norm's sum alone.

Legend: B rows (one token each), N hidden size, H query heads, H_kv KV heads, D head_dim.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kvferry.kernels.dispatch import launch, planned_path
from kvferry.kernels.quarantine import attempt

T = TypeVar("T")


def _run(name: str, device: torch.device, in_torch: partial[T]) -> T:
    """Run an op without counting it: a step counts one call of all of them (`TransformersModel.decode`)."""
    if planned_path("decoder_ops", device) in ("torch", "native"):
        return in_torch()
    return attempt("decoder_ops", lambda: launch(f"decoder_ops.triton_kernel.{name}", in_torch), in_torch)


def add_norm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `residual + hidden`, and its RMSNorm.

    Args: hidden, residual: `[B, N]`, contiguous; residual None: nothing is added. weight: `[N]`.
    Returns: the sum, and the norm.
    """
    return _run("add_norm", hidden.device, partial(add_norm_torch, hidden, residual, weight, eps))


def add_norm_torch(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = hidden if residual is None else residual + hidden
    return total, rms_norm(total, weight, eps)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute transformers' LlamaRMSNorm."""
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(rows.dtype)


def rotate(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply rotary positions to one token's queries and keys, after an RMSNorm of each head if there is one.

    Args:
        queries: `[B, H D]`; keys, values `[B, H_kv D]`. A row may be a part of a longer one.
        cos, sin: `[B, D]`, of the queries' dtype.
        norms: weights `[D]` of the queries' and the keys' norm, and their eps.

    Returns: `[B, H, D]`, and `[B, H_kv, D]` of keys and of values as they are; contiguous.
    """
    return _run("rotate", queries.device, partial(rotate_torch, queries, keys, values, cos, sin, norms))


def rotate_torch(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rotated = []
    for i, rows in enumerate((queries, keys)):
        heads = rows.reshape(len(rows), -1, cos.shape[1])
        if norms is not None:
            heads = rms_norm(heads, norms[0] if i == 0 else norms[1], norms[2])
        first, second = heads.chunk(2, dim=-1)
        half = torch.cat([-second, first], -1)
        rotated.append(heads * cos[:, None] + half * sin[:, None])
    return rotated[0], rotated[1], values.reshape(len(values), -1, cos.shape[1]).contiguous()


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`. Args: `[B, n]`; a row may be a part of a longer one."""
    return _run("silu_product", gate.device, partial(silu_product_torch, gate, up))


def silu_product_torch(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def nucleus(weights: Tensor, goal: Tensor) -> Tensor:
    """Find the smallest weight that top_p selects, without sorting: the smallest number such that the weights
    above it sum to less than the goal.

    Args: weights: float64 `[B, V]`, contiguous, at least 0; goal: float64 `[B, 1]`, above 0.
    Returns: float64 `[B, 1]`; any number for a row with weights that are not finite.
    """
    return _run("nucleus", weights.device, partial(nucleus_torch, weights, goal))


def nucleus_torch(weights: Tensor, goal: Tensor) -> Tensor:
    """Compute `nucleus` in torch, by sorting."""
    ordered = weights.sort(dim=1, descending=True).values
    before = ordered.cumsum(1) - ordered
    number = (before < goal).sum(1, keepdim=True).clamp(min=1)
    return ordered.gather(1, number - 1)
