"""`kvferry eval`, from its options to its result files.

OUT/records.jsonl   every example of every contender; a later run resumes from it
OUT/results.json    command, commit, hardware, and the cells
OUT/results.md      the cells as tables, and a recommended method and budget
OUT/*.quality.json  quality curves, as `kvferry calibrate` writes them; copied to its folder, they are used
OUT/*.png           with --plots
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvferry.shared.compression.curves import ModelCurves
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.model.checkpoint import GGUF_SUFFIX
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.command_line import option_name
from kvferry.shared.process.version import VERSION
from kvferry.tools.evaluation import plots
from kvferry.tools.evaluation.agreement_curves import agreement_curves
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.experiment import Experiment, describe_task, read_experiment
from kvferry.tools.evaluation.fitting import save_curves
from kvferry.tools.evaluation.jobs import WorkerOptions, run_jobs
from kvferry.tools.evaluation.losses import Loss, losses, losses_markdown
from kvferry.tools.evaluation.provenance import commit, fingerprints, hardware
from kvferry.tools.evaluation.recommendation import Recommendation, describe, recommend
from kvferry.tools.evaluation.records import Key, Record, RecordFile
from kvferry.tools.evaluation.runner import Job
from kvferry.tools.evaluation.summary import Cell, summarise
from kvferry.tools.evaluation.table import markdown
from kvferry.tools.recall.network import save_folder
from kvferry.tools.recall.tokenizer import save_tokenizer
from kvferry.tools.recall.trainer import load_network

_FIRST_TOKEN = {
    "prefill": "the first answer token comes from prefill's dense logits, as served; the others see the "
    "compressed cache",
    "refed": "the last prompt token is fed again, so that every answer token sees the compressed cache",
}
_ANSWERS = {"right": "the right answers", "own": "each contender's own answers"}
_MATCH = {
    "kept": "budgets are bytes retained of the part of the prompt that is compressed, scales, indexes and "
    "page extremes counted",
    "read": "budgets are bytes read per decode step",
    "given": "each method is given the budget unchanged",
}


def run(config: EvalConfig, *, console: Console | None = None) -> int:
    """Measure what the output folder lacks, then write all results. Returns the exit code.

    Raises:
        ConfigurationError: an option is wrong, or --plots finds no matplotlib.
        KvferryError: a process died, or the model failed.
    """
    install_tables(config.epsilon_tables, calibration=config.calibration)
    model = _model_folder(config)
    experiment = read_experiment(config.model_copy(update={"model": model}))
    if config.plots:
        plots.check_available()
    console = console or Console(stderr=True, highlight=False)
    spec = load_model(model, device=config.device, dtype=config.dtype).spec
    out = Path(config.out)
    file = RecordFile(out / "records.jsonl", fresh=config.fresh)
    jobs = _missing(experiment, spec.fingerprint, file.records)
    _measure(jobs, file, config, model, experiment, console)
    cells = summarise(experiment, spec.fingerprint, file.records)
    commits = sorted({record.commit for record in file.records.values()})
    found = recommend(experiment, spec.fingerprint, file.records, max_loss=config.max_loss / 100)
    lost = losses(experiment, spec.fingerprint, file.records)
    for path in _write(out, cells, found, lost, config, experiment, spec, commits):
        console.print(str(path), markup=False, soft_wrap=True)
    if curves := agreement_curves(experiment, spec.fingerprint, file.records):
        found_curves = ModelCurves(
            model=Path(model).name,
            fingerprints=fingerprints(model),
            curves=curves,
            origin={**_provenance(config, experiment, spec), "commits": commits},
        )
        (out / found_curves.file_name).unlink(missing_ok=True)  # it may have methods that this run lacks
        console.print(str(save_curves(out, found_curves)), markup=False, soft_wrap=True)
    for line in describe(found, max_loss=config.max_loss / 100, score=_score(cells)):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _model_folder(config: EvalConfig) -> str:
    """Return the model as `load_model` takes it; a checkpoint is exported into the output folder first."""
    checkpoint = Path(config.model)
    if not checkpoint.is_file() or checkpoint.suffix == GGUF_SUFFIX:
        return config.model
    folder = Path(config.out) / "model"
    save_folder(load_network(checkpoint), folder)
    save_tokenizer(folder)
    return str(folder)


def _missing(experiment: Experiment, fingerprint: str, records: Mapping[Key, Record]) -> list[Job]:
    """Return the examples that some contenders have not been measured on, each with these contenders."""
    settings = {task: experiment.settings_of(task) for task in experiment.tasks}
    jobs = []
    for unit in experiment.units():
        work = tuple(
            (setting, contender)
            for setting in settings[unit.task]
            for contender in experiment.contenders
            if Key.of(fingerprint, experiment, unit, setting, contender) not in records
        )
        if work:
            jobs.append((unit, work))
    return jobs


def _measure(
    jobs: Sequence[Job],
    file: RecordFile,
    config: EvalConfig,
    model: str,
    experiment: Experiment,
    console: Console,
) -> None:
    if not jobs:
        console.print("everything was already measured")
        return
    options = WorkerOptions(
        model=model,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        epsilon_tables=config.epsilon_tables,
        calibration=config.calibration,
        num_processes=config.jobs,
        batch=config.batch,
        experiment=experiment,
    )
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    measured_at = commit()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("answers", total=sum(len(work) for _, work in jobs))
        for records in run_jobs(jobs, options):
            file.append(replace(record, commit=measured_at) for record in records)
            progress.advance(bar, len(records))


def _write(
    out: Path,
    cells: Sequence[Cell],
    found: Sequence[Recommendation],
    lost: Sequence[Loss],
    config: EvalConfig,
    experiment: Experiment,
    spec: ModelSpec,
    commits: Sequence[str],
) -> list[Path]:
    result = {
        **_provenance(config, experiment, spec),
        "commits": list(commits),
        "cells": [asdict(cell) for cell in cells],
        "losses": [asdict(loss) for loss in lost],
        "max_loss": config.max_loss,
        "recommendations": [asdict(recommendation) for recommendation in found],
    }
    paths = [out / "results.json", out / "results.md"]
    paths[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    notes = [
        f"`{result['command']}`",
        f"{result['model']} in {spec.dtype} on {result['hardware']}, commit {', '.join(commits)}; "
        f"{_FIRST_TOKEN[experiment.first_token]}; {_MATCH[experiment.match]}; K and V rows count as "
        f"{experiment.kv_dtype}; earlier turns contain {_ANSWERS[experiment.answers]}.",
    ]
    tables = markdown(cells, title=f"Recall under KV compression: {result['model']}", notes=notes)
    sections = [tables, *losses_markdown(lost), _advice(cells, found, config)]
    paths[1].write_text("\n\n".join(section.rstrip("\n") for section in sections) + "\n", encoding="utf-8")
    return paths + (plots.draw(cells, out, match=experiment.match) if config.plots else [])


def _advice(cells: Sequence[Cell], found: Sequence[Recommendation], config: EvalConfig) -> str:
    """Write the report's last section."""
    score = _score(cells)
    lines = [f"- {line}" for line in describe(found, max_loss=config.max_loss / 100, score=score)]
    return "\n".join(
        [
            f"## Recommendation: at most {config.max_loss:g} points below the full KV's {score}",
            "",
            "The cheapest method and budget, over all tasks, lengths and depths of a setting; points are "
            "percentage points. Where an interval ends above the stated loss, more examples are needed to be "
            "sure.",
            "",
            *lines,
            "",
        ]
    )


