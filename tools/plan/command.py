"""`kvferry plan`, from its options to its tables or JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvferry.shared.compression.curves import QualityCurve
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import check_names, plan_for, preset
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.checkpoint import model_fingerprint, read_object, resolve_model_path
from kvferry.shared.model.model_types import check_described, text_type
from kvferry.tools.plan.config import PlanConfig
from kvferry.tools.plan.curves import PlanCurves, find_curves
from kvferry.tools.plan.machine import Machine, MeasuredMachine, find_machine

if TYPE_CHECKING:
    from kvferry.tools.plan.advice import Advice
    from kvferry.tools.plan.predict import Deployment, Prediction

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
    # Mistakes are told before torch is imported, which takes seconds.
    check_names("--methods", [name for name in _named(config.methods) if name != "all"])
    machine = find_machine(config.machine)
    install_tables(config.epsilon_tables, calibration=config.calibration)
    return _plan_for_machine(config, machine, _curves(config), console or Console(highlight=False))


def _curves(config: PlanConfig) -> PlanCurves:
    """Find the curves for the model. Raises: as `run`."""
    folder = resolve_model_path(config.model, weights=False)
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"--model is {config.model!r}, which has no config.json")
    described = read_object(folder / "config.json")
    check_described(described)
    try:
        fingerprint = model_fingerprint(folder, dtype="float32")
    except ConfigurationError:  # its weights are not on this machine
        fingerprint = ""
    return find_curves(config, fingerprint=fingerprint, family=text_type(described))


def _plan_for_machine(config: PlanConfig, machine: Machine, curves: PlanCurves, console: Console) -> int:
    from kvferry.shared.compression.applicable import applicable_methods
    from kvferry.tools.plan.advice import advise
    from kvferry.tools.plan.model import read_model
    from kvferry.tools.plan.predict import Deployment, Workload, disaggregated, together

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
    plans = chosen_plans(config, applicable_methods(model.spec.layers), machine, curves)
    apart = {name: disaggregated(deployment, plan, load) for name, plan in plans.items()}
    advice = advise(apart, lambda least: together(deployment, plans["full"], load, least_workers=least))
    alone = together(deployment, plans["full"], load)
    if config.json_output:
        sys.stdout.write(
            json.dumps(_report(config, deployment, curves, plans, apart, alone, advice), indent=1) + "\n"
        )
    else:
        lines = _lines(config, deployment, curves, plans, apart, alone, advice)
        # Not wrapped, so that a narrow terminal or a pipe cuts no figure.
        console.print("\n".join(lines), soft_wrap=True, markup=False)
    return 0 if advice.method is not None else 1


def chosen_plans(
    config: PlanConfig, applicable: tuple[str, ...], machine: Machine, curves: PlanCurves
) -> dict[str, CompressionPlan]:
    """Return each method's plan, with the retention that the wanted loss needs; full is always included.

    Raises: ConfigurationError: a method does not exist or does not go with the model.
    """
    names = _named(config.methods)
    if config.methods == "all":
        measured: Collection[str] = machine.methods if isinstance(machine, MeasuredMachine) else applicable
        names = tuple(name for name in applicable if name in measured)
    if unknown := [name for name in names if name not in applicable]:
        raise ConfigurationError(
            f"--methods has {unknown[0]!r}; methods of this model are {', '.join(applicable)}"
        )
    return {name: _plan(name, curves.by_method.get(name), config.max_loss) for name in ("full", *names)}


def _named(methods: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in methods.split(","))


def _plan(method: str, curve: QualityCurve | None, max_loss: float) -> CompressionPlan:
    """Make a plan with the retention of the curve, or with the method's own budget if there is no curve."""
    if curve is None or not preset(method).takes_budget:
        return plan_for(method)
    retention = curve.retention_at(1 - max_loss / 100, nll=curve.highest_nll)
    return plan_for(method, budget=Budget(retention=retention))


def _report(
    config: PlanConfig,
    deployment: Deployment,
    curves: PlanCurves,
    plans: Mapping[str, CompressionPlan],
    apart: Mapping[str, Prediction],
    alone: Prediction,
    advice: Advice,
) -> dict[str, Any]:
    machine, model = deployment.machine, deployment.model
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
            "of": curves.of or None,
            "whose": curves.whose,
            "are_the_models_own": curves.whose == "own",
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


def _lines(
    config: PlanConfig,
    deployment: Deployment,
    curves: PlanCurves,
    plans: Mapping[str, CompressionPlan],
    apart: Mapping[str, Prediction],
    alone: Prediction,
    advice: Advice,
) -> list[str]:
    machine, model = deployment.machine, deployment.model
    times = "modelled from public figures" if machine.is_modelled else "from a fit to measurements"
    return [
        f"{model.spec.name}: {model.num_parameters / 1e9:.2f} G parameters, "
        f"{model.weights_bytes / 1e9:.2f} GB; {model.spec.kv_token_bytes / 1024:.1f} KiB of KV a token. "
        f"{machine.name}: times are {times}.",
        f"{config.rate:g} requests a second of {config.prompt_tokens:,} + {config.answer_tokens:,} tokens, "
        f"link {config.link_gbits:g} Gbit/s; {_quality(config.max_loss, curves)}.",
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


def _quality(max_loss: float, curves: PlanCurves) -> str:
    """Say what is known of the answers' quality, and on which model it was measured."""
    if curves.whose == "none":
        return (
            "each method has its own budget, and what that loses with this model is not known: no model of "
            "its family has quality curves (kvferry calibrate measures them)"
        )
    model = {
        "own": "the model's own curves",
        "family": f"curves of {curves.of}, a model of its family (kvferry calibrate measures this one's)",
        "named": f"curves of {curves.of}, as --curves-of says, which may be far off",
    }
    return f"at most {max_loss:g} points of answers changed, by {model[curves.whose]}"


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
