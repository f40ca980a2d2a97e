"""Connections to Redis, blocking and asyncio, whose every call ends in bounded time with a named error.

Used by whatever stores state in Redis: history at prefill, session records at the router. They connect when
first used, so that a service starts while Redis is down. redis-py's own classes connect to a server, to a
Sentinel's master or to a cluster, and its `Retry` retries; the circuit breaker around it is ours.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import EqualJitterBackoff, NoBackoff
from redis.connection import parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from kvferry.shared.errors import StoreUnavailable
from kvferry.shared.history.redis_url import RedisAddress, parse_redis_url

T = TypeVar("T")

Client = Any
"""A client of `redis` or `redis.asyncio`: of a server, a Sentinel's master or a cluster. They have the same
commands, but not the same types."""

_SOCKET_READ_BYTES = 1 << 18
_parse_url: Any = parse_url  # it has no types
_MAX_BACKOFF_S = 1.0
_FAILOVER_BACKOFF_S = 0.25
_REPLICATION_TIMEOUT_MS = 100
# redis-py's errors of a cluster's layout are no RedisErrors.
_FAILURES = (RedisError, RedisClusterException, OSError)
# redis-py's asyncio connection raises these where it is closed while a command is written:
# https://github.com/redis/redis-py/issues/4287.
_ASYNC_FAILURES = (*_FAILURES, AttributeError, TypeError)
# Answers of a server that is loading, failing over or resharding.
_TRANSIENT = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError)
_DENIED = (AuthenticationError, AuthorizationError, NoPermissionError)
_ALIVE = ("full", "refused")
"""Reasons with which Redis did answer, so that the breaker need not open."""


@dataclass(frozen=True, kw_only=True)
class RedisOptions:
    """How to reach Redis and how long to try.

    Attributes:
        url: see `redis_url.py`.
        timeout_s: limit on connecting and on each read or write of a socket; a call that has taken this long
            is not retried.
        max_attempts: attempts of one call.
        backoff_s: scale of the pauses between attempts, which double and are jittered.
        failover_s: with Sentinel or Cluster, how long a call is repeated while a master is replaced.
        breaker_failures, breaker_open_s: how many calls in a row must fail before Redis is left alone, and
            for how long.
    """

    url: str = field(repr=False)
    timeout_s: float = 2.0
    max_attempts: int = 3
    backoff_s: float = 0.05
    failover_s: float = 0.0
    breaker_failures: int = 2
    breaker_open_s: float = 5.0

    def __post_init__(self) -> None:
        _ = self.address  # refuses a bad URL

    @property
    def waits_for_failover(self) -> bool:
        return bool(self.failover_s and self.address.topology)

    @property
    def num_retries(self) -> int:
        """The retries of one call; -1, as in redis-py, if only time limits them."""
        return -1 if self.waits_for_failover else self.max_attempts - 1

    @cached_property
    def address(self) -> RedisAddress:
        return parse_redis_url(self.url)


class CircuitBreaker:
    """After several failures in a row, calls fail at once for a while: a dead Redis delays one turn for a
    bounded time, and the next ones not at all. Thread-safe.

        CLOSED ──max_failures calls in a row fail──► OPEN ──open_s pass──► one trial ──succeeds──► CLOSED
                                                      ▲                        │
                                                      └── fails, or never ends ┘

    Another trial is allowed `open_s` after the last one, even if that never reported its end.
    """

    def __init__(
        self,
        *,
        max_failures: int,
        open_s: float,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Begin closed.

        Args:
            open_s: how long it stays open, times 0.75 to 1.25 at random, so that workers do not return
                together.
            clock: monotonic seconds.
        """
        self._max_failures = max_failures
        self._open_s = open_s
        self._clock = clock
        self._uniform = uniform
        self._lock = threading.Lock()
        self._num_failures = 0
        self._retry_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Say whether the last calls failed. A call may still be allowed, as a trial."""
        with self._lock:
            return self._num_failures >= self._max_failures

    def enter(self) -> None:
        """Allow a call, before it is made. Raise StoreUnavailable, reason "breaker_open", if it should not be
        made."""
        with self._lock:
            if self._num_failures < self._max_failures:
                return
            wait_s = self._retry_at_s - self._clock()
            if wait_s > 0:
                raise StoreUnavailable(
                    f"Redis did not answer recently; the next attempt is in {wait_s:.1f} s",
                    reason="breaker_open",
                    retry_after_s=wait_s,
                )
            self._postpone()

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures = 0

    def failed(self) -> None:
        with self._lock:
            self._num_failures += 1
            self._postpone()

    def _postpone(self) -> None:
        self._retry_at_s = self._clock() + self._open_s * self._uniform(0.75, 1.25)


class _Link:
    """What both links share: a client made on the first call, a retry and a breaker."""

    def __init__(self, options: RedisOptions) -> None:
        self.breaker = CircuitBreaker(max_failures=options.breaker_failures, open_s=options.breaker_open_s)
        self._options = options
        longest_s = _FAILOVER_BACKOFF_S if options.waits_for_failover else _MAX_BACKOFF_S
        self._backoff = EqualJitterBackoff(cap=longest_s, base=options.backoff_s)
        self._clients: list[Client] = []
        """The client, then those of its sentinels."""

    def _failure(self, error: Exception, begin_s: float) -> StoreUnavailable:
        """Return the error that an exception of redis-py means."""
        reason = _reason(error)
        message = f"Redis: {type(error).__name__}: {str(error)[:200]}"
        options, took_s = self._options, time.monotonic() - begin_s
        if options.waits_for_failover:
            is_retryable = reason in ("unreachable", "timeout") and took_s < options.failover_s
        else:
            is_retryable = reason == "unreachable" and took_s < options.timeout_s
        return (_Retryable if is_retryable else StoreUnavailable)(message, reason=reason)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Make a call in this context if the breaker allows it; the breaker is told how it ends."""
        self.breaker.enter()
        try:
            yield
        except StoreUnavailable as error:
            (self.breaker.succeeded if error.reason in _ALIVE else self.breaker.failed)()
            raise
        self.breaker.succeeded()


