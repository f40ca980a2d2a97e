"""`kvferry calibrate`: measures a model's distortion table and quality curves, into files that services find.

    samples.py ──► prompts ──► K, V ──► NAME-HASH.epsilon.json
                      └──► compressed by each method to each budget ──► answers ──► NAME-HASH.quality.json

The table comes first, because the curves are measured with compression that uses it. A worker that is to
calibrate does the same before it serves. One process at a time measures a model (`NAME-HASH.lock`); what an
interrupted one has measured is used by the next (`NAME-HASH.partial`). Runs the one-process generator,
without services.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import structlog
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.calibrations import calibration_folder
from kvferry.shared.compression.curves import (
    CurveBook,
    Measure,
    ModelCurves,
    QualityCurve,
    estimate_context_nll,
)
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.compression.rdkv.epsilon import SUFFIX as EPSILON_SUFFIX
from kvferry.shared.compression.rdkv.epsilon import EpsilonTable, install_tables, own_table
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.checkpoint import DEMO_NAME, read_object, resolve_model_path
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.model_types import text_type
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.command_line import option_name
from kvferry.tools.evaluation.calibration_config import CalibrateConfig
from kvferry.tools.evaluation.epsilon import EpsilonAccumulator, save_table
from kvferry.tools.evaluation.experiment import FULL, read_list
from kvferry.tools.evaluation.fitting import Comparison, fit_curve, save_curves
from kvferry.tools.evaluation.provenance import commit, fingerprints, hardware
from kvferry.tools.evaluation.samples import Sample, draw_samples
from kvferry.tools.evaluation.scoring import forced, greedy
from kvferry.tools.evaluation.settings import PendingAnswer
from kvferry.tools.oracle import OneProcessGenerator

Show = Callable[[str, int, int], None]
"""Called with what is done now, how many prompts of it are done, and how many there are. It may raise."""

_ANSWER_TOKENS = 32
"""The most tokens that are compared with the full cache's answer, where the right one has fewer."""
_TABLE_PROMPTS = 4
"""Prompts that the table is measured on. It averages over the thousands of channels and tokens of each."""
_GROUPS = 4
"""Groups of similarly predictable prompts, each of which is averaged."""
_SHOWN_QUALITIES = (0.9, 0.95, 0.99)
_LOOK_INTERVAL_S = 0.2
"""How often a process that waits for another one's lock tries again."""

log = structlog.get_logger(__name__)


