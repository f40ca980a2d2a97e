"""Decode end to end: milliseconds a token and memory of whole steps, by method, context and batch.

A step is the decode service's own (`services/decode/step.py`): the whole model, attention to caches
in one arena, sampling, captured where that can be. Caches are filled with random rows in the method's own
layout; packed prompts are packed once, from random K and V, by the method itself. Prefill is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from timing import Clock
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvferry.services.decode.slots import StepRunner
from kvferry.services.decode.step import LaunchedStep, StepInput
from kvferry.shared.cache.arena import LayerLayout, SequenceLayout, sequence_layout
from kvferry.shared.compression.formats import compress_layer, make_formats
from kvferry.shared.compression.formats.evicting import Evicting
from kvferry.shared.compression.formats.interface import LayerCache, Tensors
from kvferry.shared.compression.formats.kivi import Kivi
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, CompressionPlan, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.sampling.sampler import SequenceSampler

WARM_UP_STEPS = 3
PROFILED_STEPS = 3
STEP_TIMEOUT_S = 120.0
SDPA = "full (torch SDPA)"
EAGER = ("rdkv-hsa", "rocketkv-kivi", "h2o", "d2o")
"""Methods whose attention has no kernel for a batch: their steps cannot be captured, and all others' are."""
LARGEST = 0
"""In place of a batch size: the largest that fits."""
MEMORY_SHARE = 0.94


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table. Attributes: rows: the budget in tokens; None where everything is kept."""

    name: str
    preset: str
    rows: int | None = None
    overrides: tuple[tuple[str, int], ...] = ()

    def plan(self) -> CompressionPlan:
        budget = Budget(tokens=self.rows) if self.rows is not None else None
        return plan_for(self.preset, budget=budget, overrides=dict(self.overrides))


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One measurement. Attributes: batch_size: `LARGEST` for as many as fit."""

    method: Method
    context: int
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is measured. Attributes: cells: batch sizes and contexts, the most wanted first; max_steps: timed
    steps; most: the largest batch tried."""

    methods: tuple[Method, ...]
    cells: tuple[tuple[int, int], ...]
    max_steps: int
    most: int

    def cases(self) -> list[DecodeCase]:
        """Cell by cell, all methods of one beside one another."""
        return [
            DecodeCase(method=method, context=context, batch_size=batch_size)
            for batch_size, context in self.cells
            for method in self.methods
        ]


def methods_of(rows: int, *, widths_window: int = 32) -> tuple[Method, ...]:
    """The methods of the table, compressed ones with a budget of this many tokens."""
    packed = (("rebudget_tokens", 0), ("window", widths_window))
    return (
        Method(name="full", preset="full"),
        Method(name=SDPA, preset="full"),
        Method(name="rocketkv", preset="rocketkv", rows=rows),
        Method(name="rdkv", preset="rdkv", rows=rows, overrides=packed),
        Method(name="snapkv-kivi", preset="snapkv-kivi", rows=rows),
        Method(name="rdkv-hsa", preset="rdkv-hsa", rows=rows, overrides=packed[1:]),
        Method(name="d2o", preset="d2o", rows=rows),
    )


# The contexts that the targets speak of come first, should time run out. Seven sequences of 128K are what an
# H200 holds of an 8B model and its full KV.
GPU_GRID = Grid(
    methods=methods_of(512),
    cells=tuple(
        (batch, context)
        for context in (131072, 32768, 8192, 262144)
        for batch in (1, 7 if context == 131072 else 8, LARGEST)
    ),
    max_steps=24,
    most=64,
)
GPU_GRID_BESIDE = replace(GPU_GRID, cells=((1, 131072), (7, 131072), (1, 32768), (8, 32768)))
TINY_GRID = Grid(methods=methods_of(16, widths_window=4), cells=((LARGEST, 40),), max_steps=1, most=2)
TINY_GRID_BESIDE = replace(TINY_GRID, cells=((1, 40),))
"""Those that other models than the first are measured on."""


class DecodeBench:
    """Measures cases of one model."""

    def __init__(self, model: TransformersModel, clock: Clock, grid: Grid, seed: int) -> None:
        self._model = model
        self._clock = clock
        self._grid = grid
        self._generator = torch.Generator(clock.device).manual_seed(seed)
        self._packed: dict[tuple[str, int], Tensors] = {}
        self._steps: Callable[[], None] | None = None

    @torch.inference_mode()
    def measure(self, case: DecodeCase, left_s: float) -> dict[str, Any]:
        """One row. Args: left_s: what it may take."""
        self._steps = None  # with the memory of the case before
        resolved = self._resolve(case)
        layout = sequence_layout(make_formats(self._model.spec, resolved))
        batch_size = self._batch_size(case, layout)
        row: dict[str, Any] = {
            "model": self._model.spec.name,
            "method": case.method.name,
            "context": case.context,
            "batch": batch_size,
            "largest": case.batch_size == LARGEST,
            "budget_tokens": case.method.rows,
            "cache_bytes": layout.size_bytes * batch_size,
        }
        if batch_size == 0:
            return {**row, "skipped": "does not fit"}
        self._clock.forget_peak()
        began_s = time.perf_counter()
        if case.method.name == SDPA:
            self._steps, path = self._sdpa_step(case, batch_size), "graph"
        else:
            self._steps = _Steps(self._placed(case, resolved, layout, batch_size))
            path = self._steps.last.path.name
        ms, num_steps = self._time(self._steps, left_s - (time.perf_counter() - began_s))
        self._check_active()
        return {
            **row,
            "path": path,
            "ms_per_token": ms,
            "tokens_per_s": 1e3 * batch_size / ms,
            "steps": num_steps,
            "peak_bytes": self._clock.peak_bytes(),
        }

    @torch.inference_mode()
    def profile(self) -> list[dict[str, Any]]:
        """What the device runs in a step of the case that was measured last."""
        assert self._steps is not None, "nothing has been measured"
        rows = self._clock.profile(self._steps, PROFILED_STEPS)
        self._check_active()
        return rows

    def _check_active(self) -> None:
        """Raises: RuntimeError: a sequence has ended, and the last steps were of fewer."""
        if isinstance(self._steps, _Steps):
            self._steps.check_active()

    def _resolve(self, case: DecodeCase) -> ResolvedPlan:
        return resolve_plan(
            case.method.plan(),
            num_prompt_tokens=case.context,
            # the first token is not a step's, the first step is not timed, and the last one ends no sequence
            max_new_tokens=WARM_UP_STEPS + self._grid.max_steps + PROFILED_STEPS + 3,
            num_layers=self._model.spec.num_layers,
            head_dim=self._model.spec.head_dim,
        )

    def _batch_size(self, case: DecodeCase, layout: SequenceLayout) -> int:
        """The case's, or the largest power of two that fits; 0 where it does not."""
        spec = self._model.spec
        # logits and hidden states of a step, generously
        beside = 16 * 8 * spec.vocab_size
        fits = int(MEMORY_SHARE * self._clock.free_bytes()) // (layout.size_bytes + beside)
        if case.batch_size != LARGEST:
            return case.batch_size if case.batch_size <= fits else 0
        fits = min(fits, self._grid.most)
        return 1 << (fits.bit_length() - 1) if fits else 0

    def _placed(
        self, case: DecodeCase, resolved: ResolvedPlan, layout: SequenceLayout, batch_size: int
    ) -> StepRunner:
        """A runner with a batch of sequences after their prompts."""
        size = layout.size_bytes
        arena = torch.empty(batch_size * size, dtype=torch.uint8, device=self._clock.device)
        caches = [
            tuple(self._filled(layer, resolved, arena[i * size : (i + 1) * size]) for layer in layout.layers)
            for i in range(batch_size)
        ]
        params = SamplingParams(max_tokens=resolved.max_new_tokens, temperature=0.0)
        vocab_size = self._model.spec.vocab_size
        runner = StepRunner(self._model, self._clock.step_device(), max_batch_size=batch_size, warn=refuse)
        for i, layers in enumerate(caches):
            runner.join(
                StepInput(
                    caches=layers,
                    num_appended=0,
                    token_id=1 + i % (vocab_size - 1),
                    position=case.context,
                    num_left=resolved.max_new_tokens - 1,
                    stop_ids=frozenset(),
                    sampler=SequenceSampler(params, (1,), vocab_size),
                )
            )
        return runner

    def _filled(self, layer: LayerLayout, resolved: ResolvedPlan, buffer: Tensor) -> LayerCache:
        """A layer as the receiver would leave it."""
        fmt = layer.format
        if isinstance(fmt, Rdkv | Kivi):
            return layer.place(buffer, self._packed_prompt(resolved, fmt))
        regions, tensors = layer.views(buffer), {}
        for name in ("keys", "values"):
            regions[name][:, : fmt.rows].normal_(generator=self._generator)
        if isinstance(fmt, Evicting):
            size = fmt.tensors()["state"].shape
            tensors["state"] = torch.rand(size, generator=self._generator, device=buffer.device)
        return fmt.open(regions, tensors)

    def _packed_prompt(self, resolved: ResolvedPlan, fmt: Rdkv | Kivi) -> Tensors:
        """One layer, packed by the method from random K and V."""
        key = (resolved.method, resolved.num_prompt_tokens)
        if key not in self._packed:
            self._packed = {kept: one for kept, one in self._packed.items() if kept[1] == key[1]}
            self._packed[key] = compress_layer(resolved, fmt, self.inputs(resolved.num_prompt_tokens))
        return self._packed[key]

    def inputs(self, num_tokens: int) -> LayerInputs:
        """One layer of a prompt, as prefill has it."""
        spec = self._model.spec
        dtype, device = getattr(torch, spec.dtype), self._clock.device
        shape = (spec.num_kv_heads, num_tokens, spec.head_dim)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=self._generator, device=device, dtype=dtype)

        return LayerInputs(
            layer=spec.num_layers - 1,
            queries=random(spec.num_kv_heads, spec.group_size, num_tokens, spec.head_dim),
            keys=random(*shape),
            values=random(*shape),
            scaling=spec.head_dim**-0.5,
            unrotate=lambda keys: keys.float(),
        )

    def _sdpa_step(self, case: DecodeCase, batch_size: int) -> Callable[[], None]:
        """The same model with torch's attention over full K and V, captured like ours."""
        attention = _SdpaAttention(self._model, batch_size, case.context + 1, self._generator)
        device = self._clock.step_device()
        token_ids, positions = (
            torch.full((batch_size,), value, device=self._clock.device) for value in (1, case.context)
        )

        def step() -> None:
            logits = self._model.decode(token_ids, positions, attention=attention)
            token_ids.copy_(logits.argmax(1))

        with device.scope():
            device.follow()
            replay = device.capture(step)

        def launch() -> None:
            with device.scope():
                replay()

        return launch

    def _time(self, step: Callable[[], None], left_s: float) -> tuple[float, int]:
        """Mean milliseconds of a step, one after the other, and how many were timed: one, and that the first
        after the launch that warms up, where steps are so slow that there is no time for more."""
        one_s = self._clock.elapsed_s(step)
        if WARM_UP_STEPS * one_s > left_s:
            return 1e3 * one_s, 1
        left_s -= one_s
        for _ in range(WARM_UP_STEPS - 1 if self._clock.warms_up else 0):
            one_s = self._clock.elapsed_s(step)
            left_s -= one_s
        num_steps = max(min(self._grid.max_steps, int(left_s / max(one_s, 1e-6))), 1)

        def steps() -> None:
            for _ in range(num_steps):
                step()

        return 1e3 * self._clock.elapsed_s(steps) / num_steps, num_steps


