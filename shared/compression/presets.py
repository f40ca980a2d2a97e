"""The methods by name, each a `CompressionPlan` as data. Adding a method is one entry of `PRESETS`, or an
entry point of another package (`interface.Method`).

The router calls `plan_for` for each request and sends the plan to decode, which resolves it (`resolve.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from kvferry.shared.compression.plan import (
    DRAFT_KERNEL_SIZE,
    DRAFT_TOKENS,
    METHOD_GROUP,
    REBUDGET_TOKENS,
    RECONSTRUCTION,
    Budget,
    CompressionPlan,
    ParamValue,
    Part,
)
from kvferry.shared.compression.rdkv.epsilon import OWN_TABLE
from kvferry.shared.errors import ConfigurationError, InvalidRequest

_COMPACTOR = Part(
    name="compactor",
    params={
        "sketch": "gaussian",
        "sketch_columns": 48,
        "solver": "gram",
        "centered": False,
        "seed": 0,
        "chunk_tokens": 256,
        "scaled": True,
        "leverage_weight": 0.3,
        "sinks": 8,
        "recents": 4,
    },
)
_LEVERAGE = Part(name=_COMPACTOR.name, params={**_COMPACTOR.params, "leverage_weight": 1.0})
_BETWEEN: dict[str, ParamValue] = {"sinks": 8, "recents": 4}
"""As in `_COMPACTOR`: to be comparable, methods that do not know the question protect the same rows."""
_RECONSTRUCTED = Part(name=RECONSTRUCTION, params={"chunk_tokens": 2048, "lead_tokens": 8, **_BETWEEN})
_KEYDIFF = Part(name="keydiff", params=_BETWEEN)

_WINDOW = 32
_KERNEL_SIZE = 9
"""One window and one pooling kernel for all methods that score by the last queries, as comparisons need (RDKV
section 4). The papers have average 7 (SnapKV), maximum 63 (RocketKV) and average 5 (RDKV). A kernel must
reach from the tokens that a question matches to the answer beside them: on the demo model 5 loses most
answers. At 2.5 % of the bytes 9 is the best for snapkv by 12 points or more, and for rdkv within 3 of 13 and
21 (benchmarks/results/eval/kernels).

Deviation: RocketKV (appendix A.3) takes a window of 128 queries in conversations. A window is at most a
turn's new tokens, and the server selects again for each turn, so a question of up to 32 tokens selects the
same rows with both; answers are as often right (benchmarks/results/eval/rocketkv-window). If the first turn's
selection served all turns, 128 would be better, and both far from full."""
_OBSERVED = Part(
    name="window_attention",
    params={"window": _WINDOW, "pooling": "avg", "kernel_size": _KERNEL_SIZE, "recents": 8},
)
_GENERATED = Part(name=_OBSERVED.name, params={**_OBSERVED.params, REBUDGET_TOKENS: 256})
"""Of plans with `rebudget_tokens` above 0, whatever their scorer: decode observes the last queries only."""
_RDKV: dict[str, ParamValue] = {
    "epsilon_table": OWN_TABLE,
    "window": _WINDOW,
    "kernel_size": _KERNEL_SIZE,
    "channel_weights": "norms",
    "widths": "0,2,4,8,16",
    # Each segment has its own scales and minima: 4 bytes for every K channel and group of 64 retained tokens.
    # A channel of 65 to 128 of them has 8 bytes, 8 % of what 256 tokens take at a tenth of their bits.
    # Shorter completions are not packed.
    "rebudget_tokens": 256,
}
_DRAFT: dict[str, ParamValue] = {DRAFT_TOKENS: 8, DRAFT_KERNEL_SIZE: 5, "widths": "0,4,8,16"}
"""The draft attends to the answer itself, so its kernel need not reach there from the question, and the
paper's 5 suffices. With 7 and 9, bits go to more tokens beside it (benchmarks/results/eval/draft-kernels).

