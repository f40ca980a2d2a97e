"""Connections to Redis, blocking and asyncio, whose every call ends in bounded time with a named error.

Used by whatever keeps state in Redis: history segments at prefill, session records at the router. Connects
when first used, so that a service starts while Redis is down. Knows no keys and no values.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvferry.shared.errors import ConfigurationError, StoreUnavailable
from kvferry.shared.history.breaker import CircuitBreaker
from kvferry.shared.history.redis_url import RedisAddress, parse_redis_url

T = TypeVar("T")

Client = Any
"""A client of `redis` or `redis.asyncio`, for a server, a Sentinel master or a cluster: their commands are
the same, their types are not."""

_SOCKET_READ_BYTES = 1 << 18
# These have no types of their own.
_SENTINEL: Any = Sentinel
_ASYNC_SENTINEL: Any = AsyncSentinel
_CLUSTER_NODE: Any = ClusterNode
# Answers of a server that is loading, failing over or resharding.
_TRANSIENT = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError)
_DENIED = (AuthenticationError, AuthorizationError, NoPermissionError)


@dataclass(frozen=True, kw_only=True)
class RedisOptions:
    """How to reach Redis and how long to try.

    Attributes:
        url: see `redis_url.py`.
        timeout_s: bound on connecting and on each read or write of a socket; a call that has taken so long
            is not tried again.
        max_attempts: tries of one call.
        backoff_s: pause before the second try; doubles, times 0.5 to 1.5 at random.
        breaker_failures, breaker_open_s: calls in a row that fail before Redis is left alone, for how long.
    """

    url: str = field(repr=False)
    timeout_s: float = 2.0
    max_attempts: int = 3
    backoff_s: float = 0.05
    breaker_failures: int = 2
    breaker_open_s: float = 5.0

    def __post_init__(self) -> None:
        parse_redis_url(self.url)
        for name in ("timeout_s", "max_attempts", "backoff_s", "breaker_failures", "breaker_open_s"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def address(self) -> RedisAddress:
        return parse_redis_url(self.url)

    def breaker(self) -> CircuitBreaker:
        return CircuitBreaker(max_failures=self.breaker_failures, open_s=self.breaker_open_s)

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each further try."""
        for attempt in range(self.max_attempts - 1):
            yield self.backoff_s * 2**attempt * random.uniform(0.5, 1.5)


