"""A request's compression: which plan it gets, and what its KV cache cost.

The plan is the server's default, or the request's own within what is allowed. A requested quality becomes a
retention, by the model's calibrated curve and the prompt's tokens, before decode reserves anything. The costs
are the `kv` object of answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NotRequired, TypeAlias, TypeVar, cast

from typing_extensions import TypedDict

from kvferry.services.router.completion.engine_fields import KvCompression
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.http.errors import describe
from kvferry.services.router.turn.attempt import TurnStats
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.curves import CurveBook
from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.compression.resolve import why_full
from kvferry.shared.control.messages import HistorySource
from kvferry.shared.errors import ConfigurationError, InvalidRequest
from kvferry.shared.model.spec import ModelSpec

_FALLBACKS = ("rocketkv", "full")
"""Methods in place of a default that does not go with the model."""


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A request's plan, and the quality that it gave."""

    plan: CompressionPlan
    quality: float | None = None


class PlanChooser:
    """The server's default plan, the methods that requests may name, and their quality curves.

    Raises: ConfigurationError where the default method takes no budget and has one, or quality curves cannot
        be read.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.allowed = split_list(config.allowed_methods) or method_names()
        self._default_method = config.default_method
        self._default_budget = Budget(retention=config.default_retention or None)
        try:
            plan_for(config.default_method, budget=self._default_budget)
        except InvalidRequest as error:
            raise ConfigurationError(f"default_retention: {error.message}") from None

        self._calibration = config.calibration
        self._curves = CurveBook.read(config.calibration)

    def all(self) -> tuple[CompressionPlan, ...]:
        """Return the plan of each allowed method for a request without a budget."""
        return tuple(self._plan(KvCompression(), method) for method in self.allowed)

    def default(self, model: ModelSpec) -> CompressionPlan:
        """Return the plan of a prompt whose request does not mention compression."""
        return self._plan(KvCompression(), self.default_method(model))

    def default_method(self, model: ModelSpec) -> str:
        """Return the method of requests that name none: the server's default, if the model supports it."""
        fitting = applicable_methods(model.layers)
        for method in (self._default_method, *_FALLBACKS, *self.allowed):
            if method in fitting and method in self.allowed:
                return method
        return self._default_method

    async def choose(
        self, wanted: KvCompression | None, prompt_token_ids: Sequence[int], model: ModelSpec
    ) -> ChosenPlan:
        """Return the plan of one prompt. Raises: InvalidRequest naming `kv_compression` or its field."""
        wanted = wanted or KvCompression()
        method = self.default_method(model) if wanted.method is None else wanted.method
        if method not in self.allowed:
            raise InvalidRequest(
                f"kv_compression.method is {describe(method)}; it must be one of {', '.join(self.allowed)}",
                param="kv_compression.method",
            )
        if wanted.quality is None:
            return ChosenPlan(plan=self._plan(wanted, method))
        if wanted.parameters:
            raise InvalidRequest(
                "kv_compression.quality uses curves calibrated with the methods' own parameters; with "
                "kv_compression.parameters give token_budget or retention",
                param="kv_compression.quality",
            )
        if self._curves.find(model.fingerprint, method) is None:  # it may have been measured since
            self._curves = await asyncio.to_thread(CurveBook.read, self._calibration)
        if (curve := self._curves.find(model.fingerprint, method)) is None:
            raise self._no_curve(method, model)
        # In a thread, because it reads the whole prompt.
        retention = await asyncio.to_thread(
            curve.retention, wanted.quality, prompt_token_ids, vocab_size=model.vocab_size
        )
        plan = plan_for(method, budget=Budget(retention=retention))
        return ChosenPlan(plan=plan, quality=wanted.quality)

    def _no_curve(self, method: str, model: ModelSpec) -> InvalidRequest:
        if not preset(method).takes_budget:
            problem = f"was given for method {method!r}, which takes no budget"
        else:
            problem = (
                f"needs a curve of method {method!r} calibrated on this model, and there is none; give "
                "token_budget or retention, or run on the router's machine 'kvferry calibrate --model MODEL "
                f"--methods {method}'"
            )
        calibrated = [name for name in self._curves.methods(model.fingerprint) if name in self.allowed]
        return InvalidRequest(
            f"kv_compression.quality {problem} (calibrated: {', '.join(calibrated) or 'none'})",
            param="kv_compression.quality",
        )

    def _plan(self, wanted: KvCompression, method: str) -> CompressionPlan:
        """Return the plan of a request without a quality.

        Raises: InvalidRequest naming `kv_compression` or its field.
        """
        budget = Budget(
            tokens=wanted.token_budget,
            retention=wanted.retention,
            floor_tokens=wanted.min_token_budget,
        )
        if budget == Budget() and method == self._default_method:
            budget = self._default_budget
        return plan_for(method, budget=budget, overrides=wanted.parameters)


_T = TypeVar("_T")
Each: TypeAlias = _T | list[_T | None]
"""A value of all prompts, or those of each."""


