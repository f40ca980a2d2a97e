"""The `usage` and `kv` objects of a response: tokens, bytes and times of its turns, and why nothing was
compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from kvferry.services.router.turn.attempt import TurnStats
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.compression.resolve import why_full
from kvferry.shared.control.messages import HistoryWay


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a response; `cached_tokens` equals `kv.reused_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class KvReport(TypedDict):
    """What a response's KV cache cost. Bytes are sums over choices, times those of the slowest choice.

    `reason` says why nothing was compressed; it comes with method "full". `quality` and `retention` are there
    where the request gave a quality, `delta_bytes` where decode had retained KV of the session, `kept` where
    the request gave `kv_kept_bins`.
    """

    method: str
    reason: NotRequired[str]
    quality: NotRequired[float]
    retention: NotRequired[float]
    prompt_tokens: int
    reused_tokens: int
    history: NotRequired[HistoryWay]
    history_tier: NotRequired[str]
    full_bytes: int
    shipped_bytes: int
    delta_bytes: NotRequired[int]
    cache_bytes: int
    prefill_ms: float
    transfer_ms: float
    kept: NotRequired[list[float]]


def kv_report(
    plan: CompressionPlan | None, quality: float | None, num_prompt_tokens: int, stats: Sequence[TurnStats]
) -> KvReport:
    """The report of one response.

    Args:
        plan: the request's; None where it failed before it had one.
        quality: the quality that the request gave.
        stats: of each choice's turn.
    """
    first = stats[0].first
    report = KvReport(
        method=stats[0].method,
        prompt_tokens=num_prompt_tokens,
        reused_tokens=first.reused_tokens if first is not None else 0,
        full_bytes=first.full_bytes if first is not None else 0,
        shipped_bytes=0,
        cache_bytes=0,
        prefill_ms=0.0,
        transfer_ms=0.0,
    )
    for turn in stats:
        report["shipped_bytes"] += turn.shipped_bytes
        report["cache_bytes"] += turn.cache_bytes
        report["prefill_ms"] = max(report["prefill_ms"], round(turn.prefill_s * 1000, 3))
        report["transfer_ms"] = max(report["transfer_ms"], round(turn.transfer_s * 1000, 3))
        if turn.delta_bytes is not None:
            report["delta_bytes"] = report.get("delta_bytes", 0) + turn.delta_bytes
    if plan is not None:
        if report["method"] == "full":
            report["reason"] = why_full(plan, num_prompt_tokens=num_prompt_tokens)
        if quality is not None and plan.budget.retention is not None:
            report["quality"], report["retention"] = quality, plan.budget.retention
    if first is not None:
        if first.history_way is not None:
            report["history"] = first.history_way
        if first.history_tier:
            report["history_tier"] = first.history_tier
        if first.kept:
            report["kept"] = [round(fraction, 4) for fraction in first.kept]
    return report
