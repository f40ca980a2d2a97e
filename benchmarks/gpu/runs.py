"""A run's parts: kernels checked, kernels timed, tokens, decode, prefill, and what one would run otherwise.

Each has its share of the time, and rows are written as they are measured. What there is no time for is listed
as skipped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    path_problems,
    speedups,
)
from op_check_cases import NAMES, TINY_NAMES, op_check_row, op_check_shape
from peer_cases import TINY_WAYS, WAYS, PeerBench
from prefill_cases import PrefillBench, prefill_methods
from record import Record
from same_tokens import METHODS, PREFILLS, TokenComparison
from same_tokens import problems as token_problems
from shapes import SHAPES, TINY_SHAPES
from time_limit import TimeLimit
from timing import Clock, smallest_launch_us

from kvferry.kernels.cases import op_checks
from kvferry.kernels.dispatch import TRITON_OPS
from kvferry.kernels.quarantine import Quarantined
from kvferry.shared.model.bridge import TransformersModel
from kvferry.tools.kernel_cache.random_model import random_model
from kvferry.tools.kernel_cache.shapes import SHIPPED, Shape

PREFILL_TOKENS = 32768
TINY_PREFILL_TOKENS = 48
TOKENS, TINY_TOKENS = 32, 2
"""Compared for each method."""
SHARES = {"op_checks": 20, "kernels": 45, "tokens": 15, "decode": 30, "prefill": 10, "peers": 20}
"""Of the time that a run's parts have together."""
FIRST_MODEL_SHARE = 0.7
"""Of the time of several models, for the one that has the whole grid."""
CASE_SHARE = 0.1
"""Of what is left for decode, that one case's steps may take."""
MIN_CASE_S = 4.0
"""What a case is not begun without."""
_Row = dict[str, Any]
_Profile = Callable[[], list[_Row]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run measures. Attributes: models, methods, cells: those of every part where empty; cells: batch
    and context."""

    seed: int
    is_tiny: bool = False
    models: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    cells: tuple[tuple[int, int], ...] = ()


class Run:
    """Args: record: gets the rows and failures; clock: of the device."""

    def __init__(self, record: Record, clock: Clock, limit: TimeLimit, options: Options) -> None:
        self._record = record
        self._clock = clock
        self._limit = limit
        self._options = options

    def run(self, names: Sequence[str]) -> None:
        """Run parts, each with its share of the time that is left when it begins."""
        of_models = tuple(name for name in ("decode", "prefill") if name in names)
        parts: list[tuple[tuple[str, ...], Callable[[float], None]]] = [
            (("op_checks",), self.op_checks),
            (("kernels",), self.kernels),
            (("tokens",), self.tokens),
            (of_models, partial(self.end_to_end, of_models)),
            (("peers",), self.peers),
        ]
        parts = [part for part in parts if part[0] and set(part[0]) <= set(names)]
        weights = [sum(SHARES[name] for name in of_part) for of_part, _ in parts]
        for number, (of_part, run) in enumerate(parts):
            later = sum(weights[number + 1 :]) / sum(weights[number:])
            try:
                run(later * self._limit.left_s)
            except Exception as error:  # a fault of the device stays: what is measured by then is written
                self._record.fail(" and ".join(of_part), error)

    def quarantined(self, entry: Quarantined) -> None:
        """Note that a kernel is not used any more."""
        self._record.fail(f"{entry.op} is quarantined: {entry.reason}: {entry.detail}")

    def op_checks(self, leave_s: float) -> None:
        """The self-test's cases. Args: leave_s: of the run's time, for the parts after this one; as below."""
        shapes = _named("models", self._options.models, TINY_NAMES if self._options.is_tiny else NAMES)
        cases = (
            ({"shape": shape, "op": op, "case": check.name}, partial(op_check_row, shape, check, self._clock))
            for shape in shapes
            for op in TRITON_OPS
            for check in op_checks(op, op_check_shape(shape, self._clock.device))
        )
        self._measured(
            "op_checks", cases, leave_s=leave_s, problems=lambda row: filter(None, [row["problem"]])
        )

    def kernels(self, leave_s: float) -> None:
        """Every kernel against its reference, then against the clock."""
        peaks = {
            "copy_bytes_per_s": self._clock.copy_bytes_per_s(),
            "bf16_flops_per_s": self._clock.bf16_flops_per_s(),
        }
        self._record.fields |= {**peaks, "smallest_launch_us": smallest_launch_us(self._clock)}
        for model, make in self._kernel_cases():
            if self._limit.left_s <= leave_s:
                self._record.add("kernels", {"model": model, "skipped": "no time left"})
                continue
            try:
                for case in make():
                    self._record.add("kernels", self._timed(case, **peaks))
            except Exception as error:  # one kernel's failure is a row, and the run's status
                self._record.add("kernels", {"model": model, "skipped": f"{type(error).__name__}: {error}"})
                self._record.fail(f"a kernel of {model}", error)
            self._tidy()

    def _timed(self, case: Case, *, copy_bytes_per_s: float, bf16_flops_per_s: float) -> _Row:
        row = checked(case)
        if row["error"] > row["tolerance"]:
            error = f"error {row['error']:.2e}, allowed {row['tolerance']:.0e}, seed {self._options.seed}"
            self._record.fail(f"{row['kernel']} {row['model']} {row['shape']}: {error}")
            return row
        seconds = 1e-6 * self._clock.launch_us(case.launch, captured=case.captured)
        return {
            **row,
            "time_us": 1e6 * seconds,
            "bandwidth_fraction": case.num_bytes / seconds / copy_bytes_per_s,
            "flops_fraction": case.flops / seconds / bf16_flops_per_s,
        }

    def tokens(self, leave_s: float) -> None:
        """The demo model's tokens on the device against the CPU's."""
        comparison = TokenComparison(self._clock, TINY_TOKENS if self._options.is_tiny else TOKENS)
        cases = [
            ({"method": method, "prefill": prefill}, partial(comparison.compare, method, prefill))
            for method in _named("methods", self._options.methods, METHODS)
            for prefill in PREFILLS
        ]
        self._measured("tokens", cases, leave_s=leave_s, problems=token_problems)

    def end_to_end(self, parts: Sequence[str], leave_s: float) -> None:
        """Whole steps, whole prompts or both, of every model: the first on the whole grid, others on less."""
        shapes = self._shapes()
        later_s = (1 - FIRST_MODEL_SHARE) * (self._limit.left_s - leave_s)
        for number, shape in enumerate(shapes):
            grid = self._grid(is_first=number == 0, decodes="decode" in parts)
            until_s = leave_s + later_s * (len(shapes) - 1 - number) / max(len(shapes) - 1, 1)
            longest = max(PREFILL_TOKENS, *(context + grid.max_steps + 16 for _, context in grid.cells))
            model = random_model(
                shape, self._clock.device, max_model_len=256 if self._options.is_tiny else longest
            )
            if "decode" in parts:
                share = SHARES["prefill"] / sum(SHARES[part] for part in parts) if "prefill" in parts else 0.0
                self._decode(model, grid, until_s + share * (self._limit.left_s - until_s))
            if "prefill" in parts:
                self._prefill(model, until_s)
            del model
            self._tidy()

    def _shapes(self) -> list[Shape]:
        known = TINY_SHAPES if self._options.is_tiny else SHAPES
        if not self._options.models:
            return list(known)
        by_name = {shape.name: shape for shape in known} if self._options.is_tiny else SHIPPED
        return [by_name[name] for name in _named("models", self._options.models, tuple(by_name))]

    def _grid(self, *, is_first: bool, decodes: bool) -> Grid:
        whole, beside = (
            (TINY_GRID, TINY_GRID_BESIDE) if self._options.is_tiny else (GPU_GRID, GPU_GRID_BESIDE)
        )
        grid = whole if is_first else beside
        methods = grid.methods
        if decodes:
            names = _named("methods", self._options.methods, tuple(method.name for method in methods))
            methods = tuple(method for method in methods if method.name in names)
        return replace(grid, methods=methods, cells=self._options.cells or grid.cells)

    def _decode(self, model: TransformersModel, grid: Grid, leave_s: float) -> None:
        bench = DecodeBench(model, self._clock, grid, self._options.seed)

        def measure(case: DecodeCase) -> _Row:
            row = bench.measure(case, CASE_SHARE * (self._limit.left_s - leave_s))
            speedups([*self._record.table("decode"), row])
            return row

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
        self._measured("decode", cases, leave_s=leave_s, problems=path_problems, profile=bench.profile)

    def _prefill(self, model: TransformersModel, leave_s: float) -> None:
        tiny = self._options.is_tiny
        num_tokens = TINY_PREFILL_TOKENS if tiny else PREFILL_TOKENS
        bench = PrefillBench(model, self._clock, num_tokens, self._options.seed)
        known = prefill_methods(16, widths_window=4) if tiny else prefill_methods(512)
        methods = {method.name: method for method in known}
        cases = [
            (
                {"model": model.spec.name, "method": name, "tokens": num_tokens},
                partial(bench.measure, methods[name]),
            )
            for name in _named("methods", self._options.methods, tuple(methods))
        ]
        self._measured("prefill", cases, leave_s=leave_s, profile=bench.profile)

    def peers(self, leave_s: float) -> None:
        """transformers' own steps."""
        tiny = self._options.is_tiny
        for shape in self._shapes()[:1]:
            num_tokens = TINY_PREFILL_TOKENS if tiny else PREFILL_TOKENS
            bench = PeerBench(shape, self._clock, num_tokens, self._options.seed)
            cases = [
                ({"model": shape.name, "way": way, "tokens": num_tokens}, partial(bench.measure, way))
                for way in (TINY_WAYS if tiny else WAYS)
            ]
            self._measured("peers", cases, leave_s=leave_s)

    def _measured(
        self,
        table: str,
        cases: Iterable[tuple[_Row, Callable[[], _Row]]],
        *,
        leave_s: float,
        problems: Callable[[_Row], Iterable[str]] = lambda row: (),
        profile: _Profile | None = None,
    ) -> None:
        """Add a row for each case: its own, or why there is none. Args: profile: of the last case's work."""
        for name, measure in cases:
            if self._limit.left_s - leave_s < MIN_CASE_S:
                self._record.add(table, {**name, "skipped": "no time left"})
                continue
            row = self._attempted(name, measure)
            self._record.add(table, row)
            if "skipped" not in row:
                for problem in problems(row):
                    self._record.fail(f"{_said(name)}: {problem}")
                if profile is not None:
                    self._attempted(name, partial(self._profiled, f"{table}_profiles", name, profile))
            self._tidy()

    def _attempted(self, name: _Row, measure: Callable[[], _Row]) -> _Row:
        try:
            return measure()
        except torch.cuda.OutOfMemoryError:
            return {**name, "skipped": "out of memory"}
        except Exception as error:  # one case's failure is a row, and the run's status
            self._record.fail(_said(name), error)
            return {**name, "skipped": f"{type(error).__name__}: {error}"}

    def _profiled(self, table: str, name: _Row, profile: _Profile) -> _Row:
        self._record.add(table, *({**name, **row} for row in profile()))
        return {}

    def _kernel_cases(self) -> list[tuple[str, Callable[[], list[Case]]]]:
        """Cases with their models' names: models of one attention shape share them."""
        device = self._clock.device
        if self._options.is_tiny:
            return [("tiny", lambda: tiny_cases(device, self._options.seed))]
        by_shape: dict[Model, list[str]] = {}
        for model in MODELS:
            by_shape.setdefault(replace(model, name=""), []).append(model.name)
        return [
            (name, make)
            for shape, names in by_shape.items()
            for name in [", ".join(names)]
            for make in gpu_cases(device, self._options.seed, replace(shape, name=name))
        ]

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


def _named(option: str, names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return the names that are known, all of them where none is given, in the known order.

    Raises: ValueError: one is not known.
    """
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{option} has {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    return [name for name in known if name in names] if names else known


def _said(name: _Row) -> str:
    return " ".join(str(value) for value in name.values())