Deviation: no width of 2. The tokens that a head retains share the bits of its K channels, and many tokens of
2 bits in V leave few for K (the same results)."""
_HSA = Part(name="hsa")
_PACKED = Part(name="packed", params={"k_bits": 4, "v_bits": 4})
_KIVI = Part(name="kivi", params={"bits": 4})
_MEASURED = Part(name="attention_variance", params={"normalisation": "minmax"})
"""As the authors' code; with the paper's F, also over its mean, a layer with sharp attention gets next to
nothing."""
_PARTS = ("scorer", "attention", "layer_allocation", "representation")
"""The parts whose parameters a request may change, in the order in which errors name them."""
_SELECTED = Budget(tokens=2048)
_READ = Budget(tokens=512)

PRESETS: Mapping[str, CompressionPlan] = {
    plan.method: plan
    for plan in (
        CompressionPlan(method="full"),
        CompressionPlan(method="snapkv", scorer=_OBSERVED, budget=_SELECTED),
        CompressionPlan(method="rocketkv", scorer=_OBSERVED, attention=_HSA, budget=_READ),
        CompressionPlan(
            method="h2o",
            scorer=Part(name="heavy_hitters"),
            attention=Part(name="evict"),
            budget=_SELECTED,
        ),
        CompressionPlan(
            method="d2o",
            scorer=Part(name="accumulated_attention"),
            attention=Part(name="merge"),
            layer_allocation=_MEASURED,
            # a fifth of the cache, as in most of the paper's tables
            budget=Budget(retention=0.2),
        ),
        CompressionPlan(
            method="rocketkv-d2o",
            scorer=_OBSERVED,
            attention=_HSA,
            layer_allocation=_MEASURED,
            budget=_READ,
        ),
        CompressionPlan(
            method="compactor",
            scorer=_COMPACTOR,
            # a quarter keeps 93 % of the LongBench score that Llama 3.1 has with a full cache (table 1)
            budget=Budget(retention=0.25),
        ),
        CompressionPlan(method="compactor-hsa", scorer=_COMPACTOR, attention=_HSA, budget=_READ),
        CompressionPlan(
            method="compactor-kivi",
            scorer=_COMPACTOR,
            representation=_PACKED,
            budget=Budget(retention=0.05),
        ),
        CompressionPlan(
            method="compactor-rdkv",
            scorer=_LEVERAGE,
            representation=Part(name="rdkv", params=_RDKV),
            budget=Budget(retention=0.025),
        ),
        CompressionPlan(
            method="kvzip",
            scorer=_RECONSTRUCTED,
            # of the paper's "3-4x"
            budget=Budget(retention=0.3),
        ),
        CompressionPlan(
            method="kvzip-rdkv",
            scorer=_RECONSTRUCTED,
            representation=Part(name="rdkv", params=_RDKV),
            budget=Budget(retention=0.1),
        ),
        CompressionPlan(method="keydiff", scorer=_KEYDIFF, budget=Budget(retention=0.25)),
        CompressionPlan(
            method="keydiff-rdkv",
            scorer=_KEYDIFF,
            representation=Part(name="rdkv", params=_RDKV),
            budget=Budget(retention=0.1),
        ),
        CompressionPlan(
            method="rdkv-union",
            scorer=_LEVERAGE,
            representation=Part(name="rdkv", params={**_RDKV, "with_attention": True}),
            budget=_READ,
        ),
        CompressionPlan(
            method="rdkv-draft",
            representation=Part(name="rdkv", params={**_RDKV, **_DRAFT}),
            budget=_READ,
        ),
        CompressionPlan(
            method="rocketkv-kivi",
            scorer=_OBSERVED,
            attention=_HSA,
            representation=_PACKED,
            budget=_READ,
        ),
        CompressionPlan(method="rdkv", representation=Part(name="rdkv", params=_RDKV), budget=_READ),
        CompressionPlan(
            method="rdkv-hsa",
            attention=_HSA,
            representation=Part(name="rdkv", params={**_RDKV, "rebudget_tokens": 0}),
            budget=_READ,
        ),
        CompressionPlan(
            method="adakv",
            scorer=_OBSERVED,
            representation=Part(name="ragged", params={"floor": 0.2}),
            budget=_SELECTED,
        ),
        CompressionPlan(method="kivi", representation=_KIVI),
        CompressionPlan(method="snapkv-kivi", scorer=_OBSERVED, representation=_KIVI, budget=_SELECTED),
    )
}


def check_names(option: str, names: Iterable[str]) -> None:
    """Check the methods that an option names. None is loaded, so that options need not wait for torch.

    Raises: ConfigurationError: there is no such method.
    """
    known = (*PRESETS, *sorted(entry.name for entry in entry_points(group=METHOD_GROUP)))
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigurationError(f"{option} is {name!r}; {hint}There are {', '.join(known)}")


def _plans() -> Mapping[str, CompressionPlan]:
    from kvferry.shared.compression.interface import installed_methods, with_installed

    installed = {name: method.plan for name, method in installed_methods().items()}
    return with_installed("methods", PRESETS, installed)


def method_names() -> tuple[str, ...]:
    """Return the methods that a request may name; those of installed packages come last."""
    return tuple(_plans())


def preset(method: str) -> CompressionPlan:
    """Return a method's plan. Raises: InvalidRequest: no method has this name."""
    plans = _plans()
    if method not in plans:
        raise InvalidRequest(
            f"kv_compression.method is {method!r}; it must be one of {', '.join(plans)}",
            param="kv_compression.method",
        )
    return plans[method]


