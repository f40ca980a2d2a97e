"""`kvferry calibrate machine`: measures a `kvferry serve` of its own, fits times to it, and with `--check`
compares predictions with settings that the fit has not seen."""

from __future__ import annotations

import json
import os
import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.errors import ConfigurationError, KvferryError
from kvferry.shared.process.version import VERSION
from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.bench.load import make_load
from kvferry.tools.bench.prompts import PromptMaker
from kvferry.tools.bench.runner import Run
from kvferry.tools.bench.sample import Sample
from kvferry.tools.bench.server import Server
from kvferry.tools.bench.serving import served
from kvferry.tools.evaluation.provenance import commit, hardware
from kvferry.tools.plan.config import CalibrateMachineConfig
from kvferry.tools.plan.fit import Point, fit_method, fit_prefill
from kvferry.tools.plan.machine import MeasuredMachine
from kvferry.tools.plan.model import ModelCost, read_model
from kvferry.tools.plan.predict import Deployment, Workload, disaggregated
from kvferry.tools.plan.sizes import sizes_of

_ALONE, _TOGETHER = 5, 4
"""Requests one after another, and at the same time."""
_ANSWER = {1: 48, _TOGETHER: 64}
_BUDGET_SHARES = (8, 3)
"""A calibrated setting's budget is one of these parts of its prompt; of requests together, the first. Two,
because what a step takes beside reading rows is else not told from what a row takes."""
_NUM_CHECKED = 20
_CHECK_LENGTHS = (200, 600, 1500, 2700, 5000)
_CHECK_ANSWERS = (16, 64, 32)
_CHECK_SHARES = (4, 12)
_UNDISTURBED = 25
"""The percentile of a request's times that counts, also of the mean of those between its tokens: other work
on the machine only makes them longer."""
_SELDOM = 1e-6
"""Requests a second of which none meets another."""
_LINK_BYTES_PER_S = 1e12
"""Processes of one machine exchange KV in memory, which the measured handover includes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one measurement sends."""

    method: str
    prompt_tokens: int
    answer_tokens: int
    budget_tokens: int

    @property
    def plan(self) -> CompressionPlan:
        budget = Budget(tokens=self.budget_tokens) if preset(self.method).takes_budget else None
        return plan_for(self.method, budget=budget)


async def calibrate_machine(config: CalibrateMachineConfig, *, console: Console | None = None) -> int:
    """Measure, fit and write the file. Returns the exit code.

    Raises: ConfigurationError: an option is wrong. KvferryError: a request failed.
    """
    console = console or Console(stderr=True, highlight=False)
    lengths = _lengths(config.lengths)
    methods = list(dict.fromkeys(("full", *(name.strip() for name in config.methods.split(",")))))
    # Answers run together only if prompts are computed in less time than answers take.
    grid = [
        (_calibrated(method, num_tokens, batch, share), batch)
        for num_tokens in lengths
        for method in methods
        for batch in ((1, _TOGETHER) if num_tokens == lengths[0] else (1,))
        for share in (_BUDGET_SHARES if batch == 1 and preset(method).takes_budget else _BUDGET_SHARES[:1])
    ]
    prompts = PromptMaker(config.model)
    checked = _settings_to_check(methods) if config.check else []
    # In the same rounds, so that other work on the machine affects both alike.
    cells = [*grid, *((setting, 1) for setting in checked)]
    found: dict[tuple[Setting, int], list[list[Sample]]] = {cell: [] for cell in cells}
    with served("--model", config.model, "--device", config.device, "--implicit-sessions", "0") as addresses:
        async with Server.connect("url", addresses["url"], "", "", _load_config()) as server:
            if not server.is_kvferry:
                raise KvferryError(f"{addresses['url']} is no kvferry")
            for setting, batch in grid:  # warms up every length and method
                await _measure(server, prompts, setting, batch, seed=-1, requests=1)
            with Progress(console=console, refresh_per_second=2) as progress:
                for number in progress.track(range(config.rounds), description="rounds"):
                    for cell in cells:
                        found[cell].append(await _measure(server, prompts, *cell, seed=number))
    fitted_to = {cell: found[cell] for cell in grid}
    machine, model = _fitted(config, methods, fitted_to)
    rows = [_check(machine, model, setting, found[setting, 1]) for setting in checked]
    result: dict[str, Any] = {
        "kvferry": VERSION,
        "commit": commit(),
        "hardware": hardware(config.device),
        "options": config.model_dump(exclude={"machine_file"}),
        "machine": machine.to_json(),
        "measured": [
            {"method": setting.method, **asdict(_point(model, setting, batch, runs))}
            for (setting, batch), runs in fitted_to.items()
        ],
    }
    if rows:
        result["checked"] = rows
        for name in ("first_token", "per_token"):
            errors = [abs(row[name]["error"]) for row in rows]
            within = sum(value <= 0.25 for value in errors)
            result[f"{name}_within_25_percent"] = within
            console.print(
                f"{name}: {within} of {len(rows)} within 25 %, median error "
                f"{100 * statistics.median(errors):.0f} %"
            )
    Path(config.machine_file).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {config.machine_file}", markup=False)
    return 0


def _calibrated(method: str, num_tokens: int, batch: int, share: int) -> Setting:
    return Setting(
        method=method,
        prompt_tokens=num_tokens,
        answer_tokens=_ANSWER[batch],
        budget_tokens=num_tokens // share,
    )


