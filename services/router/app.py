"""The router as an ASGI application, built from the parts that are passed in. There is no global state.

http/        sockets, middleware, keys, errors
api/         routes and the types of answers
completion/  a request: fields, prompt and plan, choices, documents
turn/        a turn over the workers: attempts, retries, worker pools, readiness
sessions/    records, leases, quotas; in memory or in Redis
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from kvferry.services.router.api import completions, messages, operations, responses, sessions, tokens
from kvferry.services.router.completion.compression import PlanChooser
from kvferry.services.router.completion.prompts import PromptBuilder
from kvferry.services.router.completion.services import Services
from kvferry.services.router.config import RouterConfig, split_list
from kvferry.services.router.http.access import KeyFile, KeyLimits
from kvferry.services.router.http.body import Authenticator
from kvferry.services.router.http.errors import error_response, from_framework
from kvferry.services.router.http.large_work import LargeWork
from kvferry.services.router.http.middleware import LimitsMiddleware, RequestMiddleware
from kvferry.services.router.sessions.implicit import ImplicitSessions
from kvferry.services.router.sessions.redis_records import RedisRecords
from kvferry.services.router.sessions.redis_store import RedisSessionStore
from kvferry.services.router.sessions.store import SessionStore
from kvferry.services.router.turn.readiness import Readiness
from kvferry.services.router.turn.runner import BackgroundTasks, TurnRunner
from kvferry.services.router.turn.vllm_metrics import VllmMetrics
from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.control.calls import DecodeControl, PrefillControl
from kvferry.shared.errors import ConfigurationError, KvferryError, Overloaded
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.process.draining import REASON, Drain
from kvferry.shared.process.version import VERSION
from kvferry.shared.telemetry.metrics import RouterMetrics
from kvferry.shared.trust.at_rest import AtRestKeys


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Intervals that are constants of the router; tests shorten them.

    Attributes:
        recovery_backoff_s: the first pause before a replay.
        probe_interval_s: an idle router sends a probe turn this often.
        session_lease_s: with Redis, how soon another router may take over the session of a lost one.
        sweep_interval_s: how often expired sessions are removed.
        keys_interval_s: how often the key file is looked at.
        redis_failover_s: how long a turn waits for Sentinel or Cluster to replace a master.
    """

    recovery_backoff_s: float = 0.25
    probe_interval_s: float = 10.0
    session_lease_s: float = 15.0
    sweep_interval_s: float = 5.0
    keys_interval_s: float = 2.0
    redis_failover_s: float = 20.0