def _score(cells: Sequence[Cell]) -> str:
    """Return the name of the score by which right answers are counted."""
    names = dict.fromkeys(name for cell in cells if cell.scores is not None for name in cell.scores.named)
    return " and ".join(names) or "exact match"


def _provenance(config: EvalConfig, experiment: Experiment, spec: ModelSpec) -> dict[str, Any]:
    """Describe what was run, and on which machine, so that a number can be reproduced."""
    return {
        "command": _command(config),
        "version": VERSION,
        "torch": torch.__version__,
        "hardware": hardware(config.device),
        "model": Path(config.model).name,
        "fingerprint": spec.fingerprint,
        "dtype": spec.dtype,
        "first_token": f"{experiment.first_token}: {_FIRST_TOKEN[experiment.first_token]}",
        "match": f"{experiment.match}: {_MATCH[experiment.match]}",
        "first_seed": experiment.first_seed,
        "examples": experiment.lengths,
        "held_out": experiment.held_out,
        "gap": experiment.gap,
        "answers": experiment.answers,
        "kv_dtype": experiment.kv_dtype,
        "tasks": {name: describe_task(name) for name in experiment.tasks},
    }


def _command(config: EvalConfig) -> str:
    words = ["kvferry", "eval"]
    for field, value in config.model_dump(exclude_defaults=True).items():
        words += [option_name(field)] if value is True else [option_name(field), str(value)]
    return shlex.join(words)