class KvReport(TypedDict):
    """What a response's KV cache cost. Bytes are sums over choices, times those of the slowest choice.

    `reason` says why nothing was compressed, with method "full", or that compression saved no bytes of this
    prompt. `quality` and `retention` are there where the request gave a quality, `delta_bytes` where decode
    had retained KV of the session, `kept` and `kept_by_layer` where the request gave `kv_kept_bins`.
    `epsilon_table` is there where bit-widths were weighed by another model's distortion table, since none was
    measured on this one: that model's name.
    `smaller_token_budget` is there where decode was short of memory and used a budget between the request's
    `min_token_budget` and its `token_budget`, `max_tokens` where the request's limit is above the room that
    the context has after the prompt. `session` is there where the turn could not be stored: the session's
    next turn must have the whole conversation.

    Of several prompts, tokens and bytes are sums, too, times those of the slowest and `smaller_token_budget`
    the least. Anything else is a list where the prompts differ: each one's value, or null.
    """

    method: Each[str]
    reason: NotRequired[Each[str]]
    quality: NotRequired[Each[float]]
    retention: NotRequired[Each[float]]
    epsilon_table: NotRequired[Each[str]]
    smaller_token_budget: NotRequired[int]
    max_tokens: NotRequired[Each[int]]
    prompt_tokens: int
    reused_tokens: int
    history: NotRequired[Each[HistorySource]]
    history_tier: NotRequired[Each[str]]
    full_bytes: int
    shipped_bytes: int
    delta_bytes: NotRequired[int]
    cache_bytes: int
    prefill_ms: float
    transfer_ms: float
    kept: NotRequired[Each[list[float]]]
    kept_by_layer: NotRequired[Each[list[list[float]]]]
    session: NotRequired[Literal["not_stored"]]


_ADDED: Mapping[str, Callable[[list[Any]], Any]] = {
    "prompt_tokens": sum,
    "reused_tokens": sum,
    "full_bytes": sum,
    "shipped_bytes": sum,
    "delta_bytes": sum,
    "cache_bytes": sum,
    "prefill_ms": max,
    "transfer_ms": max,
    "smaller_token_budget": min,
}
"""How the values of several turns become one; those of other keys become a list, unless they are the same."""


def of_prompts(reports: Sequence[KvReport]) -> KvReport:
    """Return the report of several prompts, of which there is at least one."""
    return cast(KvReport, _together(reports))


def kv_report(
    chosen: ChosenPlan | None,
    num_prompt_tokens: int,
    stats: Sequence[TurnStats],
    *,
    num_kept_bins: int = 0,
    max_tokens: int | None = None,
) -> KvReport:
    """Return the report of one prompt.

    Args:
        chosen: the request's plan; None where it failed before it had one.
        stats: of each choice's turn.
        num_kept_bins: the request's `kv_kept_bins`.
        max_tokens: the answer's limit where it is below the request's.
    """
    first, method = stats[0].first, stats[0].method
    report: dict[str, Any] = {
        "method": method,
        "prompt_tokens": num_prompt_tokens,
        "reused_tokens": first.reused_tokens if first is not None else 0,
        "full_bytes": first.full_bytes if first is not None else 0,
        **_together([_costs(turn) for turn in stats]),
        "max_tokens": max_tokens,
    }
    if chosen is not None:
        plan = chosen.plan
        if method == "full":
            report["reason"] = why_full(plan, num_prompt_tokens=num_prompt_tokens)
        else:
            report["reason"] = _why_not_compress(plan, stats[0])
        if chosen.quality is not None and plan.budget.retention is not None:
            report["quality"], report["retention"] = chosen.quality, plan.budget.retention
    if first is not None:
        report["epsilon_table"] = first.epsilon_table or None
        report["history"], report["history_tier"] = first.history_source, first.history_tier or None
        if fractions := stats[0].retained_fractions:
            num_bins = min(num_kept_bins, num_prompt_tokens)
            layers = [fractions[start : start + num_bins] for start in range(0, len(fractions), num_bins)]
            report["kept_by_layer"] = [[round(fraction, 4) for fraction in layer] for layer in layers]
            report["kept"] = [round(fmean(column), 4) for column in zip(*layers, strict=True)]
    return cast(KvReport, {name: value for name, value in report.items() if value is not None})


def _costs(turn: TurnStats) -> dict[str, Any]:
    return {
        "shipped_bytes": turn.shipped_bytes,
        "cache_bytes": turn.cache_bytes,
        "prefill_ms": round(turn.prefill_s * 1000, 3),
        "transfer_ms": round(turn.transfer_s * 1000, 3),
        "smaller_token_budget": turn.smaller_budget,
        "delta_bytes": turn.delta_bytes,
    }


def _together(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(reports) == 1:
        return dict(reports[0])
    together: dict[str, Any] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [report.get(name) for report in reports]
        if name in _ADDED:
            given = [value for value in values if value is not None]
            together[name] = _ADDED[name](given) if given else None
        else:
            together[name] = values[0] if all(value == values[0] for value in values) else values
    return together


def _why_not_compress(plan: CompressionPlan, turn: TurnStats) -> str | None:
    """Tell a client that its method was not worth using for this prompt.

    Returns: None if it was, and if bytes do not show it: with an attention that reads a part of what was
        shipped, and after a delta or several attempts.
    """
    first = turn.first
    if first is None or turn.replays or turn.delta_bytes is not None or plan.attention.name != "dense":
        return None
    if not turn.shipped_bytes or turn.shipped_bytes < first.full_bytes:
        return None
    return (
        f"method {first.method} shipped {turn.shipped_bytes} bytes, no fewer than the {first.full_bytes} of "
        "the full KV in the checkpoint's dtype: the prompt is too short, or rows are in a wider dtype"
    )
