"""A layer is compressed behind the pass that made it: the host waits for no value of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvtest.compression import make_spec
from kvtest.counted_device import Counting, on_device
from kvtest.methods import PRESETS
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.shared.compression.compress import measure_layer
from kvferry.shared.compression.formats import encode_layer, make_formats
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, is_measured
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan

WAITING = {"adakv"}
"""Its heads have different numbers of rows, which the host must know."""
UNCOUNTED = {"kivi", "snapkv-kivi"}
"""Triton's interpreter cannot be given counted tensors there."""
NUM_TOKENS, HEAD_DIM = 200, 64


@pytest.fixture
def triton_path() -> Iterator[None]:
    dispatch.configure("triton", torch.device("cpu"))
    yield
    dispatch.configure("auto", torch.device("cpu"))


@torch.no_grad()
@pytest.mark.usefixtures("triton_path")
@pytest.mark.parametrize("method", [name for name in PRESETS if name not in WAITING | UNCOUNTED])
def test_a_layer_is_compressed_without_a_wait(method: str) -> None:
    spec = make_spec(num_layers=4, head_dim=HEAD_DIM)
    budget = None if method in ("full", "think") else Budget(tokens=40)
    resolved = resolve_plan(
        plan_for(method, budget=budget),
        num_prompt_tokens=NUM_TOKENS,
        max_new_tokens=8,
        num_layers=4,
        head_dim=HEAD_DIM,
    )
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 2, NUM_TOKENS, HEAD_DIM), *((2, NUM_TOKENS, HEAD_DIM),) * 2)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]

    def compress() -> Counting:
        queries, keys, values = on_device(*tensors)
        with Counting() as counted:
            inputs = LayerInputs(
                layer=1, queries=queries, keys=keys, values=values, scaling=0.1, unrotate=Tensor.clone,
                repeated=keys.norm(dim=2),
            )  # fmt: skip
            if is_measured(resolved):
                measure_layer(resolved, inputs)
            else:
                encode_layer(resolved, make_formats(spec, resolved)[1], inputs)
        return counted

    compress()  # constants are copied to the device once
    counted = compress()
    assert not counted.reads
    assert counted.launches or method in ("full", "exact-topk", "quest", "sparq", "kvzip", "keydiff")