class RedisLink:
    """A blocking client behind retries and a breaker. Thread-safe; connects on its first call."""

    def __init__(self, options: RedisOptions, *, breaker: CircuitBreaker | None = None) -> None:
        self._options = options
        self._breaker = breaker or options.breaker()
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._sentinels: list[Client] = []

    @property
    def breaker(self) -> CircuitBreaker:
        return self._breaker

    def call(self, operation: Callable[[Client], T]) -> T:
        """Run an operation that may be run again.

        Raises: StoreUnavailable: reason "unreachable", "timeout", "denied", "full" (out of memory),
            "refused" (Redis answered with another error) or "breaker_open".
        """
        self._breaker.enter()
        give_up_s = time.monotonic() + self._options.timeout_s
        pauses = self._options.pauses()
        while True:
            try:
                result = operation(self._connected())
            except (RedisError, OSError) as error:
                failure = _failure(error)
                pause_s = next(pauses, None) if failure.retryable_here else None
                if pause_s is None or time.monotonic() + pause_s > give_up_s:
                    raise failure.report(self._breaker) from error
                time.sleep(pause_s)
            else:
                self._breaker.succeeded()
                return result

    def close(self) -> None:
        """Close the connections. Idempotent; a later call connects again."""
        with self._lock:
            clients = [self._client, *self._sentinels]
            self._client, self._sentinels = None, []
        for client in clients:
            if client is not None:
                client.close()

    def _connected(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client, self._sentinels = _connect(self._options)
            return self._client


class AsyncRedisLink:
    """The same for one event loop. Connects on its first call."""

    def __init__(self, options: RedisOptions, *, breaker: CircuitBreaker | None = None) -> None:
        self._options = options
        self._breaker = breaker or options.breaker()
        self._client: Client | None = None
        self._sentinels: list[Client] = []

    @property
    def breaker(self) -> CircuitBreaker:
        return self._breaker

    async def call(self, operation: Callable[[Client], Awaitable[T]]) -> T:
        """See `RedisLink.call`; here a try as a whole is bounded by `timeout_s`."""
        self._breaker.enter()
        give_up_s = time.monotonic() + self._options.timeout_s
        pauses = self._options.pauses()
        cancelled = _Cancellation()
        while True:
            try:
                if self._client is None:
                    self._client, self._sentinels = _connect_async(self._options)
                async with asyncio.timeout(self._options.timeout_s):
                    result = await operation(self._client)
                cancelled.check()
            except (RedisError, OSError) as error:
                cancelled.check()
                failure = _failure(error)
                pause_s = next(pauses, None) if failure.retryable_here else None
                if pause_s is None or time.monotonic() + pause_s > give_up_s:
                    raise failure.report(self._breaker) from error
                await asyncio.sleep(pause_s)
            else:
                self._breaker.succeeded()
                return result

    async def close(self) -> None:
        """Close the connections. Idempotent; a later call connects again."""
        clients = [self._client, *self._sentinels]
        self._client, self._sentinels = None, []
        for client in clients:
            if client is not None:
                await client.aclose()


class _Cancellation:
    """Raises the current task's cancellation where a library has swallowed it: the client does, where one
    comes at the moment of an answer."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._requests = self._task.cancelling() if self._task is not None else 0

    def check(self) -> None:
        if self._task is not None and self._task.cancelling() > self._requests:
            raise asyncio.CancelledError


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """What an exception of the client means.

    Attributes:
        alive: Redis answered, so the breaker has nothing to guard against.
        retryable_here: trying again at once may help.
    """

    reason: str
    message: str
    alive: bool = False
    retryable_here: bool = False

    def report(self, breaker: CircuitBreaker) -> StoreUnavailable:
        """Tell the breaker; returns the error to raise."""
        if self.alive:
            breaker.succeeded()
        else:
            breaker.failed()
        return StoreUnavailable(f"Redis: {self.message}", reason=self.reason)


def _failure(error: Exception) -> _Failure:
    message = f"{type(error).__name__}: {str(error)[:200]}"
    if isinstance(error, _DENIED):
        return _Failure(reason="denied", message=message)
    if isinstance(error, OutOfMemoryError):
        return _Failure(reason="full", message=message, alive=True)
    if isinstance(error, ResponseError) and not isinstance(error, _TRANSIENT):
        return _Failure(reason="refused", message=message, alive=True)
    if isinstance(error, TimeoutError | redis.exceptions.TimeoutError):
        return _Failure(reason="timeout", message=message, retryable_here=True)
    return _Failure(reason="unreachable", message=message, retryable_here=True)


def _connect(options: RedisOptions) -> tuple[Client, list[Client]]:
    """A blocking client, and those of the sentinels behind it; only a cluster's connects here."""
    address = options.address
    common = _common(options, address) | {"retry": Retry(NoBackoff(), 0)}
    match address.topology:
        case "unix":
            return redis.Redis(unix_socket_path=address.path, db=address.db, **common), []
        case "single":
            ((host, port),) = address.hosts
            return redis.Redis(host=host, port=port, db=address.db, **common), []
        case "sentinel":
            sentinel = _SENTINEL(address.hosts, sentinel_kwargs=_sentinel(common, address), **common)
            return sentinel.master_for(address.service, db=address.db), sentinel.sentinels
        case "cluster":
            nodes = [_CLUSTER_NODE(host, port) for host, port in address.hosts]
            return redis.RedisCluster(startup_nodes=nodes, **common), []


def _connect_async(options: RedisOptions) -> tuple[Client, list[Client]]:
    address = options.address
    common = _common(options, address) | {"retry": AsyncRetry(NoBackoff(), 0)}
    match address.topology:
        case "unix":
            return redis.asyncio.Redis(unix_socket_path=address.path, db=address.db, **common), []
        case "single":
            ((host, port),) = address.hosts
            return redis.asyncio.Redis(host=host, port=port, db=address.db, **common), []
        case "sentinel":
            sentinel = _ASYNC_SENTINEL(address.hosts, sentinel_kwargs=_sentinel(common, address), **common)
            return sentinel.master_for(address.service, db=address.db), sentinel.sentinels
        case "cluster":
            nodes = [AsyncClusterNode(host, port) for host, port in address.hosts]
            return redis.asyncio.RedisCluster(startup_nodes=nodes, **common), []


def _common(options: RedisOptions, address: RedisAddress) -> dict[str, Any]:
    return {
        "username": address.username,
        "password": address.password,
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
        "socket_read_size": _SOCKET_READ_BYTES,
        "protocol": 2,
        **address.tls,
    }


def _sentinel(common: dict[str, Any], address: RedisAddress) -> dict[str, Any]:
    """Sentinels have credentials of their own, or none."""
    inherited = {key: value for key, value in common.items() if key not in ("username", "password")}
    return inherited | address.sentinel_credentials