class _Steps:
    """Steps over a runner's batch, each after the one before. Attributes: last: the last one launched."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.last: LaunchedStep = runner.launch()

    def __call__(self) -> None:
        self.last = self._runner.launch()
        if not self._runner.runs_ahead:
            self.last.wait(STEP_TIMEOUT_S)
        for error in self.last.errors.values():
            raise error

    def check_active(self) -> None:
        self.last.wait(STEP_TIMEOUT_S)
        num_active = sum(active for _, _, active in self.last.drawn().values())
        if num_active != self._runner.num_sequences:
            raise RuntimeError(
                f"{num_active} of {self._runner.num_sequences} sequences took part in the last step"
            )


class _SdpaAttention:
    """Full K and V `[B, H_kv, n, D]` of every layer, the last row the step's own, by torch's attention."""

    def __init__(
        self, model: TransformersModel, batch_size: int, length: int, generator: torch.Generator
    ) -> None:
        spec = model.spec
        size = (spec.num_layers, 2, batch_size, spec.num_kv_heads, length, spec.head_dim)
        self._rows = torch.empty(size, dtype=model.dtype, device=model.device)
        for layer in self._rows:
            layer.normal_(generator=generator)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        all_keys, all_values = self._rows[layer]
        all_keys[:, :, -1] = keys
        all_values[:, :, -1] = values
        # the G heads of a group share rows: they take the place of query positions
        return scaled_dot_product_attention(queries, all_keys, all_values, scale=scaling)


def refuse(reason: str) -> None:
    raise RuntimeError(f"a step that should be captured cannot be: {reason}")


def path_problems(row: dict[str, Any]) -> list[str]:
    """Return what is wrong with the path that a row's steps took."""
    if row["path"] == "eager" and row["method"] not in EAGER:
        return ["steps ran eagerly, and should be captured"]
    return []


def speedups(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row how many times faster than our full KV it is, same model, context and batch."""
    full = {
        (row["model"], row["context"], row["batch"]): row["ms_per_token"]
        for row in rows
        if row["method"] == "full" and "ms_per_token" in row
    }
    for row in rows:
        base = full.get((row["model"], row["context"], row["batch"]))
        if base is not None and "ms_per_token" in row:
            row["speedup"] = base / row["ms_per_token"]
