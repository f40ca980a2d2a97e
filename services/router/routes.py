"""The HTTP routes. Each reads its request, asks the part that knows, and shapes the answer.

Errors are raised; `edge.py` makes answers of them.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvferry.services.router import exposition
from kvferry.services.router.auth import Authenticator
from kvferry.services.router.completion import CompletionService
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.delivery import CompletionResponse
from kvferry.services.router.edge import RequestRecord
from kvferry.services.router.kept_routes import KeptRoutes
from kvferry.services.router.openapi import openapi_document
from kvferry.services.router.placement import WorkerPool, served_model
from kvferry.services.router.playground import page_response
from kvferry.services.router.readiness import Readiness
from kvferry.services.router.responses import Envelope, method_object, model_object
from kvferry.services.router.schemas import ChatRequest, TextRequest, describe
from kvferry.services.router.sessions import session_key
from kvferry.services.router.validation import parse_body, parse_request
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest, ModelNotFound, Overloaded
from kvferry.shared.metrics import RouterMetrics
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import PROTOCOL_VERSION


@dataclass(kw_only=True)
class Routes:
    """Handlers with what they need."""

    config: RouterConfig
    auth: Authenticator
    completions: CompletionService
    readiness: Readiness
    pools: tuple[WorkerPool[PrefillControl], WorkerPool[DecodeControl]]
    metrics: RouterMetrics
    started_at: int

    def router(self) -> APIRouter:
        router = APIRouter(redirect_slashes=False)
        table = (
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.text),
            ("GET", "/v1/models", self.list_models),
            ("GET", "/v1/models/{model:path}", self.get_model),
            ("GET", "/v1/methods", self.list_methods),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/metrics", self.get_metrics),
            ("GET", "/version", self.get_version),
            ("GET", "/openapi.json", self.get_openapi),
            ("GET", "/", self.get_playground),
        )
        for method, path, handler in table:
            router.add_api_route(path, handler, methods=[method], response_model=None)
        KeptRoutes(auth=self.auth, completions=self.completions, served=self._served).add_to(router)
        return router

    # ---- completions -------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        owner = self.auth.owner(request.headers)
        return self._complete(request, owner, parse_request(ChatRequest, parse_body(await request.body())))

    async def text(self, request: Request) -> Response:
        owner = self.auth.owner(request.headers)
        return self._complete(request, owner, parse_request(TextRequest, parse_body(await request.body())))

    def _complete(self, request: Request, owner: str, fields: ChatRequest | TextRequest) -> Response:
        model = self._model(fields.model)
        session = self._session(request, owner, fields)
        record: RequestRecord = request.state.record
        is_chat = isinstance(fields, ChatRequest)
        record.fields |= {"stream": bool(fields.stream), "session": session is not None}
        completion = self.completions.start(
            fields,
            model=model,
            owner=owner,
            session=session,
            request_id=record.request_id,
            arrival_s=record.arrival_s,
        )
        envelope = Envelope(
            endpoint="chat" if is_chat else "text",
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model.name,
            system_fingerprint=f"kvferry-{model.fingerprint[:16]}",
        )
        return CompletionResponse(
            completion,
            envelope,
            stream=bool(fields.stream),
            include_usage=fields.includes_usage,
            with_logprobs=fields.num_alternatives is not None,
            record=record,
            keepalive_s=self.config.keepalive_s,
        )

    def _session(self, request: Request, owner: str, fields: ChatRequest | TextRequest) -> SessionKey | None:
        header = request.headers.get("x-session-id")
        if fields.session_id is not None:
            key = session_key(owner, fields.session_id, param="session_id")
        elif header is not None:
            key = session_key(owner, header, param="X-Session-ID")
        else:
            return None
        if (fields.n or 1) > 1:
            raise InvalidRequest(f"n is {fields.n}; with a session it must be 1", param="n")
        return key

    # ---- models ------------------------------------------------------------------------------------------

    async def list_models(self, request: Request) -> Response:
        self.auth.owner(request.headers)
        return JSONResponse({"object": "list", "data": [model_object(self._served(), self.started_at)]})

    async def get_model(self, request: Request, model: str) -> Response:
        self.auth.owner(request.headers)
        return JSONResponse(model_object(self._model(model), self.started_at))

    def _served(self) -> ModelSpec:
        runner = self.completions.runner
        model = served_model(runner.prefill, runner.decode)
        if model is None:
            raise Overloaded("No prefill and decode worker with the same model are there yet")
        return model

    def _model(self, name: str) -> ModelSpec:
        model = self._served()
        if name != model.name:
            raise ModelNotFound(
                f"There is no model {describe(name)}; this server has {describe(model.name)}", param="model"
            )
        return model

    async def list_methods(self, request: Request) -> Response:
        self.auth.owner(request.headers)
        plans = self.completions.plans
        data = [method_object(plan, default=plan.method == plans.default.method) for plan in plans.all()]
        return JSONResponse({"object": "list", "data": data})

    # ---- operations --------------------------------------------------------------------------------------

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        problem = self.readiness.problem()
        if problem is not None:
            raise problem
        return JSONResponse({"status": "ready"})

    async def get_metrics(self, request: Request) -> Response:
        if not self.config.metrics_are_open:
            self.auth.owner(request.headers)
        extra = []
        if request.query_params.get("all", "0") not in ("", "0"):
            extra = await exposition.worker_families(split_list(self.config.worker_metrics))
        return Response(exposition.render(self.metrics.registry, extra), media_type=exposition.CONTENT_TYPE)

    async def get_playground(self, request: Request) -> Response:
        if not self.config.metrics_are_open:
            self.auth.owner(request.headers)
        return page_response()

    async def get_version(self, request: Request) -> Response:
        self.auth.owner(request.headers)
        return JSONResponse(
            {
                "version": version("kvferry"),
                "protocol_version": PROTOCOL_VERSION,
                "kernels": {pool.role: pool.kernel_paths() for pool in self.pools},
            }
        )

    async def get_openapi(self, request: Request) -> Response:
        self.auth.owner(request.headers)
        return JSONResponse(openapi_document())
