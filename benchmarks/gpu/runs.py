"""A run's parts, in the order of what matters: kernels checked, kernels timed, decode, prefill.

Each row is saved as soon as it is measured. What there is no time for is listed as skipped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from case import MODELS, Case, Model
from cases import gpu_cases, tiny_cases
from decode_cases import (
    GPU_GRID,
    GPU_GRID_BESIDE,
    TINY_GRID,
    TINY_GRID_BESIDE,
    DecodeBench,
    DecodeCase,
    Grid,
    Method,
    speedups,
)
from prefill_cases import PrefillBench
from same_tokens import METHODS, PREFILLS, TINY_METHODS, TokenComparison, is_tie
from shapes import SHAPES, TINY_SHAPES
from time_limit import TimeLimit
from timing import Clock, smallest_launch_us

from kvferry.shared.model.bridge import TransformersModel
from kvferry.tools.kernel_cache.random_model import random_model

PREFILL_TOKENS = 32768
TINY_PREFILL_TOKENS = 48
TOKENS, TINY_TOKENS = 32, 2
"""Compared for each method."""
KERNEL_SHARE = 0.45
"""Of the run's time."""
FIRST_MODEL_SHARE = 0.7
"""Of the time that kernels and tokens leave, for the model that has the whole grid."""
DECODE_SHARE = 0.75
"""Of a model's time."""
CASE_SHARE = 0.1
"""Of what is left for decode, that one case's steps may take."""
MIN_CASE_S = 4.0
"""What a case is not begun without."""


