"""Compiles the kernels of one model's shape for one GPU, by the calls that a worker makes before it serves.

    self-test's cases of both roles ──► prefill's warm-up ──► decode's warm-up ──► launchers
                 nothing is launched: a rehearsal compiles each launch (`rehearsal.py`)

The model has one layer of random weights: all layers with equal heads have the same kernels.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import get_args

import torch

from kvferry.kernels import dispatch
from kvferry.kernels.cases import op_checks
from kvferry.services.decode.slots import StepRunner
from kvferry.services.decode.warm_up import warm_up_steps
from kvferry.shared.cache.arena import ByteArena
from kvferry.shared.device.kernel_paths import Role
from kvferry.shared.device.self_test import model_shapes, ops_with_kernels
from kvferry.shared.device.step_device import StepDevice
from kvferry.shared.device.warm_up import warm_prefill
from kvferry.shared.model.interface import LanguageModel
from kvferry.tools.kernel_cache.launchers import build_launchers
from kvferry.tools.kernel_cache.random_model import random_model
from kvferry.tools.kernel_cache.rehearsal import GPUS, rehearsal
from kvferry.tools.kernel_cache.shapes import SHIPPED, Shape

MAX_BATCH_SIZE = 16
"""Sizes of batches and heads together fall into the classes that a kernel is compiled for: 1, and whether 16
divides them. Larger batches have none of their own."""
MAX_MODEL_LEN = 131072
_VOCAB_SIZE = 64
_ARENA_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Of one shape and GPU. Attributes: num_launchers: built by the C compiler."""

    shape: str
    architecture: str
    num_kernels: int
    num_launchers: int
    seconds: float


def compile_shape(name: str, architecture: str, *, only: str = "") -> Compiled:
    """Fill Triton's cache (TRITON_CACHE_DIR). Args: name: of `SHIPPED`; architecture: such as sm_90.

    Raises: whatever the compiler raises where a kernel does not compile.
    """
    begin_s = time.monotonic()
    model = random_model(small(SHIPPED[name]), torch.device("cpu"), max_model_len=MAX_MODEL_LEN)
    with rehearsal(GPUS[architecture], only=only) as compiled, torch.inference_mode():
        rehearse_worker(model)
    num_launchers = build_launchers(compiled)
    return Compiled(
        shape=name, architecture=architecture, num_kernels=len(compiled), num_launchers=num_launchers,
        seconds=time.monotonic() - begin_s,
    )  # fmt: skip


def small(shape: Shape) -> Shape:
    """Return a shape with what its kernels depend on, and little else: one layer, a short MLP, few tokens."""
    return replace(shape, num_layers=1, intermediate_size=16, vocab_size=_VOCAB_SIZE)


def rehearse_worker(model: LanguageModel) -> None:
    """Call all that a prefill and a decode worker call before they are ready; in a rehearsal."""
    if dispatch.mode() == "torch":
        raise ValueError("kernels is 'torch'; it must be 'auto' or 'triton' to compile anything")
    for shape in model_shapes(model.spec, model.device):
        for role in get_args(Role):
            for op in ops_with_kernels(role, shape):
                for case in op_checks(op, shape):
                    case.launch()
    warm_prefill(model, _silent)
    runner = StepRunner(model, StepDevice(), max_batch_size=MAX_BATCH_SIZE, warn=_refuse)
    arena = ByteArena(_ARENA_BYTES, model.device)
    warm_up_steps(model, [runner], arena, max_batch_size=MAX_BATCH_SIZE, progress=_silent)


def _silent(done: float, what: str) -> None:
    """Ignore progress, which a worker shows in a metric."""


def _refuse(reason: str) -> None:
    raise RuntimeError(f"a step cannot be rehearsed: {reason}")
