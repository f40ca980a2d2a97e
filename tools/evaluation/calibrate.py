"""`kvferry calibrate`: distortion tables of RDKV, and quality curves of any method, measured on a model.

    samples.py ──► prompts ──capture──► K, V ──► epsilon table NAME.json          (services' --epsilon-tables)
                                         └──► compressed ──► answers ──► curves   (the router's --calibration)

Runs the one-process generator, without services.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from kvferry.shared.compression.curves import Measure, ModelCurves, QualityCurve, estimate_context_nll
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.compression.rdkv.epsilon import PAPER_TABLES
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.command_line import option_name
from kvferry.tools.evaluation.calibration_config import (
    CalibrateConfig,
    CalibrateEpsilonConfig,
    CalibrateQualityConfig,
)
from kvferry.tools.evaluation.epsilon import EpsilonAccumulator, save_table
from kvferry.tools.evaluation.experiment import FULL, read_list
from kvferry.tools.evaluation.fitting import Comparison, fit_curve, save_curves
from kvferry.tools.evaluation.provenance import commit, fingerprints, hardware
from kvferry.tools.evaluation.samples import Sample, draw_samples
from kvferry.tools.evaluation.scoring import forced, greedy
from kvferry.tools.evaluation.settings import PendingAnswer
from kvferry.tools.oracle import OneProcessGenerator

_ANSWER_TOKENS = 32
"""The most tokens that are compared with the full cache's answer, where the right one has fewer."""
_SHOWN_QUALITIES = (0.9, 0.95, 0.99)


def calibrate_epsilon(config: CalibrateEpsilonConfig, *, console: Console | None = None) -> int:
    """Measure epsilon on the model's own K and V and write the table. Returns the exit code.

    Raises: ConfigurationError: an option is wrong.
    """
    name = config.table_name or _model_name(config)
    if name in PAPER_TABLES:
        raise ConfigurationError(f"--table-name is {name!r}, a built-in table; choose another name")
    console = console or Console(stderr=True, highlight=False)
    model, samples = _prepare(config)
    generator = OneProcessGenerator(model)
    accumulator = EpsilonAccumulator()
    for sample in track(samples, description="prompts", console=console):
        for layer in generator.capture(list(sample.prompt)).layers:
            accumulator.add(layer.keys, layer.values)
    path = Path(config.epsilon_tables) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = {"fingerprints": fingerprints(config.model), **_origin("epsilon", config, model)}
    save_table(path, accumulator.table(), origin=origin)
    console.print(str(path), markup=False, soft_wrap=True)
    return 0


def calibrate_quality(config: CalibrateQualityConfig, *, console: Console | None = None) -> int:
    """Measure each method against the full cache, fit its curve and write it. Returns the exit code.

    Raises: ConfigurationError: an option is wrong.
    """
    methods = _methods(config.methods)
    retentions = read_list("--retentions", config.retentions, _retention)
    if config.samples < config.groups:
        raise ConfigurationError(
            f"--groups is {config.groups}; it must be at most --samples, which is {config.samples}"
        )
    console = console or Console(stderr=True, highlight=False)
    model, samples = _prepare(config)
    vocab_size = model.spec.vocab_size
    contexts = [estimate_context_nll(sample.prompt, vocab_size=vocab_size) for sample in samples]
    plans = [plan_for(method, budget=Budget(retention=r)) for method in methods for r in retentions]
    generator = OneProcessGenerator(model)
    values = [
        _values(generator, sample, [plan_for(FULL), *plans], config.measure, model.spec.eos_token_ids)
        for sample in track(samples, description="prompts", console=console)
    ]
    curves = {}
    for i, method in enumerate(methods):
        budgets = [
            [
                Comparison(retention=r, context_nll=nll, full=row[0], compressed=row[column])
                for nll, row in zip(contexts, values, strict=True)
            ]
            for column, r in enumerate(retentions, 1 + i * len(retentions))
        ]
        curves[method] = fit_curve(budgets, measure=config.measure, groups=config.groups)
    path = save_curves(
        Path(config.calibration),
        ModelCurves(
            model=_model_name(config),
            fingerprints=fingerprints(config.model),
            curves=curves,
            origin=_origin("quality", config, model),
        ),
    )
    for method, curve in curves.items():
        console.print(_summary(method, curve, fmean(contexts)), markup=False, soft_wrap=True)
    console.print(str(path), markup=False, soft_wrap=True)
    return 0


def _values(
    generator: OneProcessGenerator,
    sample: Sample,
    plans: Sequence[CompressionPlan],
    measure: Measure,
    eos_token_ids: tuple[int, ...],
) -> list[float]:
    """Under each plan: the right answer's mean NLL, or 1 where the greedy answer is the one wanted, else 0.

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


def _methods(text: str) -> list[str]:
    known = [name for name in method_names() if preset(name).takes_budget]
    if text == "all":
        return known

    def read(item: str) -> str:
        if item not in known:
            raise ConfigurationError(f"--methods has {item!r}; allowed are {', '.join(known)}, or all")
        return item

    return read_list("--methods", text, read)


def _retention(text: str) -> float:
    try:
        retention = float(text)
    except ValueError:
        retention = 0.0
    if not 0 < retention < 1:
        raise ConfigurationError(f"--retentions has {text!r}; each must be above 0 and below 1")
    return retention


def _prepare(config: CalibrateConfig) -> tuple[TransformersModel, list[Sample]]:
    if config.threads:
        torch.set_num_threads(config.threads)
    model = load_model(config.model, device=config.device, dtype=config.dtype)
    samples = draw_samples(
        ChatTokenizer.load(config.model),
        text=config.text,
        data=config.data,
        number=config.samples,
        num_tokens=config.length,
        max_model_len=model.spec.max_model_len,
    )
    return model, samples


def _model_name(config: CalibrateConfig) -> str:
    return Path(config.model).name


def _origin(kind: str, config: CalibrateConfig, model: TransformersModel) -> dict[str, Any]:
    words = ["kvferry", "calibrate", kind]
    for field, value in config.model_dump(exclude_defaults=True).items():
        words += [option_name(field), str(value)]
    return {
        "command": shlex.join(words),
        "commit": commit(),
        "hardware": hardware(config.device),
        "model": _model_name(config),
        "dtype": model.spec.dtype,
        "samples": config.samples,
        "length": config.length,
    }
