"""The HTTP routes of models, methods and operations: health, metrics, the API's description and two pages.

`/metrics` has the router's own families and, on request, those of the configured workers. Each family belongs
to one role, so roles never clash. Where several workers of a role have the same family, each sample gets an
`instance` label.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import structlog
from fastapi import APIRouter, Depends, Request
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response

from kvferry.models import CALIBRATION_TEXT, DEMO_EXAMPLE
from kvferry.services.router.api.answers import Example, Listing, Method, Model, Status, Version
from kvferry.services.router.api.completions import ERRORS, Shared, keyed_router, named_model
from kvferry.services.router.config import split_list
from kvferry.services.router.playground import page_response
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.version import VERSION
from kvferry.shared.trust.certs import Certs
from kvferry.shared.wire.messages import PROTOCOL_VERSION

_METRICS_TIMEOUT_S = 2.0
_STORY, _STORY_CHARACTERS = CALIBRATION_TEXT / "engineers-thumb.txt", 8000
_FACT = "The ferry to Kvitsund leaves at 16:45 from pier 7."
_QUESTION = "When does the ferry to Kvitsund leave?"
_EXAMPLE_BUDGET = {"token_budget": 128}

keyed = keyed_router()
unkeyed = APIRouter(redirect_slashes=False, responses=ERRORS)


def _check_access(request: Request, services: Shared) -> None:
    """Check the key if the options say that metrics need one. Pages contain no user's data and are open."""
    if not services.config.metrics_are_open:
        request.app.state.auth.owner(request.headers, "metrics")


def _text(media_type: str) -> dict[str, Any]:
    """Describe a route whose answer is not JSON; its errors are."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {"response_class": Response, "responses": {200: {"content": content}}}


restricted = APIRouter(redirect_slashes=False, responses=ERRORS, dependencies=[Depends(_check_access)])


async def _model(request: Request, services: Shared, spec: ModelSpec, name: str) -> Model:
    """Describe a model. Args: name: the model's own or an alias."""
    started_at = request.app.state.started_at
    capabilities = await services.prompts.capabilities(spec)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": spec.name,
        "created": started_at,
        "created_at": datetime.fromtimestamp(started_at, UTC).isoformat(),
        "owned_by": "kvferry",
        "max_model_len": spec.max_model_len,
        "max_input_tokens": spec.max_model_len - 1,
        "capabilities": {name: {"supported": supported} for name, supported in capabilities.items()},
        "weights": spec.weights,
        "methods": [name for name in applicable_methods(spec.layers) if name in services.plans.allowed],
    }


@keyed.get("/v1/models", summary="The model that is served, by each of its names")
async def list_models(request: Request, services: Shared) -> Listing[Model]:
    spec = services.runner.model()
    names = dict.fromkeys((spec.name, *services.config.model_names))
    return {"object": "list", "data": [await _model(request, services, spec, name) for name in names]}


@keyed.get("/v1/models/{model:path}", summary="One model")
async def get_model(request: Request, services: Shared, model: str) -> Model:
    return await _model(request, services, named_model(services, model), model)


@keyed.get("/v1/methods", summary="The methods that requests may name")
async def list_methods(services: Shared) -> Listing[Method]:
    default = services.plans.default_method(services.runner.model())
    data = [
        Method(
            id=plan.method,
            object="method",
            default=plan.method == default,
            token_budget=plan.budget.tokens,
            retention=plan.budget.retention,
            scorer=plan.scorer.name if plan.scorer is not None else None,
            layer_allocation=plan.layer_allocation.name,
            representation=plan.representation.name,
            attention=plan.attention.name,
        )
        for plan in services.plans.all()
    ]
    return {"object": "list", "data": data}


@keyed.get("/version", summary="Versions of the package and of its protocol")
async def get_version(services: Shared) -> Version:
    runner = services.runner
    return {
        "version": VERSION,
        "protocol_version": PROTOCOL_VERSION,
        "kernels": {pool.role: pool.kernel_paths() for pool in (runner.prefill, runner.decode)},
    }


@unkeyed.get("/health", summary="Whether the server is alive")
async def health() -> Status:
    return {"status": "ok"}


@unkeyed.get("/ready", summary="Whether turns succeed")
async def ready(services: Shared) -> Status:
    problem = services.readiness.problem()
    if problem is not None:
        raise problem
    return {"status": "ready"}


@restricted.get("/metrics", summary="Prometheus metrics; ?all=1 includes the workers'", **_text("text/plain"))
async def get_metrics(services: Shared, all: str = "0") -> Response:
    text = generate_latest(services.metrics.registry)
    if all not in ("", "0"):
        config = services.config
        tls = Certs(config.certs, "router").client_context() if config.certs else None
        text += generate_latest(_Fixed(await _worker_families(split_list(config.worker_metrics), tls)))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@unkeyed.get("/", summary="The playground page", **_text("text/html"))
async def get_playground() -> Response:
    return page_response("playground")


@unkeyed.get("/example", summary="A request that shows compression")
async def get_example(services: Shared) -> Example:
    model, tokenizer = services.runner.model(), services.prompts.tokenizer
    default = services.plans.default(model)
    example: Example = json.loads(DEMO_EXAMPLE.read_text("utf-8"))
    # The demo model knows only the words of its training.
    if _QUESTION in tokenizer.decode(tokenizer.encode(_QUESTION)):
        story = _STORY.read_text("utf-8")[: min(_STORY_CHARACTERS, 2 * model.max_model_len)]
        at = max(0, story.rfind("\n\n", 0, len(story) * 6 // 10))
        parts = (story[:at], _FACT, story[at : story.rfind(". ") + 1].strip(), _QUESTION)
        example["messages"] = [{"role": "user", "content": "\n\n".join(filter(None, parts))}]
        limit = 1024 if tokenizer.template.thought_tags else 128
        example["max_tokens"] = min(limit, model.max_model_len // 4)
    example["model"] = model.name
    budget = _EXAMPLE_BUDGET if default.takes_budget else {}
    example["kv_compression"] = {"method": default.method, **budget}
    return example


@unkeyed.get("/openapi.json", summary="This description")
async def get_openapi(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@unkeyed.get("/docs", summary="This description as a page", **_text("text/html"))
async def get_docs() -> Response:
    return page_response("docs")


async def _worker_families(addresses: Sequence[str], tls: ssl.SSLContext | None) -> list[Metric]:
    """Return the families of every address that answers in time, merged.

    Args: tls: with the router's certificate, where workers have certs; None: plain HTTP.
    """
    base = "http" if tls is None else "https"
    async with httpx.AsyncClient(timeout=_METRICS_TIMEOUT_S, trust_env=False, verify=tls or False) as client:
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
            label = {"instance": address} if holders[family.name] > 1 else {}
            into.samples += [each._replace(labels={**each.labels, **label}) for each in family.samples]
    return list(merged.values())


async def _fetch(client: httpx.AsyncClient, base: str) -> str:
    try:
        response = await client.get(f"{base}/metrics")
        response.raise_for_status()
    except httpx.HTTPError as error:
        structlog.get_logger(__name__).warning("worker metrics unavailable", address=base, error=str(error))
        return ""
    return response.text


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
