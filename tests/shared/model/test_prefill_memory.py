"""Prefill holds one layer's K and V at a time, however many layers there are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.shared.model.loading import load_model

NUM_TOKENS = 300
NUM_HISTORY = 120
LayerKV = tuple[Tensor, Tensor]


class LiveStorages:
    """Bytes of tracked storages that are still alive, and their peak."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        return sum(self._sizes.values())

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        weakref.finalize(storage, self._sizes.pop, key, None)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class CountAllocations(TorchDispatchMode):
    """Tracks the storage of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = LiveStorages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, Tensor):
                self.storages.track(value)
        return output


class Counting:
    """An observer that keeps nothing and counts what it was handed that still lives."""

    def __init__(self, history: Callable[[], LayerKV] | None = None) -> None:
        self.storages = LiveStorages()
        self.live_before: list[int] = []
        self._history = history

    def history(self, layer: int) -> LayerKV | None:
        self.live_before.append(self.storages.live_bytes)
        return self._history() if self._history else None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.storages.track(keys)
        self.storages.track(values)


def run(folder: Path, *, num_history: int) -> tuple[int, Counting]:
    """Peak bytes of everything that prefill allocated, and the observer."""
    model = load_model(folder, device="cpu")
    spec = model.spec

    def history() -> LayerKV:
        shape = (spec.num_kv_heads, num_history, spec.head_dim)
        return torch.zeros(shape), torch.zeros(shape)

    observer = Counting(history if num_history else None)
    token_ids = torch.arange(NUM_TOKENS) % 500 + 7
    gc.collect()
    with CountAllocations() as allocations:
        model.prefill(token_ids, start=num_history, observer=observer)
    return allocations.storages.peak_bytes, observer


@pytest.mark.parametrize("num_history", [0, NUM_HISTORY])
def test_peak_memory_does_not_grow_with_the_number_of_layers(
    tiny_model_dir: Callable[[str], Path], num_history: int
) -> None:
    peaks, layer_kv_bytes = {}, 2 * 2 * (num_history + NUM_TOKENS) * 16 * 4
    for num_layers, family in ((2, "llama"), (8, "llama-8-layers")):
        peaks[num_layers], observer = run(tiny_model_dir(family), num_history=num_history)
        assert len(observer.live_before) == num_layers
        # when the next layer's attention begins, nothing handed out for earlier layers is left
        assert observer.live_before == [0] * num_layers
        assert observer.storages.peak_bytes == layer_kv_bytes
        assert observer.storages.live_bytes == 0
    assert peaks[8] > layer_kv_bytes
    assert peaks[8] == peaks[2]


def test_the_count_notices_a_layer_that_is_kept(tiny_model_dir: Callable[[str], Path]) -> None:
    kept: list[Tensor] = []

    class Keeping(Counting):
        def layer_done(
            self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
        ) -> None:
            super().layer_done(layer, queries, keys, values, scaling)
            kept.append(keys)

    peaks = {}
    for num_layers, family in ((2, "llama"), (8, "llama-8-layers")):
        model = load_model(tiny_model_dir(family), device="cpu")
        observer = Keeping()
        with CountAllocations() as allocations:
            model.prefill(torch.arange(7, 7 + NUM_TOKENS), start=0, observer=observer)
        peaks[num_layers] = allocations.storages.peak_bytes
        assert observer.live_before[-1] > 0
        kept.clear()
    assert peaks[8] > peaks[2]
