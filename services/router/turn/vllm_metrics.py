"""The router's metrics under the names that dashboards and autoscalers for vLLM read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.telemetry.metrics import RouterMetrics

_CACHE_USE = "vllm:kv_cache_usage_perc"
_LABELS = {"model": "model_name", "finish_reason": "finished_reason", "le": "le"}
"""Labels that are kept, by their name there; over others, samples are added up."""


class VllmMetrics(Collector):
    """Made anew at each scrape from the router's own families, so the two always agree.

    Args: decode: whose arenas the cache's use is of.
    """

    def __init__(self, metrics: RouterMetrics, decode: WorkerPool[Any]) -> None:
        self._decode = decode
        self._families: dict[str, Counter | Gauge | Histogram] = {
            "vllm:num_requests_running": metrics.requests_running,
            "vllm:num_requests_waiting": metrics.requests_waiting,
            "vllm:prompt_tokens": metrics.prompt_tokens,
            "vllm:prompt_tokens_cached": metrics.prompt_tokens_reused,
            "vllm:generation_tokens": metrics.generation_tokens,
            "vllm:request_success": metrics.request_success,
            "vllm:time_to_first_token_seconds": metrics.time_to_first_token,
            "vllm:inter_token_latency_seconds": metrics.inter_token_latency,
            "vllm:time_per_output_token_seconds": metrics.inter_token_latency,
            "vllm:e2e_request_latency_seconds": metrics.e2e_request_latency,
        }

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that registration does not collect."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        for name, own in self._families.items():
            for family in own.collect():
                yield _renamed(name, family)
        yield self._cache_use()

    def _cache_use(self) -> Metric:
        """Return the part of the decode workers' arenas that is in use."""
        family = Metric(_CACHE_USE, "The part of decode's KV memory in use", "gauge")
        models: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for worker in self._decode.workers():
            if (status := worker.status) is not None and status.total_bytes:
                free_and_total = models[status.model.name]
                free_and_total[0] += status.free_bytes
                free_and_total[1] += status.total_bytes
        for model, (free, total) in models.items():
            family.add_sample(_CACHE_USE, {"model_name": model}, 1 - free / total)
        return family


def _renamed(name: str, family: Metric) -> Metric:
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in family.samples:
        ending = sample.name.removeprefix(family.name)
        if ending != "_created":
            labels = {_LABELS[label]: value for label, value in sample.labels.items() if label in _LABELS}
            totals[name + ending, tuple(labels.items())] += sample.value
    renamed = Metric(name, family.documentation, family.type)
    for (full_name, own_labels), value in totals.items():
        renamed.add_sample(full_name, dict(own_labels), value)
    return renamed
