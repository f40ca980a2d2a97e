"""The figures of one run, from its samples."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.bench.sample import Sample

PERCENTILES = (50, 90, 95, 99)
Figures = dict[str, Any]


def summarise(samples: Sequence[Sample], config: BenchConfig, *, client_cpu_s: float) -> Figures:
    """Compute all figures of a run.

    Args: client_cpu_s: processor time of this client, which shows whether it was the bottleneck.
    """
    ends = [sample.last_s if sample.last_s is not None else sample.sent_s for sample in samples]
    duration_s = max(ends) - min(sample.due_s for sample in samples)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    good = [sample for sample in samples if is_good(sample, config)]
    wanted = [sample for sample in samples if sample.outcome != "cancelled"]
    figures: Figures = {
        "requests": len(samples),
        "complete": sum(sample.outcome == "complete" for sample in samples),
        "cancelled": sum(sample.outcome == "cancelled" for sample in samples),
        "failed": dict(Counter(sample.error[0] for sample in samples if sample.error is not None)),
        "first_errors": _first_errors(samples),
        "duration_s": duration_s,
        "requests_per_s": sum(sample.outcome == "complete" for sample in samples) * per_s,
        "prompt_tokens_per_s": sum(sample.prompt_tokens for sample in samples) * per_s,
        "output_tokens_per_s": sum(sample.output_tokens for sample in samples) * per_s,
        "output_tokens": sum(sample.output_tokens for sample in samples),
        "good_requests_per_s": len(good) * per_s,
        "good_share": len(good) / len(wanted) if wanted else 0.0,
        **latencies(samples),
        "by_kind": {
            kind: latencies([sample for sample in samples if sample.kind == kind])
            for kind in sorted({sample.kind for sample in samples})
        },
        "by_turn": [
            latencies([sample for sample in samples if sample.turn == turn])["first_token_ms"]
            for turn in sorted({sample.turn for sample in samples})
        ],
        "client": {
            "cpu_share": client_cpu_s * per_s,
            "latest_send_ms": 1000 * max(sample.sent_s - sample.due_s for sample in samples),
        },
    }
    reports = [sample.kv for sample in samples if sample.kv is not None]
    if reports:
        figures["kv"] = {
            "methods": dict(Counter(report["method"] for report in reports)),
            "shipped_bytes": sum(report["shipped_bytes"] for report in reports),
            "full_bytes": sum(report["full_bytes"] for report in reports),
            "reused_tokens": sum(report["reused_tokens"] for report in reports),
            "prefill_ms": _spread(report["prefill_ms"] for report in reports),
            "transfer_ms": _spread(report["transfer_ms"] for report in reports),
        }
    return figures


def latencies(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the milliseconds to the first token, per further token (mean of a request), between two events,
    and in total."""
    return {
        "first_token_ms": _spread(_ms(sample.first_token_s for sample in samples)),
        "per_token_ms": _spread(_ms(sample.per_token_s for sample in samples)),
        "between_tokens_ms": _spread(1000 * gap_s for sample in samples for gap_s in sample.between_s),
        "total_ms": _spread(_ms(sample.total_s for sample in samples)),
    }


def is_good(sample: Sample, config: BenchConfig) -> bool:
    """Return whether a request is complete and within every bound."""
    found = (
        (sample.first_token_s, config.first_token_bound_s),
        (sample.per_token_s, config.per_token_bound_s),
        (sample.total_s, config.total_bound_s),
    )
    return sample.outcome == "complete" and all(
        not bound_s or value_s is None or value_s <= bound_s for value_s, bound_s in found
    )


def median_of(runs: Sequence[Figures]) -> Figures:
    """Compute the median of each figure over runs; failures are added up, other text and counts by name are
    the first run's."""
    median: Figures = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs if name in run]
        if isinstance(first, dict) and name not in ("failed", "methods"):
            median[name] = median_of(values)
        elif isinstance(first, int | float):
            median[name] = statistics.median(values)
        elif name == "failed":
            median[name] = dict(sum((Counter(value) for value in values), Counter()))
        else:
            median[name] = first
    return median


def _first_errors(samples: Iterable[Sample]) -> dict[str, str]:
    """Return the message of the first failure of each category."""
    said: dict[str, str] = {}
    for sample in samples:
        if sample.error is not None:
            said.setdefault(*sample.error)
    return said


def _ms(values_s: Iterable[float | None]) -> list[float]:
    return [1000 * value_s for value_s in values_s if value_s is not None]


def _spread(values: Iterable[float]) -> dict[str, float]:
    """Return mean, percentiles and maximum; empty without values."""
    found = list(values)
    if not found:
        return {}
    cuts = np.percentile(found, PERCENTILES)
    named = {f"p{percent}": float(cut) for percent, cut in zip(PERCENTILES, cuts, strict=True)}
    return {"mean": statistics.fmean(found), **named, "max": max(found)}