def create_app(
    config: RouterConfig,
    *,
    prefill: WorkerPool[PrefillControl],
    decode: WorkerPool[DecodeControl],
    tokenizer: ChatTokenizer,
    sampling_defaults: Mapping[str, float] = MappingProxyType({}),
    metrics: RouterMetrics | None = None,
    clock: Callable[[], float] = time.time,
    timing: Timing = Timing(),
) -> FastAPI:
    """Build the application. Its lifespan starts and closes the pools.

    Args:
        sampling_defaults: fields of `SamplingParams` for requests that do not give them.
        clock: Unix time in seconds, for sessions' expiry.
    """
    metrics = metrics or RouterMetrics()
    tasks = BackgroundTasks()
    plans = PlanChooser(config)
    runner = TurnRunner(
        prefill=prefill,
        decode=decode,
        tasks=tasks,
        metrics=metrics,
        max_recoveries=config.max_recoveries,
        backoff_s=timing.recovery_backoff_s,
        recovery_wait_s=config.recovery_wait_s,
    )
    drain = Drain(
        lambda: Overloaded("The router is to end; repeat the request", reason=REASON, retry_after_s=1.0)
    )
    readiness = Readiness(
        runner,
        plans.default,
        probe_interval_s=timing.probe_interval_s,
        window_s=config.readiness_window_s,
        drain=drain,
    )
    metrics.ready.set_function(lambda: float(readiness.problem() is None))
    metrics.registry.register(VllmMetrics(metrics, decode))
    key_file = KeyFile(Path(config.api_keys_file)) if config.api_keys_file else None
    limits = KeyLimits(key_file, redis_url=config.history_redis) if key_file is not None else None
    services = Services(
        config=config,
        metrics=metrics,
        clock=clock,
        runner=runner,
        readiness=readiness,
        sessions=session_store(config, metrics, clock, timing),
        implicit=ImplicitSessions(
            max_per_key=config.implicit_sessions,
            max_bytes_per_key=config.max_stored_bytes_per_key,
            ttl_s=config.implicit_session_ttl_s,
            clock=clock,
        ),
        prompts=PromptBuilder(tokenizer),
        plans=plans,
        large=LargeWork(),
        limits=limits,
        sampling_defaults=sampling_defaults,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.gather(prefill.start(), decode.start())
        loops = [
            asyncio.create_task(readiness.run()),
            asyncio.create_task(_sweep(services, timing.sweep_interval_s)),
        ]
        if key_file is not None:
            reload = _reload_keys(key_file, app.state.auth, services, timing.keys_interval_s)
            loops.append(asyncio.create_task(reload))
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await tasks.close(config.shutdown_timeout_s)
            await services.sessions.close()
            await services.prompts.close()
            services.large.close()
            if limits is not None:
                await limits.close()
            await asyncio.gather(prefill.close(), decode.close())

    app = FastAPI(
        title="kvferry",
        version=VERSION,
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.auth = Authenticator(config, key_file)
    if app.state.auth.is_open("chat") and not (config.is_loopback or config.insecure):
        raise ConfigurationError(
            f"listen is {config.listen!r}, which other machines may reach, and no key of api_keys_file is "
            "for chat; add one, listen on 127.0.0.1, or set insecure"
        )
    app.state.services = services
    app.state.started_at = int(clock())
    for router in (
        completions.router,
        responses.router,
        messages.router,
        tokens.router,
        operations.keyed,
        sessions.router,
        operations.unkeyed,
    ):
        app.include_router(router)
    app.include_router(operations.restricted)
    for refusal in (HTTPException, RequestValidationError):
        app.add_exception_handler(refusal, _refuse)
    app.add_middleware(LimitsMiddleware, config=config, auth=app.state.auth, limits=limits)
    app.state.drain = drain
    app.add_middleware(RequestMiddleware, metrics=metrics, drain=drain)
    if origins := split_list(config.cors_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-ignored-fields", "x-request-id", "retry-after"],
        )
    return app


def session_store(
    config: RouterConfig, metrics: RouterMetrics, clock: Callable[[], float], timing: Timing
) -> SessionStore:
    """Return the sessions of this router, or of all that share its Redis. Opens nothing yet."""
    options: dict[str, Any] = {
        "ttl_s": config.session_ttl_s,
        "document_ttl_s": config.document_ttl_s,
        "wait_s": config.session_wait_s,
        "max_sessions": config.max_sessions,
        "max_bytes_per_key": config.max_stored_bytes_per_key,
        "clock": clock,
    }
    if not config.history_redis:
        return SessionStore(**options)
    redis = RedisOptions(
        url=config.history_redis, timeout_s=config.history_redis_timeout_s, failover_s=timing.redis_failover_s
    )

    def count(event: str) -> None:
        metrics.session_store_events.labels(event=event).inc()

    return RedisSessionStore(
        RedisRecords(
            AsyncRedisLink(redis),
            clock=clock,
            name=_router_name(config),
            on_unreplicated=lambda: count("unreplicated"),
            keys=AtRestKeys.read(config.at_rest_keys),
        ),
        lease_s=timing.session_lease_s,
        on_event=count,
        **options,
    )


def _router_name(config: RouterConfig) -> str:
    """Return the router's name, which stays the same after a restart if the address does."""
    number = secrets.token_hex(4) if config.listen.endswith(":0") else ""
    return f"{socket.gethostname()} {config.listen} {number}"


async def _refuse(request: Request, refusal: Exception) -> Response:
    """Answer requests that the framework refuses: unknown routes and methods, wrong fields."""
    error = from_framework(refusal, request.method, request.url.path)
    request.state.record.fail(error)
    response = error_response(error, request.url.path)
    for name, value in (getattr(refusal, "headers", None) or {}).items():
        response.headers[name] = value
    return response


async def _reload_keys(file: KeyFile, auth: Authenticator, services: Services, interval_s: float) -> None:
    """Read the key file again whenever it changes; keys that were removed get no more of their answers."""
    log = structlog.get_logger(__name__)
    while True:
        await asyncio.sleep(interval_s)
        before = file.keys
        try:
            file.reload()
        except ConfigurationError as error:
            log.error("the key file is not used as it is now", error=error.message)
        if file.keys is not before:
            log.info("key file read", num_keys=len(file.keys))
            for completion in tuple(services.running):
                try:
                    auth.check(completion.owner)
                except KvferryError as error:
                    completion.cancel(error)


async def _sweep(services: Services, interval_s: float) -> None:
    """Remove expired sessions, and have their history dropped."""
    log = structlog.get_logger(__name__)
    while True:
        await asyncio.sleep(interval_s)
        try:
            for key, record in (await services.sessions.remove_stale()).items():
                addresses = (*record.prefill_addresses, record.decode_address)
                await services.runner.drop(key, addresses=addresses)
            for key, address in services.implicit.remove_stale():
                await services.runner.drop(key, addresses=(address,))
        except Exception:
            # This loop must go on, or sessions would never be removed.
            log.exception("session sweep failed")
