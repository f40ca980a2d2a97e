"""The HTTP routes of completions, models and operations. Each gets typed fields, calls one part, and shapes
the answer.

Errors are raised; `http/middleware.py` makes answers of them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.security import HTTPBearer
from starlette.responses import JSONResponse, Response

from kvferry.models import DEMO_EXAMPLE
from kvferry.services.router.api.delivery import CompletionResponse
from kvferry.services.router.api.responses import (
    ChatCompletion,
    Envelope,
    Example,
    Listing,
    Method,
    Model,
    Status,
    TextCompletion,
    Version,
    method_object,
    model_object,
)
from kvferry.services.router.completion.completion import Completion
from kvferry.services.router.completion.requests import ChatRequest, TextRequest
from kvferry.services.router.completion.services import Services
from kvferry.services.router.config import split_list
from kvferry.services.router.http import exposition
from kvferry.services.router.http.api_route import Authenticator, api_route
from kvferry.services.router.http.errors import ErrorBody, describe
from kvferry.services.router.http.middleware import RequestRecord
from kvferry.services.router.playground import page_response
from kvferry.services.router.sessions.record import session_key
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest, ModelNotFound
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import PROTOCOL_VERSION

Handler = Callable[..., Any]
Route = tuple[str, str, Handler, Any, str]
"""Method, path, handler, type of the answer (None: no JSON), summary."""


def add_routes(router: APIRouter, routes: tuple[Route, ...]) -> None:
    errors: Any = {"default": {"model": ErrorBody, "description": "error"}}
    for method, path, handler, answer, summary in routes:
        router.add_api_route(
            path, handler, methods=[method], response_model=answer, summary=summary, responses=errors
        )


def keyed_router(auth: Authenticator) -> APIRouter:
    """A router of routes that need a key."""
    described = Depends(HTTPBearer(auto_error=False, scheme_name="key"))
    return APIRouter(redirect_slashes=False, route_class=api_route(auth), dependencies=[described])


@dataclass(kw_only=True)
class Routes:
    """Handlers and their dependencies."""

    services: Services
    auth: Authenticator
    started_at: int

    def routers(self) -> tuple[APIRouter, APIRouter]:
        keyed, operations = keyed_router(self.auth), APIRouter(redirect_slashes=False)
        chat, models = "Answer a conversation, streamed or not", "The model that is served"
        add_routes(
            keyed,
            (
                ("POST", "/v1/chat/completions", self.chat, ChatCompletion, chat),
                ("POST", "/v1/completions", self.text, TextCompletion, "Continue a text, streamed or not"),
                ("GET", "/v1/models", self.list_models, Listing[Model], models),
                ("GET", "/v1/models/{model:path}", self.get_model, Model, "One model"),
                (
                    "GET",
                    "/v1/methods",
                    self.list_methods,
                    Listing[Method],
                    "The methods that requests may name",
                ),
                ("GET", "/version", self.get_version, Version, "Versions of the package and of its protocol"),
            ),
        )
        add_routes(
            operations,
            (
                ("GET", "/health", self.health, Status, "Whether the server is alive"),
                ("GET", "/ready", self.ready, Status, "Whether turns succeed"),
                (
                    "GET",
                    "/metrics",
                    self.get_metrics,
                    None,
                    "Prometheus metrics; ?all=1 includes the workers'",
                ),
                ("GET", "/", self.get_playground, None, "The playground page"),
                ("GET", "/example", self.get_example, Example, "A request that shows compression"),
                ("GET", "/openapi.json", self.get_openapi, None, "This description"),
                ("GET", "/docs", self.get_docs, None, "This description as a page"),
            ),
        )
        return keyed, operations

    # ---- completions -------------------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return self._complete(request, body)

    async def text(self, request: Request, body: TextRequest) -> Response:
        return self._complete(request, body)

    def _complete(self, request: Request, fields: ChatRequest | TextRequest) -> Response:
        model, session = self._model(fields.model), self._session(request, fields)
        record: RequestRecord = request.state.record
        is_chat = isinstance(fields, ChatRequest)
        record.fields |= {"stream": bool(fields.stream), "session": session is not None}
        completion = Completion(
            self.services,
            fields,
            model=model,
            owner=request.state.owner,
            session=session,
            request_id=record.request_id,
            arrival_s=record.arrival_s,
        )
        completion.start()
        envelope = Envelope(
            endpoint="chat" if is_chat else "text",
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model.name,
            system_fingerprint=f"kvferry-{model.fingerprint[:16]}",
        )
        return CompletionResponse(
            completion, envelope, record=record, keepalive_s=self.services.config.keepalive_s
        )

    def _session(self, request: Request, fields: ChatRequest | TextRequest) -> SessionKey | None:
        param, session_id = "session_id", fields.session_id
        if session_id is None:
            param, session_id = "X-Session-ID", request.headers.get("x-session-id")
        if session_id is None:
            return None
        key = session_key(request.state.owner, session_id, param=param)
        if (fields.n or 1) > 1:
            raise InvalidRequest(f"n is {fields.n}; with a session it must be 1", param="n")
        return key

    # ---- models ------------------------------------------------------------------------------------------

    async def list_models(self) -> Listing[Model]:
        return {"object": "list", "data": [model_object(self.services.model(), self.started_at)]}

    async def get_model(self, model: str) -> Model:
        return model_object(self._model(model), self.started_at)

    def _model(self, name: str) -> ModelSpec:
        model = self.services.model()
        if name != model.name:
            raise ModelNotFound(
                f"There is no model {describe(name)}; this server has {describe(model.name)}", param="model"
            )
        return model

    async def list_methods(self) -> Listing[Method]:
        plans = self.services.plans
        data = [method_object(plan, default=plan.method == plans.default.method) for plan in plans.all()]
        return {"object": "list", "data": data}

    # ---- operations --------------------------------------------------------------------------------------

    async def health(self) -> Status:
        return {"status": "ok"}

    async def ready(self) -> Status:
        problem = self.services.readiness.problem()
        if problem is not None:
            raise problem
        return {"status": "ready"}

    async def get_version(self) -> Version:
        runner = self.services.runner
        return {
            "version": version("kvferry"),
            "protocol_version": PROTOCOL_VERSION,
            "kernels": {pool.role: pool.kernel_paths() for pool in (runner.prefill, runner.decode)},
        }

    async def get_metrics(self, request: Request, all: str = "0") -> Response:
        self._check_access(request)
        extra = []
        if all not in ("", "0"):
            extra = await exposition.worker_families(split_list(self.services.config.worker_metrics))
        return Response(
            exposition.render(self.services.metrics.registry, extra), media_type=exposition.CONTENT_TYPE
        )

    async def get_playground(self, request: Request) -> Response:
        self._check_access(request)
        return page_response()

    async def get_example(self, request: Request) -> Example:
        self._check_access(request)
        example: Example = json.loads(DEMO_EXAMPLE.read_text("utf-8"))
        return {**example, "model": self.services.model().name}

    async def get_openapi(self, request: Request) -> Response:
        self._check_access(request)
        return JSONResponse(request.app.openapi())

    async def get_docs(self, request: Request) -> Response:
        self._check_access(request)
        return get_swagger_ui_html(openapi_url="/openapi.json", title="kvferry")

    def _check_access(self, request: Request) -> None:
        """Pages and metrics are open, or need a key, as the options say."""
        if not self.services.config.metrics_are_open:
            self.auth.owner(request.headers)
