"""`/metrics`: the router's own families and, on request, those of the configured workers.

Each family belongs to one role, so roles never clash. Where several workers of a role have the same family,
each sample gets an `instance` label. Collects nothing itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import httpx
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_logger = structlog.get_logger(__name__)


async def worker_families(
    addresses: Sequence[str], tls: ssl.SSLContext | None = None, timeout_s: float = 2.0
) -> list[Metric]:
    """The families of every address that answers in time, merged.

    Args: tls: with the router's certificate, where workers have certs; None: plain HTTP.
    """
    base = "http" if tls is None else "https"
    async with httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=tls or False) as client:
        texts = await asyncio.gather(*(_fetch(client, f"{base}://{address}") for address in addresses))
    parsed = [
        (address, list(text_string_to_metric_families(text)))
        for address, text in zip(addresses, texts, strict=True)
    ]
    holders = Counter(family.name for _, families in parsed for family in families)
    merged: dict[str, Metric] = {}
    for address, families in parsed:
        for family in families:
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += _labelled(family.samples, address if holders[family.name] > 1 else "")
    return list(merged.values())


def render(registry: CollectorRegistry, extra: Iterable[Metric] = ()) -> bytes:
    """Prometheus text of the registry's families and the extra ones."""
    families = list(extra)
    if not families:
        return generate_latest(registry)
    joined = CollectorRegistry()
    joined.register(_Fixed(families))
    return generate_latest(registry) + generate_latest(joined)


async def _fetch(client: httpx.AsyncClient, base: str) -> str:
    try:
        response = await client.get(f"{base}/metrics")
        response.raise_for_status()
    except httpx.HTTPError as error:
        _logger.warning("worker metrics unavailable", address=base, error=str(error))
        return ""
    return response.text


def _labelled(samples: Iterable[Sample], instance: str) -> list[Sample]:
    if not instance:
        return list(samples)
    return [sample._replace(labels={**sample.labels, "instance": instance}) for sample in samples]


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
