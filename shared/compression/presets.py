"""The methods by name, each a `CompressionPlan` as data. Adding a method is one entry of `PRESETS`, or an
entry point of another package (`installed.py`).

The router calls `plan_for` for each request and sends the plan to decode, which resolves it (`resolve.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvferry.shared.compression.installed import installed_methods
from kvferry.shared.compression.plan import Budget, CompressionPlan, ParamValue, Part
from kvferry.shared.errors import ConfigurationError, InvalidRequest

_COMPACTOR: dict[str, ParamValue] = {
    "sketch": "gaussian",
    "sketch_columns": 48,
    "solver": "svd",
    "centered": False,
    "seed": 0,
    "chunk_tokens": 256,
    "scaled": True,
    "leverage_weight": 0.3,
    "sinks": 8,
    "recents": 4,
}

PRESETS: Mapping[str, CompressionPlan] = {
    "full": CompressionPlan(method="full"),
    "snapkv": CompressionPlan(
        method="snapkv",
        scorer=Part(name="window_attention", params={"window": 32, "pooling": "avg", "kernel_size": 7}),
        attention=Part(name="dense"),
        budget=Budget(tokens=2048),
    ),
    "rocketkv": CompressionPlan(
        method="rocketkv",
        scorer=Part(name="window_attention", params={"window": 32, "pooling": "max", "kernel_size": 63}),
        attention=Part(name="hsa"),
        budget=Budget(tokens=512),
    ),
    "exact-topk": CompressionPlan(
        method="exact-topk", attention=Part(name="exact_topk"), budget=Budget(tokens=512)
    ),
    "quest": CompressionPlan(
        method="quest",
        attention=Part(name="quest", params={"dense_layers": 2}),
        budget=Budget(tokens=512),
    ),
    "sparq": CompressionPlan(method="sparq", attention=Part(name="sparq"), budget=Budget(tokens=512)),
    "streamingllm": CompressionPlan(
        method="streamingllm",
        scorer=Part(name="streaming", params={"sinks": 4}),
        budget=Budget(tokens=2048),
    ),
    "h2o": CompressionPlan(
        method="h2o",
        scorer=Part(name="heavy_hitters"),
        attention=Part(name="evict"),
        budget=Budget(tokens=2048),
    ),
    "d2o": CompressionPlan(
        method="d2o",
        scorer=Part(name="accumulated_attention"),
        attention=Part(name="merge"),
        # as the authors' code; with the paper's F, also over its mean, a layer with sharp attention gets
        # next to nothing
        layer_allocation=Part(name="attention_variance", params={"normalisation": "minmax"}),
        # a fifth of the cache, as in most of the paper's tables
        budget=Budget(retention=0.2),
    ),
    "rocketkv-d2o": CompressionPlan(
        method="rocketkv-d2o",
        scorer=Part(name="window_attention", params={"window": 32, "pooling": "max", "kernel_size": 63}),
        attention=Part(name="hsa"),
        layer_allocation=Part(name="attention_variance", params={"normalisation": "minmax"}),
        budget=Budget(tokens=512),
    ),
    "pyramidkv": CompressionPlan(
        method="pyramidkv",
        scorer=Part(name="window_attention", params={"window": 32, "pooling": "avg", "kernel_size": 7}),
        layer_allocation=Part(name="pyramid", params={"window": 32, "beta": 20}),
        budget=Budget(tokens=2048),
    ),
    "compactor": CompressionPlan(
        method="compactor",
        scorer=Part(name="compactor", params=_COMPACTOR),
        # a quarter keeps 93 % of the LongBench score that Llama 3.1 has with a full cache (table 1)
        budget=Budget(retention=0.25),
    ),
    "compactor-hsa": CompressionPlan(
        method="compactor-hsa",
        scorer=Part(name="compactor", params=_COMPACTOR),
        attention=Part(name="hsa"),
        budget=Budget(tokens=512),
    ),
    "rdkv": CompressionPlan(
        method="rdkv",
        representation=Part(
            name="rdkv",
            params={
                # one of the paper's five; the ratios between widths differ little between models
                "epsilon_table": "LLaMA-3.1-8B",
                "window": 32,
                "kernel_size": 5,
                "channel_weights": "norms",
                "widths": "0,2,4,8,16",
                # each segment has its own scale and minimum for every K channel: 8 bytes, 8 % of 256 tokens
                # at a tenth of their bits; shorter completions are not packed
                "rebudget_tokens": 256,
            },
        ),
        budget=Budget(tokens=512),
    ),
    "rdkv-hsa": CompressionPlan(
        method="rdkv-hsa",
        attention=Part(name="hsa"),
        representation=Part(
            name="rdkv",
            params={
                "epsilon_table": "LLaMA-3.1-8B",
                "window": 32,
                "kernel_size": 5,
                "channel_weights": "norms",
                "widths": "0,2,4,8,16",
                "rebudget_tokens": 0,
            },
        ),
        budget=Budget(tokens=512),
    ),
    "adakv": CompressionPlan(
        method="adakv",
        scorer=Part(name="window_attention", params={"window": 32, "pooling": "avg", "kernel_size": 7}),
        representation=Part(name="ragged", params={"floor": 0.2}),
        budget=Budget(tokens=2048),
    ),
    "think": CompressionPlan(
        method="think",
        representation=Part(name="think", params={"channel_retention": 0.5, "window": 32}),
    ),
    "snapkv-think": CompressionPlan(
        method="snapkv-think",
        scorer=Part(name="window_attention", params={"window": 32, "pooling": "avg", "kernel_size": 7}),
        representation=Part(name="think", params={"channel_retention": 0.5, "window": 32}),
        budget=Budget(tokens=2048),
    ),
    "kivi": CompressionPlan(method="kivi", representation=Part(name="kivi", params={"bits": 4})),
    "snapkv-kivi": CompressionPlan(
        method="snapkv-kivi",
        scorer=Part(name="window_attention", params={"window": 32, "pooling": "avg", "kernel_size": 7}),
        representation=Part(name="kivi", params={"bits": 4}),
        budget=Budget(tokens=2048),
    ),
    "random": CompressionPlan(
        method="random", scorer=Part(name="random", params={"seed": 0}), budget=Budget(tokens=2048)
    ),
}


def method_names() -> tuple[str, ...]:
    """The methods that a request may name; those of installed packages come last."""
    return (*PRESETS, *_outside())


def preset(method: str) -> CompressionPlan:
    """A method's plan. Raises: InvalidRequest: no method has this name."""
    plan = PRESETS.get(method) or _outside().get(method)
    if plan is None:
        raise InvalidRequest(
            f"kv_compression.method is {method!r}; it must be one of {', '.join(method_names())}",
            param="kv_compression.method",
        )
    return plan


def plan_for(
    method: str,
    *,
    budget: Budget | None = None,
    overrides: Mapping[str, ParamValue] | None = None,
    skip_layers: tuple[int, ...] = (),
) -> CompressionPlan:
    """The plan of a named method.

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
    return _overridden(plan, overrides) if overrides else plan


def _overridden(plan: CompressionPlan, overrides: Mapping[str, ParamValue]) -> CompressionPlan:
    all_parts = (plan.scorer, plan.attention, plan.layer_allocation, plan.representation)
    parts = [part for part in all_parts if part is not None]
    names = {name: None for part in parts for name in part.params}
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

    return replace(
        plan,
        scorer=changed(plan.scorer) if plan.scorer is not None else None,
        attention=changed(plan.attention),
        layer_allocation=changed(plan.layer_allocation),
        representation=changed(plan.representation),
    )


def _outside() -> dict[str, CompressionPlan]:
    plans = {name: method.plan for name, method in installed_methods().items()}
    taken = sorted(set(plans) & set(PRESETS))
    if taken:
        raise ConfigurationError(f"installed packages name methods {', '.join(taken)}; the package has them")
    return plans
