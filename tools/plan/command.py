"""`kvferry plan`, from its options to its tables or JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kvferry.models import SHIPPED_CALIBRATION
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.calibrations import calibration_files
from kvferry.shared.compression.curves import SUFFIX, ModelCurves, QualityCurve, load_curves
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for, preset
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.errors import ConfigurationError
from kvferry.tools.plan.advice import Advice, advise
from kvferry.tools.plan.config import PlanConfig
from kvferry.tools.plan.machine import MeasuredMachine, find_machine
from kvferry.tools.plan.model import read_model
from kvferry.tools.plan.predict import Deployment, Prediction, Workload, disaggregated, together

_CURVES = "demo-550c2155.quality.json"
_BITS_PER_BYTE = 8
_COLUMNS = (
    "method", "retention", "shipped, MB", "arena, MB", "prefill, s", "compress, s", "transfer, s",
    "first token, s", "per token, ms", "total, s", "batch", "workers",
)  # fmt: skip
_NAME_WIDTH, _LEAST_WIDTH = 18, 9
"""Of the table's columns."""


def run(config: PlanConfig, *, console: Console | None = None) -> int:
    """Print the plan. Returns the exit code: 1 if nothing meets the bounds.

    Raises:
        ConfigurationError: an option is wrong.
        UnsupportedModel: kvferry does not serve the model.
    """
    install_tables(config.epsilon_tables, calibration=config.calibration)
    machine = find_machine(config.machine)
    dtype = machine.dtype if config.plan_dtype == "auto" else config.plan_dtype
    model = read_model(config.model, dtype=dtype)
    deployment = Deployment(
        machine=machine,
        model=model,
        link_bytes_per_s=config.link_gbits * 1e9 / _BITS_PER_BYTE,
        link_latency_s=config.link_latency_s,
        max_batch=config.max_batch_size,
    )
    load = Workload(
        prompt_tokens=config.prompt_tokens,
        answer_tokens=config.answer_tokens,
        rate=config.rate,
        first_token_bound_s=config.first_token_bound_s,
        per_token_bound_s=config.per_token_bound_s,
    )
    plans = chosen_plans(config, applicable_methods(model.spec.layers), deployment)
    apart = {name: disaggregated(deployment, plan, load) for name, plan in plans.items()}
    advice = advise(apart, lambda least: together(deployment, plans["full"], load, least_workers=least))
    alone = together(deployment, plans["full"], load)
    if config.json_output:
        sys.stdout.write(
            json.dumps(_report(config, deployment, plans, apart, alone, advice), indent=1) + "\n"
        )
    else:
        _show(console or Console(highlight=False), config, deployment, plans, apart, alone, advice)
    return 0 if advice.method is not None else 1


def chosen_plans(
    config: PlanConfig, applicable: tuple[str, ...], deployment: Deployment
) -> dict[str, CompressionPlan]:
    """Return each method's plan, with the retention that the wanted loss needs; full is always included.

    Raises: ConfigurationError: a method does not exist or does not go with the model.
    """
    machine = deployment.machine
    measured = tuple(machine.methods) if isinstance(machine, MeasuredMachine) else applicable
    names = [name.strip() for name in config.methods.split(",")]
    if config.methods == "all":
        names = [name for name in applicable if name in measured]
    if unknown := [name for name in names if name not in applicable]:
        raise ConfigurationError(
            f"--methods has {unknown[0]!r}; methods of this model are {', '.join(applicable)}"
        )
    curves = quality_curves(config.calibration, deployment.model.spec.fingerprint).curves
    return {name: _plan(name, curves.get(name), config.max_loss) for name in ("full", *names)}


def quality_curves(calibration: str, fingerprint: str) -> ModelCurves:
    """Return the curves that were measured on a model, else the demo's.

    Args: calibration: as of `calibration_files`.
    Raises: ConfigurationError: the folder does not exist, or a file is not a curve file.
    """
    files = [load_curves(path) for path in calibration_files(calibration, SUFFIX)]
    own = [file for file in files if fingerprint in file.fingerprints.values()]
    if not own:
        return load_curves(SHIPPED_CALIBRATION / _CURVES)
    curves = {method: curve for file in own for method, curve in file.curves.items()}
    return dataclasses.replace(own[-1], curves=curves)


def _plan(method: str, curve: QualityCurve | None, max_loss: float) -> CompressionPlan:
    """Make a plan with the retention of the curve, or with the method's own budget if there is no curve."""
    if curve is None or not preset(method).takes_budget:
        return plan_for(method)
    retention = curve.retention_at(1 - max_loss / 100, nll=curve.highest_nll)
    return plan_for(method, budget=Budget(retention=retention))


