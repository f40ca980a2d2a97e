"""A kernel is compiled once, whatever the lengths: what it is specialised for does not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.kernels import attention_mass
from kvferry.kernels.column_sums import window_scores
from kvferry.kernels.packed.packing import pack_layer
from kvferry.kernels.trizone import triton_kernel, trizone_decode_segments

pytestmark = pytest.mark.usefixtures("interpreter")


class Recorder:
    """Takes a kernel's place, and records what it is specialised for."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.constants: list[dict[str, object]] = []
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launch(*args: object, **constants: object) -> object:
            self.constants.append(constants)
            self.grids.append(grid)
            return self._kernel[grid](*args, **constants)

        return launch


def test_trizone_is_one_kernel_for_any_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(triton_kernel._trizone_kernel)
    monkeypatch.setattr(triton_kernel, "_trizone_kernel", recorder)
    monkeypatch.setattr(triton_kernel, "choose_num_splits", lambda heads, device: 64)
    for length in (5, 300, 4000):
        keys, values = torch.randn(2, 1, length, 16)
        bits = [torch.full((1, units), 4, dtype=torch.uint8) for units in (16, length)]
        trizone_decode_segments(
            torch.randn(1, 2, 16), [pack_layer(keys, values, *bits)], *torch.randn(2, 1, 3, 16), scaling=0.3
        )
    assert len(set(recorder.grids)) > 1
    assert all(constants == recorder.constants[0] for constants in recorder.constants)


def test_column_sums_are_one_kernel_for_any_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(attention_mass._row_lse_kernel)
    monkeypatch.setattr(attention_mass, "_row_lse_kernel", recorder)
    results = []
    queries, keys = torch.randn(1, 2, 8, 16), torch.randn(1, 1000, 16)
    for splits in (1, 3, 40):
        monkeypatch.setattr(attention_mass, "choose_num_splits", lambda heads, device, n=splits: n)
        results.append(window_scores(queries, keys, scaling=0.3))
    assert len(set(recorder.grids)) == 3
    assert all(constants == recorder.constants[0] for constants in recorder.constants)
    for result in results:
        torch.testing.assert_close(result, results[0])