class RedisLink(_Link):
    """A blocking client behind retries and a breaker. Thread-safe."""

    def __init__(self, options: RedisOptions) -> None:
        super().__init__(options)
        self._lock = threading.Lock()
        self._retry = Retry(self._backoff, options.num_retries, (_Retryable,))

    def call(self, operation: Callable[[Client], T]) -> T:
        """Run an operation that may be run again.

        Raises: StoreUnavailable: reason "unreachable", "timeout", "denied", "full" (out of memory),
            "refused" (Redis answered with another error) or "breaker_open".
        """
        begin_s = time.monotonic()

        def attempt() -> T:
            try:
                return operation(self._client())
            except _FAILURES as error:
                raise self._failure(error, begin_s) from error

        with self._guarded():
            return self._retry.call_with_retry(attempt, lambda error: None)

    def pipeline(self, fill: Callable[[Client], object]) -> list[Any]:
        """Send the commands that `fill` adds to a pipeline; return their answers. Raises: as `call`."""

        def run(client: Client) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            fill(pipeline)
            return list(pipeline.execute())

        return self.call(run)

    def close(self) -> None:
        """Close the connections. Idempotent; a later call connects again."""
        with self._lock:
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def _client(self) -> Client:
        with self._lock:
            self._clients = self._clients or _connect(redis, Retry(NoBackoff(), 0), self._options)
            return self._clients[0]


