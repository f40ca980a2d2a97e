"""What a response's KV cache cost: the `kv` object of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NotRequired, TypeVar, cast

from typing_extensions import TypedDict

from kvferry.services.router.completion.plans import ChosenPlan
from kvferry.services.router.turn.attempt import TurnStats
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.compression.resolve import why_full
from kvferry.shared.control.messages import HistorySource

_T = TypeVar("_T")
Each = _T | list[_T | None]
"""A value of all prompts, or those of each."""


class KvReport(TypedDict):
    """What a response's KV cache cost. Bytes are sums over choices, times those of the slowest choice.

    `reason` says why nothing was compressed, with method "full", or that compression saved no bytes of this
    prompt; of the method "auto", why the router chose this one. `quality` and `retention` are there where the
    request gave a quality, `delta_bytes` where decode had retained KV of the session, `kept` and
    `kept_by_layer` where the request gave `kv_kept_bins`. `smaller_token_budget` is there where decode was
    short of memory and used a budget between the request's `min_token_budget` and its `token_budget`,
    `max_tokens` where the request's limit is above the room that the context has after the prompt.

    Of several prompts, tokens and bytes are sums, too, times those of the slowest and `smaller_token_budget`
    the least. Anything else is a list where the prompts differ: each one's value, or null.
    """

    method: Each[str]
    reason: NotRequired[Each[str]]
    quality: NotRequired[Each[float]]
    retention: NotRequired[Each[float]]
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
    """The report of several prompts, of which there is at least one."""
    return cast(KvReport, _together(reports))


def kv_report(
    chosen: ChosenPlan | None,
    num_prompt_tokens: int,
    stats: Sequence[TurnStats],
    *,
    num_kept_bins: int = 0,
    max_tokens: int | None = None,
) -> KvReport:
    """The report of one prompt.

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
        if chosen.reason and method in (plan.method, ""):
            report["reason"] = chosen.reason
        elif method == "full":
            report["reason"] = why_full(plan, num_prompt_tokens=num_prompt_tokens)
        else:
            report["reason"] = _why_not_compress(plan, stats[0])
        if chosen.quality is not None and plan.budget.retention is not None:
            report["quality"], report["retention"] = chosen.quality, plan.budget.retention
    if first is not None:
        report["history"], report["history_tier"] = first.history_source, first.history_tier or None
        if fractions := first.retained_fractions:
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
    """For a client: that its method was not worth using for this prompt.

    Returns: None where it was, and where bytes do not tell: with an attention that reads a part of what was
        shipped, and of a delta or several attempts.
    """
    first = turn.first
    if first is None or turn.replays or turn.delta_bytes is not None or plan.attention.name != "dense":
        return None
    if not turn.shipped_bytes or turn.shipped_bytes < first.full_bytes:
        return None
    return (
        f"method {first.method} shipped {turn.shipped_bytes} bytes, no fewer than the {first.full_bytes} of "
        "the full KV: it saves nothing for a prompt as short as this"
    )