def plan_for(
    method: str,
    *,
    budget: Budget | None = None,
    overrides: Mapping[str, ParamValue] | None = None,
    skip_layers: tuple[int, ...] = (),
) -> CompressionPlan:
    """Make the plan of a named method.

    Args:
        budget: replaces the preset's if one of its fields is set.
        overrides: new values of parameters in the preset's parts (`window`, `pooling`, `dense_layers`). If
            several parts have a parameter of that name, all are changed.
        skip_layers: layers that are not compressed, in addition to the preset's.

    Raises:
        InvalidRequest: unknown method, a budget for a method that keeps everything, an unknown parameter.
    """
    plan = preset(method)
    if skip_layers:
        plan = replace(plan, skip_layers=tuple(sorted({*plan.skip_layers, *skip_layers})))
    if budget is not None and budget != Budget():
        if not plan.takes_budget:
            field = "token_budget" if budget.tokens is not None else "retention"
            raise InvalidRequest(
                f"{field} was given for method {method!r}, which keeps every token and takes no budget",
                param=f"kv_compression.{field}",
            )
        plan = replace(plan, budget=budget)
    return _without_defaults(_overridden(plan, overrides) if overrides else plan)


def _without_defaults(plan: CompressionPlan) -> CompressionPlan:
    """Leave out parameters of the format that plans may lack where they have their defaults: workers of an
    earlier release refuse a plan with a name that they do not know."""
    from kvferry.shared.compression.formats import format_class

    part = plan.representation
    defaults = format_class(part).defaults
    if not defaults.keys() & part.params.keys():
        return plan
    params = {
        name: value
        for name, value in part.params.items()
        if (type(value), value) != (type(defaults.get(name)), defaults.get(name))
    }
    return replace(plan, representation=replace(part, params=params))


def _overridden(plan: CompressionPlan, overrides: Mapping[str, ParamValue]) -> CompressionPlan:
    parts = [part for name in _PARTS if (part := getattr(plan, name)) is not None]
    names = {name: None for part in parts for name in part.params}
    if plan.scorer is not None and REBUDGET_TOKENS not in names:
        names[REBUDGET_TOKENS] = None
        if overrides.get(REBUDGET_TOKENS, 0) != 0:
            plan = replace(plan, generated=_GENERATED)
    unknown = sorted(set(overrides) - set(names))
    if unknown:
        raise InvalidRequest(
            f"kv_compression.parameters has {', '.join(unknown)}; method {plan.method!r} takes "
            f"{', '.join(names) or 'none'}",
            param="kv_compression.parameters",
        )

    def changed(part: Part) -> Part:
        params = {name: overrides.get(name, value) for name, value in part.params.items()}
        for name, value in part.params.items():
            if isinstance(value, float) and type(params[name]) is int:
                params[name] = float(params[name])  # JSON may write 1 for 1.0
        return replace(part, params=params)

    given: dict[str, Any] = {name: getattr(plan, name) for name in (*_PARTS, "generated")}
    given.update({name: changed(part) for name, part in given.items() if part is not None})
    return replace(plan, **given)