def _lengths(text: str) -> list[int]:
    """Parse prompt lengths. Raises: ConfigurationError: they are not at least three different numbers."""
    parts = [part.strip() for part in text.split(",")]
    if (
        not all(part.isdecimal() for part in parts)
        or len({*parts}) < 3
        or min(map(int, parts)) < max(_BUDGET_SHARES)
    ):
        raise ConfigurationError(
            f"--lengths is {text!r}; it must be three or more different numbers of at least "
            f"{max(_BUDGET_SHARES)}"
        )
    return sorted(map(int, parts))


def _load_config(**fields: Any) -> BenchConfig:
    return BenchConfig(**{"api": "completions", **fields})


async def _measure(
    server: Server, prompts: PromptMaker, setting: Setting, batch: int, *, seed: int, requests: int = _ALONE
) -> list[Sample]:
    """Send this many requests one after another, or a batch at the same time.

    Raises: KvferryError: one of them failed.
    """
    config = _load_config(
        mix=f"{setting.prompt_tokens}:{setting.answer_tokens}",
        conversations=requests if batch == 1 else batch,
        concurrency=batch,
        seed=zlib.crc32(repr((setting, batch)).encode()),
    )
    server.config = config
    server.compression = {"method": setting.method}
    if preset(setting.method).takes_budget:
        server.compression["token_budget"] = setting.budget_tokens
    run = Run(server, make_load(config, prompts, seed), config, lambda: None)
    await run.run()
    for sample in run.samples:
        if sample.error is not None:
            raise KvferryError(f"{setting}: {': '.join(sample.error)}")
    return run.samples


def _point(model: ModelCost, setting: Setting, batch: int, runs: Sequence[Sequence[Sample]]) -> Point:
    samples = [sample for run in runs for sample in run]
    gaps = [sample.between_s for sample in samples]
    # For a batch, the later tokens: by then every prompt has been computed.
    # Means, since several tokens may arrive together.
    later = [
        statistics.fmean(sample_gaps[1:] if batch == 1 else sample_gaps[len(sample_gaps) // 2 :])
        for sample_gaps in gaps
    ]
    return Point(
        num_tokens=setting.prompt_tokens,
        batch=batch,
        sizes=sizes_of(
            model.spec,
            setting.plan,
            num_prompt_tokens=setting.prompt_tokens,
            max_new_tokens=setting.answer_tokens,
        ),
        first_s=_undisturbed(s.first_token_s for s in samples) if batch == 1 else None,
        second_s=_undisturbed(sample_gaps[0] for sample_gaps in gaps),
        step_s=_undisturbed(later),
    )


def _undisturbed(times_s: Iterable[float | None]) -> float:
    return float(np.percentile([time_s for time_s in times_s if time_s is not None], _UNDISTURBED))


def _fitted(
    config: CalibrateMachineConfig,
    methods: Sequence[str],
    found: dict[tuple[Setting, int], list[list[Sample]]],
) -> tuple[MeasuredMachine, ModelCost]:
    runs_on_cpu = config.device == "cpu" or not torch.cuda.is_available()
    model = read_model(config.model, dtype="float32" if runs_on_cpu else None)
    points = {
        method: [
            _point(model, setting, batch, runs)
            for (setting, batch), runs in found.items()
            if setting.method == method
        ]
        for method in methods
    }
    full = {point.num_tokens: point.first_s for point in points["full"] if point.first_s is not None}
    machine = MeasuredMachine(
        name=config.machine_name,
        memory_bytes=_memory_bytes(),
        model=model.spec.name,
        dtype=model.spec.dtype,
        prefill=fit_prefill(points["full"]),
        methods={method: fit_method(method_points, full) for method, method_points in points.items()},
    )
    return machine, model


def _memory_bytes() -> int:
    """Return the machine's memory, or a GPU's if there is one."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _settings_to_check(methods: Sequence[str]) -> list[Setting]:
    settings = []
    for number in range(_NUM_CHECKED):
        n = _CHECK_LENGTHS[number % len(_CHECK_LENGTHS)]
        settings.append(
            Setting(
                method=methods[number // len(_CHECK_LENGTHS) % len(methods)],
                prompt_tokens=n,
                answer_tokens=_CHECK_ANSWERS[number % len(_CHECK_ANSWERS)],
                budget_tokens=n // _CHECK_SHARES[number % len(_CHECK_SHARES)],
            )
        )
    return settings


def _check(
    machine: MeasuredMachine, model: ModelCost, setting: Setting, runs: Sequence[Sequence[Sample]]
) -> dict[str, Any]:
    """Compare a setting, measured one request at a time, with its prediction."""
    deployment = Deployment(
        machine=machine, model=model, link_bytes_per_s=_LINK_BYTES_PER_S, link_latency_s=0.0, max_batch=32
    )
    sizes = {"prompt_tokens": setting.prompt_tokens, "answer_tokens": setting.answer_tokens}
    predicted = disaggregated(deployment, setting.plan, Workload(**sizes, rate=_SELDOM))
    samples = [sample for run in runs for sample in run]
    measured = {
        "first_token": _undisturbed(sample.first_token_s for sample in samples),
        "per_token": _undisturbed(sample.per_token_s for sample in samples),
    }
    wanted = {"first_token": predicted.first_token_s, "per_token": predicted.per_token_s}
    shipped = [sample.kv["shipped_bytes"] for sample in samples if sample.kv is not None]
    return {
        "method": setting.method,
        **sizes,
        "budget_tokens": setting.budget_tokens,
        "shipped_bytes": {"measured": statistics.median(shipped), "predicted": predicted.sizes.shipped},
        **{
            name: {
                "measured_s": measured[name],
                "predicted_s": wanted[name],
                "error": wanted[name] / measured[name] - 1,
            }
            for name in measured
        },
    }