def _report(
    config: PlanConfig,
    deployment: Deployment,
    plans: Mapping[str, CompressionPlan],
    apart: Mapping[str, Prediction],
    alone: Prediction,
    advice: Advice,
) -> dict[str, Any]:
    machine, model = deployment.machine, deployment.model
    curves = quality_curves(config.calibration, model.spec.fingerprint)
    return {
        "options": config.model_dump(exclude={"log_level", "log_format", "ready_file"}),
        "machine": {"name": machine.name, "times": "modelled" if machine.is_modelled else "measured"},
        "model": {
            "name": model.spec.name,
            "parameters": model.num_parameters,
            "active_parameters": model.num_active,
            "weights_bytes": model.weights_bytes,
            "kv_token_bytes": model.spec.kv_token_bytes,
            "dtype": model.spec.dtype,
        },
        "quality_curves": {
            "of": curves.name,
            "are_the_models_own": model.spec.fingerprint in curves.fingerprints.values(),
        },
        "methods": {
            name: {"retention": plans[name].budget.retention, **_figures(prediction)}
            for name, prediction in apart.items()
        },
        "without_disaggregation": _figures(alone),
        "advice": dataclasses.asdict(advice),
    }


def _figures(prediction: Prediction) -> dict[str, Any]:
    fields = dataclasses.asdict(prediction)
    del fields["load"]
    for name in ("first_token_s", "per_token_s", "total_s", "workers"):
        fields[name] = getattr(prediction, name)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def _show(
    console: Console,
    config: PlanConfig,
    deployment: Deployment,
    plans: Mapping[str, CompressionPlan],
    apart: Mapping[str, Prediction],
    alone: Prediction,
    advice: Advice,
) -> None:
    machine, model = deployment.machine, deployment.model
    times = "modelled from public figures" if machine.is_modelled else "from a fit to measurements"
    curves = quality_curves(config.calibration, model.spec.fingerprint)
    of = f"by curves of {curves.name}, another model (kvferry calibrate measures this one's)"
    if model.spec.fingerprint in curves.fingerprints.values():
        of = "by the model's own curves"
    lines = [
        f"{model.spec.name}: {model.num_parameters / 1e9:.2f} G parameters, "
        f"{model.weights_bytes / 1e9:.2f} GB; {model.spec.kv_token_bytes / 1024:.1f} KiB of KV a token. "
        f"{machine.name}: times are {times}.",
        f"{config.rate:g} requests a second of {config.prompt_tokens:,} + {config.answer_tokens:,} tokens, "
        f"link {config.link_gbits:g} Gbit/s; at most {config.max_loss:g} points of answers changed, {of}.",
        "",
        _line(_COLUMNS),
        *(
            _line(_cells(name, plans[name].budget.retention, prediction))
            for name, prediction in apart.items()
        ),
        _line(_cells("not disaggregated", None, alone)),
        "",
        *(f"- {reason}" for reason in advice.reasons),
    ]
    # Not wrapped, so that a narrow terminal or a pipe cuts no figure.
    console.print("\n".join(lines), soft_wrap=True, markup=False)


def _cells(name: str, retention: float | None, prediction: Prediction) -> tuple[str, ...]:
    workers = (
        f"{prediction.prefill_workers} + {prediction.decode_workers}"
        if prediction.prefill_workers
        else f"{prediction.workers}"
    )
    return (
        name,
        "" if retention is None else f"{100 * retention:.1f} %",
        f"{prediction.sizes.shipped / 1e6:.1f}" if prediction.prefill_workers != 0 else "",
        f"{prediction.sizes.arena / 1e6:.1f}",
        f"{prediction.prefill_s:.3g}",
        f"{prediction.compress_s:.2g}",
        f"{prediction.transfer_s:.2g}",
        f"{prediction.first_token_s:.3g}",
        f"{1000 * prediction.per_token_s:.3g}",
        f"{prediction.total_s:.3g}",
        f"{prediction.batch:.1f}",
        workers if prediction.workers is not None else "none",
    )


def _line(cells: Sequence[str]) -> str:
    """Format a row of the table: the first cell to the left, the others to the right of their columns."""
    first, *others = cells
    widths = [max(len(title), _LEAST_WIDTH) for title in _COLUMNS[1:]]
    return first.ljust(_NAME_WIDTH) + "".join(
        f"  {cell:>{width}}" for cell, width in zip(others, widths, strict=True)
    )