def calibrate(config: CalibrateConfig, *, console: Console | None = None) -> int:
    """Measure the model, write its files and print the results. Returns the exit code.

    Raises: ConfigurationError: an option is wrong, or the folder cannot be written to.
    """
    # Mistakes are reported before anything is measured.
    methods = _methods(config.methods)
    _retentions(config.retentions)
    _made_folder(config.calibration)
    CurveBook.read(config.calibration)
    console = console or Console(stderr=True, highlight=False)
    if config.threads:
        torch.set_num_threads(config.threads)
    model = load_model(config.model, device=config.device, dtype=config.dtype)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    lines = []
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("prompts", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        measurement = _Measurement(config, model, show)
        with measurement.alone():
            if _takes_table(model):
                table = measurement.measure_table()
                lines.append(
                    f"distortion at 2, 4, 8 bits: K {_numbers(table.keys)}, V {_numbers(table.values)}"
                )
            curves = measurement.measure_curves()
    lines += [_summary(method, curve, measurement.mean_nll) for method, curve in curves.items()]
    if left_out := [name for name in methods if name not in curves]:
        lines.append(f"not measured, since they do not go with this model: {', '.join(left_out)}")
    for line in (*lines, *map(str, measurement.written)):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def worker_calibration(model: str, calibration: str) -> Callable[[LanguageModel, Callable[[], bool]], None]:
    """Return the function that a worker calls before it serves; see `shared.process.worker.Calibrate`.

    Args: model, calibration: the worker's settings. The folder is made.
    Raises: ConfigurationError: the folder cannot be made.
    """
    _made_folder(calibration)
    config = CalibrateConfig.model_construct(model=model, calibration=calibration)
    return partial(calibrate_missing, config)


def calibrate_missing(config: CalibrateConfig, model: LanguageModel, is_given_up: Callable[[], bool]) -> None:
    """Measure what the folder lacks of a model: its table, its curves, or both. Progress is logged.

    Args: is_given_up: if it returns True, this returns after the current prompt; a later call goes on there.
    Raises: ConfigurationError: a file of the folder is torn, or it cannot be written to.
    """
    if not any(_lacking(config, model)):
        return
    shown: tuple[str, int] | None = None

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        if is_given_up():
            raise _GivenUp
        if shown != (what, done):
            shown = what, done
            log.info("calibration", doing=what, done=done, of=total)

    length = min(config.length, model.spec.max_model_len // 2)
    with suppress(_GivenUp):
        measurement = _Measurement(config.model_copy(update={"length": length}), model, show)
        with measurement.alone():
            lacks_table, lacks_curves = _lacking(config, model)  # another process may have measured it
            if lacks_table:
                measurement.measure_table()
            if lacks_curves:
                measurement.measure_curves()
        log.info("calibrated", files=[str(path) for path in measurement.written])
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # decode takes a part of the memory that is left


class _GivenUp(Exception):
    """The worker ends."""


def _lacking(config: CalibrateConfig, model: LanguageModel) -> tuple[bool, bool]:
    """Return whether the model's table and its curves are missing. Installs the existing tables."""
    fingerprint, applicable = model.spec.fingerprint, applicable_methods(model.spec.layers)
    install_tables("", calibration=config.calibration)
    has_curves = bool(CurveBook.read(config.calibration).methods(fingerprint))
    takes_curves = any(name in applicable for name in _methods(config.methods))
    return _takes_table(model) and own_table(fingerprint) is None, takes_curves and not has_curves


def _takes_table(model: LanguageModel) -> bool:
    return "rdkv" in applicable_methods(model.spec.layers)


class _Measurement:
    """The measurement of one model.

    Attributes:
        mean_nll: of the prompts.
        written: files.

    Raises: ConfigurationError: an option is wrong, or no method goes with the model.
    """

    def __init__(self, config: CalibrateConfig, model: LanguageModel, show: Show) -> None:
        spec = model.spec
        applicable = [name for name in applicable_methods(spec.layers) if preset(name).takes_budget]
        self._methods = [name for name in _methods(config.methods) if name in applicable]
        if not self._methods:
            known = ", ".join(applicable) or "none"
            raise ConfigurationError(f"--methods is {config.methods!r}; methods of this model are {known}")
        self.written: list[Path] = []
        self._config, self._spec, self._show = config, spec, show
        self._folder, self._retentions = _made_folder(config.calibration), _retentions(config.retentions)
        self._generator = OneProcessGenerator(model)
        self._samples = draw_samples(
            ChatTokenizer.load(config.model),
            text=config.text,
            data=config.data,
            generated=config.model == DEMO_NAME,
            number=config.samples,
            num_tokens=config.length,
            max_model_len=spec.max_model_len,
        )
        prompts = [sample.prompt for sample in self._samples]
        self._nlls = [estimate_context_nll(prompt, vocab_size=spec.vocab_size) for prompt in prompts]
        self.mean_nll = fmean(self._nlls)
        self._found = ModelCurves(
            model=Path(config.model).name,
            fingerprints={**fingerprints(config.model), "served": spec.fingerprint},
            curves={},
            origin=self._origin(),
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process measures the model, and have others wait until the end.

        Raises: ConfigurationError: the folder cannot be written to.
        """
        path = self._path(".lock")
        try:
            file = path.open("a")
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error}") from error
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._show("waiting for another process that measures this model", 0, len(self._samples))
                    time.sleep(_LOOK_INTERVAL_S)
            yield

    def measure_table(self) -> EpsilonTable:
        """Measure epsilon on the model's own K and V, write the table, and install it.

        Raises: ConfigurationError: see `EpsilonAccumulator.table` and `save_table`.
        """
        accumulator = EpsilonAccumulator()
        samples = self._samples[:: max(1, len(self._samples) // _TABLE_PROMPTS)][:_TABLE_PROMPTS]
        for done, sample in enumerate(samples):
            self._show("distortion table", done, len(samples))
            for layer in self._generator.capture(list(sample.prompt)).layers:
                accumulator.add(layer.keys, layer.values)
        table, path = accumulator.table(), self._path(EPSILON_SUFFIX)
        origin = {"fingerprints": dict(self._found.fingerprints), **self._found.origin}
        save_table(path, table, origin=origin)
        install_tables("", calibration=self._config.calibration)
        self.written.append(path)
        return table

    def measure_curves(self) -> dict[str, QualityCurve]:
        """Measure each method against the full cache, fit its curve, and write all curves.

        Raises: ConfigurationError: see `fit_curve` and `save_curves`.
        """
        config, retentions, ends = self._config, self._retentions, self._spec.eos_token_ids
        plans = [plan_for(method, budget=Budget(retention=r)) for method in self._methods for r in retentions]
        table = own_table(self._spec.fingerprint)
        what = repr((self._spec.fingerprint, table, config.measure, plans, self._samples))
        values = _Rows(self._path(".partial"), hashlib.sha256(what.encode()).hexdigest())
        for sample in self._samples[len(values.rows) :]:
            self._show("quality curves", len(values.rows), len(self._samples))
            values.append(_values(self._generator, sample, [plan_for(FULL), *plans], config.measure, ends))
        self._show("quality curves", len(values.rows), len(self._samples))
        curves = {}
        for i, method in enumerate(self._methods):
            budgets = [
                [
                    Comparison(retention=r, context_nll=nll, full=row[0], compressed=row[column])
                    for nll, row in zip(self._nlls, values.rows, strict=True)
                ]
                for column, r in enumerate(retentions, 1 + i * len(retentions))
            ]
            groups = min(_GROUPS, len(self._samples))
            curves[method] = fit_curve(budgets, measure=config.measure, groups=groups)
        self.written.append(save_curves(self._folder, replace(self._found, curves=curves)))
        values.drop()
        return curves

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._found.name}{suffix}"

    def _origin(self) -> dict[str, Any]:
        config, words = self._config, ["kvferry", "calibrate"]
        for field, value in config.model_dump(exclude_defaults=True).items():
            words += [option_name(field), str(value)]
        return {
            "command": shlex.join(words),
            "commit": commit(),
            "hardware": hardware(config.device),
            "model": Path(config.model).name,
            "family": self._family(),
            "dtype": self._spec.dtype,
            "samples": config.samples,
            "length": config.length,
        }

    def _family(self) -> str:
        """Return the family for which the curves stand. The demo is of a common type, and stands for none."""
        if self._config.model == DEMO_NAME:
            return ""
        return text_type(read_object(resolve_model_path(self._config.model, weights=False) / "config.json"))


class _Rows:
    """Rows of numbers in a file, a line each, which an interrupted measurement leaves to the next one.

    Args: key: of what they are measured; rows of another key are dropped.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self.rows: list[list[float]] = []
        with suppress(OSError, ValueError):  # there is none, or its last line is torn
            found, *lines = path.read_text(encoding="utf-8").splitlines()
            for line in lines if found == key else ():
                self.rows.append(json.loads(line))
        path.write_text("".join(f"{line}\n" for line in (key, *map(json.dumps, self.rows))), encoding="utf-8")

    def append(self, row: list[float]) -> None:
        self.rows.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def drop(self) -> None:
        """Remove the file."""
        self._path.unlink()


def _values(
    generator: OneProcessGenerator,
    sample: Sample,
    plans: Sequence[CompressionPlan],
    measure: Measure,
    eos_token_ids: tuple[int, ...],
) -> list[float]:
    """Return for each plan the right answer's mean NLL, or 1 if the greedy answer is the one wanted, else 0.

    The last prompt token is fed to the compressed cache, so that every answer token sees that cache.

    Args: plans: the full cache's first.
    """
    question = sample.question and sample.question.before(1)
    captured = generator.capture(list(sample.prompt[:-1]), question=question)
    longest = max(len(sample.answer), _ANSWER_TOKENS)
    pending = []
    for plan in plans:
        continuation = generator.compress(captured, plan=plan, max_new_tokens=longest + 1)
        pending.append(PendingAnswer(continuation, continuation.step(sample.prompt[-1])))
    answer = sample.answer
    if measure == "agreement":
        (answer,) = greedy(pending[:1], eos_token_ids=eos_token_ids, max_new_tokens=[longest])
    found = forced(pending, [answer] * len(pending))
    if measure == "nll":
        return [fmean(each.nlls) for each in found]
    # Greedy decoding gives an answer if each of its tokens is the likeliest after those before it.
    return [float(tuple(each.likeliest) == answer) for each in found]


def _summary(method: str, curve: QualityCurve, nll: float) -> str:
    shown = [f"{q:g} at {curve.retention_at(q, nll=nll):.1%}" for q in _SHOWN_QUALITIES]
    return f"{method}: quality {', '.join(shown)} of the prompt retained"


def _numbers(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2g}" for value in values)


def _made_folder(calibration: str) -> Path:
    folder = calibration_folder(calibration)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"calibration {str(folder)!r} cannot be made: {error}") from error
    return folder


def _methods(text: str) -> list[str]:
    known = [name for name in method_names() if preset(name).takes_budget]
    if text == "all":
        return known

    def read(item: str) -> str:
        if item not in known:
            raise ConfigurationError(f"--methods has {item!r}; allowed are {', '.join(known)}, or all")
        return item

    return read_list("--methods", text, read)


def _retentions(text: str) -> list[float]:
    return read_list("--retentions", text, _retention)


def _retention(text: str) -> float:
    try:
        retention = float(text)
    except ValueError:
        retention = 0.0
    if not 0 < retention < 1:
        raise ConfigurationError(f"--retentions has {text!r}; each must be above 0 and below 1")
    return retention