class AsyncRedisLink(_Link):
    """The same for one event loop."""

    def __init__(self, options: RedisOptions) -> None:
        super().__init__(options)
        retryable: Any = (_Retryable,)
        self._retry = AsyncRetry(self._backoff, options.num_retries, retryable)

    async def call(self, operation: Callable[[Client], Awaitable[T]]) -> T:
        """See `RedisLink.call`; here each attempt as a whole is limited to `timeout_s`."""
        begin_s = time.monotonic()
        cancellation = _Cancellation()

        async def attempt() -> T:
            try:
                self._clients = self._clients or _connect(
                    redis.asyncio, AsyncRetry(NoBackoff(), 0), self._options
                )
                async with asyncio.timeout(self._options.timeout_s):
                    result = await operation(self._clients[0])
            except _ASYNC_FAILURES as error:
                cancellation.check()
                raise self._failure(error, begin_s) from error
            cancellation.check()
            return result

        with self._guarded():
            return await self._retry.call_with_retry(attempt, _ignore)

    async def eval_replicated(self, script: str, keys: Sequence[str], *arguments: Any) -> tuple[Any, bool]:
        """Run a script that may be run again; return its answer, and whether a replica has what it wrote.

        A single server has no replicas to wait for. Where Sentinel or Cluster stand by to replace a master, a
        short wait for one replica makes what has been answered survive that.

        Raises: as `call`.
        """
        command = ("EVAL", script, len(keys), *keys, *arguments)
        if not self._options.address.topology:
            return await self.call(lambda client: client.execute_command(*command)), True

        async def run(client: Client) -> tuple[Any, bool]:
            pipeline, target = client.pipeline(transaction=False), {}
            if self._options.address.topology == "cluster":
                await client.initialize()
                # WAIT is about the writes of its own connection: that to the key's node.
                target = {"target_nodes": client.get_node_from_key(keys[0])}
            pipeline.execute_command(*command)
            pipeline.execute_command("WAIT", 1, _REPLICATION_TIMEOUT_MS, **target)
            answer, num_replicas = await pipeline.execute()
            return answer, num_replicas > 0

        return await self.call(run)

    async def close(self) -> None:
        """Close the connections. Idempotent; a later call connects again."""
        clients, self._clients = self._clients, []
        for client in clients:
            await client.aclose()


class _Retryable(StoreUnavailable):
    """Another attempt may succeed at once."""


class _Cancellation:
    """Raises the current task's cancellation if redis-py has swallowed it, as it does with one that arrives
    together with an answer."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._requests = self._task.cancelling() if self._task is not None else 0

    def check(self) -> None:
        if self._task is not None and self._task.cancelling() > self._requests:
            raise asyncio.CancelledError


async def _ignore(error: Exception) -> None:
    """Do nothing between attempts."""


def _reason(error: Exception) -> str:
    if isinstance(error, _DENIED):
        return "denied"
    if isinstance(error, OutOfMemoryError):
        return "full"
    if isinstance(error, ResponseError) and not isinstance(error, _TRANSIENT):
        return "refused"
    if isinstance(error, TimeoutError | redis.exceptions.TimeoutError):
        return "timeout"
    return "unreachable"


def _connect(library: Any, no_retry: Any, options: RedisOptions) -> list[Client]:
    """Make a client, then those of the sentinels behind it. Only a cluster's connects here.

    Args: library: `redis` or `redis.asyncio`.
    """
    address = options.address
    common = {
        "socket_timeout": options.timeout_s,
        "socket_connect_timeout": options.timeout_s,
        "socket_read_size": _SOCKET_READ_BYTES,
        "protocol": 2,
        "retry": no_retry,
    }
    if not address.topology:
        return [library.Redis.from_url(address.urls[0], **common)]
    parsed: list[dict[str, Any]] = [_parse_url(url) for url in address.urls]
    nodes = [(node.pop("host"), node.pop("port")) for node in parsed]
    data = parsed[0]
    if data.pop("connection_class", None) is not None:
        data["ssl"] = True
    if address.topology == "cluster":
        del data["db"]
        startup_nodes = [library.cluster.ClusterNode(*node) for node in nodes]
        return [library.RedisCluster(startup_nodes=startup_nodes, **common, **data)]
    # Sentinels have credentials of their own, or none, and no databases.
    own = {key: value for key, value in data.items() if key not in ("username", "password", "db")}
    sentinel = library.Sentinel(
        nodes, sentinel_kwargs={**common, **own, **address.sentinel_credentials}, **common, **data
    )
    return [sentinel.master_for(address.service), *sentinel.sentinels]
