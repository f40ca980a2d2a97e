"""One kernel at one shape: what to launch, what it must equal, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, Softmax, as_softmax

Device = torch.device


@dataclass(frozen=True, kw_only=True)
class Model:
    """Attention shape of a model."""

    name: str
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16


MODELS = (
    Model(name="Llama-3.1-8B", num_kv_heads=8, group_size=4, head_dim=128),
    Model(name="Qwen3-8B", num_kv_heads=8, group_size=4, head_dim=128),
    Model(name="Mistral-7B", num_kv_heads=8, group_size=4, head_dim=128),
)
TINY = (
    Model(name="tiny-16", num_kv_heads=2, group_size=3, head_dim=64, dtype=torch.float16),
    Model(name="tiny-32", num_kv_heads=1, group_size=4, head_dim=96, dtype=torch.float32),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape.

    Attributes:
        row: its row in the table of targets.
        target: fraction of the copy bandwidth that is aimed at, None where the aim is a time.
        target_us: microseconds aimed at, None where the aim is a fraction.
        num_bytes: what one run must read and write at least.
        flops: multiplications and additions of one run, for a row whose aim is arithmetic.
        launch: runs it once and returns its output.
        checked: runs it once and returns what is compared, where that is more than a launch.
        expected: the reference of that output, float32.
        tolerance: allowed norm of the difference, relative to the reference's norm.
        kernels: the Triton kernels that `launch` launches.
        special: what its layers have beside plain attention to all rows, or what else tells its kernel from
            another of this name; "" for nothing.
        captured: whether a CUDA graph can hold it; else its time has the host's in it.
    """

    row: int
    kernel: str
    model: str
    shape: str
    num_bytes: int
    launch: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    tolerance: float
    kernels: tuple[Any, ...]
    target: float | None = None
    target_us: float | None = None
    flops: int = 0
    captured: bool = True
    checked: Callable[[], Tensor] | None = None
    special: str = ""


def tolerance_of(dtype: torch.dtype) -> float:
    """float32 rounds in its sums only; 16 bits round probabilities and outputs."""
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


def attend_all(queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
    """Softmax attention in float32. Args: `[H, G, D]`, `[H, n, D]`, `[H, n, D]`; sinks `[H, G]`."""
    softmax = as_softmax(scaling)
    logits = softmax.scaling * (queries.float() @ keys.float().mT)
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    if softmax.sinks is not None:
        logits = torch.cat([logits, softmax.sinks.float()[..., None]], dim=-1)
    return torch.softmax(logits, dim=-1)[..., : keys.shape[1]] @ values.float()


def special_softmax(model: Model, device: Device, *, capped: bool, sinks: bool) -> Scaling:
    """The softmax of a model's layers: plain, or with capped logits or sinks of about a row's logit."""
    scale = model.head_dim**-0.5
    if not capped and not sinks:
        return scale
    values = torch.linspace(-2, 2, model.num_kv_heads * model.group_size, device=device).to(model.dtype)
    shape = model.num_kv_heads, model.group_size
    return Softmax(scaling=scale, softcap=2.0 if capped else 0.0, sinks=values.view(shape) if sinks else None)
