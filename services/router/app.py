"""The router as an ASGI application, built from parts that are passed in. Nothing is global.

RequestEdge (id, log, errors) ─► RequestLimits (sizes, times) ─► routes
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvferry.services.router.auth import Authenticator
from kvferry.services.router.completion import CompletionService
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.documents import DocumentService
from kvferry.services.router.edge import RequestEdge
from kvferry.services.router.errors import error_response, from_http_exception
from kvferry.services.router.history import WorkerHistory
from kvferry.services.router.limits import RequestLimits
from kvferry.services.router.placement import WorkerPool
from kvferry.services.router.plans import PlanChoice
from kvferry.services.router.prompt import PromptBuilder
from kvferry.services.router.quota import KeyQuota
from kvferry.services.router.readiness import Readiness
from kvferry.services.router.redis_records import RedisRecords
from kvferry.services.router.redis_sessions import RedisSessionStore
from kvferry.services.router.routes import Routes
from kvferry.services.router.sessions import MemorySessionStore, SessionStore
from kvferry.services.router.tasks import BackgroundTasks
from kvferry.services.router.turn import TurnRunner
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions
from kvferry.shared.metrics import RouterMetrics
from kvferry.shared.model.tokenizer import ChatTokenizer

_SWEEP_INTERVAL_S = 5.0


def create_app(
    config: RouterConfig,
    *,
    prefill: WorkerPool[PrefillControl],
    decode: WorkerPool[DecodeControl],
    tokenizer: ChatTokenizer,
    metrics: RouterMetrics | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Build the application. Its lifespan starts and closes the pools.

    Args:
        clock: Unix time in seconds, for sessions' expiry.
    """
    metrics = metrics or RouterMetrics()
    tasks = BackgroundTasks()
    plans = PlanChoice(config)
    runner = TurnRunner(
        prefill=prefill,
        decode=decode,
        tasks=tasks,
        max_recoveries=config.max_recoveries,
        backoff_s=config.recovery_backoff_s,
        recovery_wait_s=config.recovery_wait_s,
    )
    readiness = Readiness(
        runner,
        plans.plan(None),
        probe_interval_s=config.probe_interval_s,
        window_s=config.readiness_window_s,
    )
    metrics.ready.set_function(lambda: float(readiness.problem() is None))
    sessions = session_store(config, metrics, clock)
    prompts = PromptBuilder(tokenizer)
    history = WorkerHistory(prefill=prefill, decode=decode)
    quota = KeyQuota(
        max_sessions=config.max_sessions_per_key,
        max_documents=config.max_documents_per_key,
        max_tokens=config.max_history_tokens_per_key,
    )
    documents = DocumentService(
        runner=runner,
        sessions=sessions,
        history=history,
        prompts=prompts,
        plans=plans,
        quota=quota,
        request_timeout_s=config.request_timeout_s,
        clock=clock,
    )
    completions = CompletionService(
        runner=runner,
        sessions=sessions,
        documents=documents,
        history=history,
        quota=quota,
        prompts=prompts,
        plans=plans,
        metrics=metrics,
        default_max_tokens=config.default_max_tokens,
        request_timeout_s=config.request_timeout_s,
        on_success=readiness.mark,
        clock=clock,
    )
    routes = Routes(
        config=config,
        auth=Authenticator(split_list(config.api_keys)),
        completions=completions,
        readiness=readiness,
        pools=(prefill, decode),
        metrics=metrics,
        started_at=int(clock()),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.gather(prefill.start(), decode.start())
        loops = [asyncio.create_task(readiness.run()), asyncio.create_task(_sweep(completions))]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await tasks.close(config.shutdown_timeout_s)
            await sessions.close()
            await asyncio.gather(prefill.close(), decode.close())

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.include_router(routes.router())
    app.add_exception_handler(HTTPException, _refuse)
    app.add_middleware(
        RequestLimits,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
        read_timeout_s=config.read_timeout_s,
    )
    app.add_middleware(RequestEdge, metrics=metrics)
    return app


def session_store(config: RouterConfig, metrics: RouterMetrics, clock: Callable[[], float]) -> SessionStore:
    """The sessions of this router, or of all that share its Redis. Opens nothing yet."""
    local = MemorySessionStore(
        ttl_s=config.session_ttl_s,
        document_ttl_s=config.document_ttl_s,
        wait_s=config.session_wait_s,
        max_sessions=config.max_sessions,
        clock=clock,
    )
    if not config.history_redis:
        return local
    options = RedisOptions(url=config.history_redis, timeout_s=config.history_redis_timeout_s)
    return RedisSessionStore(
        RedisRecords(AsyncRedisLink(options), clock=clock),
        local,
        lease_s=config.session_lease_s,
        wait_s=config.session_wait_s,
        clock=clock,
        on_event=lambda event: metrics.session_store_events.labels(event=event).inc(),
    )


async def _refuse(request: Request, refusal: Any) -> Response:
    """Unknown routes and methods, as the framework finds them."""
    error = from_http_exception(refusal, request.method, request.url.path)
    request.state.record.fail(error)
    response = error_response(error)
    for name, value in (refusal.headers or {}).items():
        response.headers[name] = value
    return response


async def _sweep(completions: CompletionService) -> None:
    """Forget stale sessions, and have their history dropped."""
    log = structlog.get_logger(__name__)
    while True:
        await asyncio.sleep(_SWEEP_INTERVAL_S)
        try:
            for key in await completions.sessions.remove_stale():
                await completions.history.drop(key)
        except Exception:
            # The loop's top: without it sessions would stay for ever.
            log.exception("session sweep failed")