class Run:
    """Args: result: rows are added to its lists; clock: of the device."""

    def __init__(
        self, result: dict[str, Any], clock: Clock, limit: TimeLimit, seed: int, *, tiny: bool
    ) -> None:
        self._result = result
        self._clock = clock
        self._limit = limit
        self._seed = seed
        self._tiny = tiny

    def kernels(self) -> None:
        """Every kernel against its reference, then against the clock."""
        rows = self._result.setdefault("kernels", [])
        peaks = {
            "copy_bytes_per_s": self._clock.copy_bytes_per_s(),
            "bf16_flops_per_s": self._clock.bf16_flops_per_s(),
        }
        self._result |= {**peaks, "smallest_launch_us": smallest_launch_us(self._clock)}
        leave_s = (1 - KERNEL_SHARE) * self._limit.left_s
        for model, make in self._kernel_cases():
            if self._limit.left_s < leave_s:
                rows.append({"model": model, "skipped": "no time left"})
                continue
            try:
                for case in make():
                    rows.append(self._timed(case, **peaks))
            except Exception as error:  # one kernel's failure is a row, and the run's status
                rows.append({"model": model, "skipped": f"{type(error).__name__}: {error}"})
                self._fail(f"a kernel of {model}: {type(error).__name__}: {error}")
            self._tidy()

    def _timed(self, case: Case, *, copy_bytes_per_s: float, bf16_flops_per_s: float) -> dict[str, Any]:
        row = checked(case)
        if row["error"] > row["tolerance"]:
            error = f"error {row['error']:.2e}, allowed {row['tolerance']:.0e}, seed {self._seed}"
            self._fail(f"{row['kernel']} {row['model']} {row['shape']}: {error}")
            return row
        seconds = 1e-6 * self._clock.launch_us(case.launch, captured=case.captured)
        return {
            **row,
            "time_us": 1e6 * seconds,
            "bandwidth_fraction": case.num_bytes / seconds / copy_bytes_per_s,
            "flops_fraction": case.flops / seconds / bf16_flops_per_s,
        }

    def tokens(self) -> None:
        """The demo model's tokens on the device against the CPU's."""
        comparison = TokenComparison(self._clock, TINY_TOKENS if self._tiny else TOKENS)
        methods = TINY_METHODS if self._tiny else METHODS
        rows = self._result.setdefault("tokens", [])
        cases = [
            ({"method": method, "prefill": prefill}, partial(comparison.compare, method, prefill))
            for method in methods
            for prefill in PREFILLS
        ]
        self._measured(rows, cases, leave_s=0.0)
        for row in rows:
            if "skipped" not in row and not is_tie(row):
                self._fail(
                    f"{row['method']}, prompt run by {row['prefill']}: tokens part at {row['parted_at']}, "
                    f"logits {row['gap']:.1e} apart"
                )

    def end_to_end(self) -> None:
        """Whole steps and whole prompts, of every model: the first on the whole grid, others on a part."""
        shapes = TINY_SHAPES if self._tiny else SHAPES
        whole, beside = (TINY_GRID, TINY_GRID_BESIDE) if self._tiny else (GPU_GRID, GPU_GRID_BESIDE)
        later_s = (1 - FIRST_MODEL_SHARE) * self._limit.left_s
        for index, shape in enumerate(shapes):
            grid: Grid = beside if index else whole
            left = len(shapes) - 1 - index
            leave_s = later_s * left / (len(shapes) - 1)
            longest = max(grid.contexts) + grid.max_steps + 8
            model = random_model(shape, self._clock.device, max_model_len=max(longest, 256))
            self._decode(model, grid, leave_s)
            methods = [method for method in grid.methods if method.rows is not None]
            self._prefill(model, methods, leave_s)
            del model
            self._tidy()

    def _decode(self, model: TransformersModel, grid: Grid, leave_s: float) -> None:
        """Args: leave_s: of the run's time, for what comes after this model."""
        bench = DecodeBench(model, self._clock, grid, self._seed)
        rows = self._result.setdefault("decode", [])
        leave_s += (1 - DECODE_SHARE) * (self._limit.left_s - leave_s)

        def measure(case: DecodeCase) -> dict[str, Any]:
            return bench.measure(case, CASE_SHARE * (self._limit.left_s - leave_s))

        cases = [
            (
                {
                    "model": model.spec.name,
                    "method": case.method.name,
                    "context": case.context,
                    "batch": case.batch_size or "largest",
                },
                partial(measure, case),
            )
            for case in grid.cases()
        ]
        self._measured(rows, cases, leave_s=leave_s)
        speedups(rows)

    def _prefill(self, model: TransformersModel, methods: Sequence[Method], leave_s: float) -> None:
        num_tokens = TINY_PREFILL_TOKENS if self._tiny else PREFILL_TOKENS
        bench = PrefillBench(model, self._clock, num_tokens, self._seed)
        cases = [
            (
                {"model": model.spec.name, "method": method.name, "tokens": num_tokens},
                partial(bench.measure, method),
            )
            for method in methods
        ]
        self._measured(self._result.setdefault("prefill", []), cases, leave_s=leave_s)

    def _measured(
        self,
        rows: list[dict[str, Any]],
        cases: Iterable[tuple[dict[str, Any], Callable[[], dict[str, Any]]]],
        *,
        leave_s: float,
    ) -> None:
        """Add a row for each case: its own, or why there is none."""
        for name, measure in cases:
            if self._limit.left_s - leave_s < MIN_CASE_S:
                rows.append({**name, "skipped": "no time left"})
                continue
            try:
                rows.append(measure())
            except torch.cuda.OutOfMemoryError:
                rows.append({**name, "skipped": "out of memory"})
            except Exception as error:  # one case's failure is a row, and the run's status
                rows.append({**name, "skipped": f"{type(error).__name__}: {error}"})
                self._fail(f"{name}: {type(error).__name__}: {error}")
            self._tidy()

    def _kernel_cases(self) -> list[tuple[str, Callable[[], list[Case]]]]:
        """Cases with their models' names: models of one attention shape share them."""
        device = self._clock.device
        if self._tiny:
            return [("tiny", lambda: tiny_cases(device, self._seed))]
        by_shape: dict[Model, list[str]] = {}
        for model in MODELS:
            by_shape.setdefault(replace(model, name=""), []).append(model.name)
        return [
            (name, make)
            for shape, names in by_shape.items()
            for name in [", ".join(names)]
            for make in gpu_cases(device, self._seed, replace(shape, name=name))
        ]

    def _fail(self, what: str) -> None:
        self._result["failures"].append(what)

    def _tidy(self) -> None:
        gc.collect()
        if self._clock.device.type == "cuda":
            with suppress(RuntimeError):  # of a fault that the case has told already
                torch.cuda.empty_cache()


def checked(case: Case) -> dict[str, Any]:
    """A case's row with its error against the reference, relative to the reference's norm."""
    result, expected = (case.checked or case.launch)().float(), case.expected().float()
    error = float((result - expected).norm() / expected.norm())
    row = {name: getattr(case, name) for name in ("row", "kernel", "model", "shape", "num_bytes")}
    return {
        **row,
        # NaN compares as neither less nor more
        "error": error if error == error else float("inf"),
        "tolerance": case.tolerance,
        "target": case.target,
        "target_us": case.target_us,
    }
