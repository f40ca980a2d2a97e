"""The key file: who may call, what for, and how much. Only hashes of keys are in it.

    [[key]]
    name = "alice"                    # in logs and metrics
    hash = "sha256:9f86d08188..."     # of the key, which `kvferry new-key alice` makes
    scopes = ["chat"]                 # chat, metrics, or admin, which includes both
    requests_per_minute = 60          # each limit is optional
    tokens_per_minute = 100000        # of prompts and answers together
    bytes_per_minute = 50000000       # of requests' bodies
    max_concurrent = 4                # requests at the same time, at each router

Counts of a minute are shared by the routers of one Redis. A router that cannot reach it counts by itself. A
minute begins with the first use that is counted in it. Each count is one key in Redis:

    kvferry:limits:{<owner>}:<what>    number, which expires with its minute
"""

from __future__ import annotations

import hmac
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvferry.shared.errors import CapacityExceeded, ConfigurationError, StoreUnavailable
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions
from kvferry.shared.process.freeing_rate import FreeingRate

Scope = Literal["chat", "metrics", "admin"]

_MAX_FILE_BYTES = 4 << 20
_WINDOW_S = 60.0
_REDIS_TIMEOUT_S = 0.5
_MAX_COUNTS = 10_000
"""Counts in memory; beyond it those of past minutes are dropped."""
_ADD = """
local used, left_ms = redis.call('INCRBY', KEYS[1], ARGV[1]), redis.call('PTTL', KEYS[1])
if left_ms < 0 then
  left_ms = tonumber(ARGV[2])
  redis.call('PEXPIRE', KEYS[1], left_ms)
end
return {used, left_ms}
"""
_log = structlog.get_logger(__name__)

_Limit = Annotated[int, Field(ge=1)]


class ApiKey(BaseModel):
    """One entry of a key file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    hash: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    scopes: Annotated[list[Scope], Field(min_length=1)] = ["chat"]
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    bytes_per_minute: _Limit | None = None
    max_concurrent: _Limit | None = None

    def allows(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class _Content(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    key: list[ApiKey] = []

    @model_validator(mode="after")
    def _distinct(self) -> _Content:
        for field in ("name", "hash"):
            values = [getattr(key, field) for key in self.key]
            if len(set(values)) < len(values):
                raise ValueError(f"two keys have the same {field}")
        return self


class KeyFile:
    """The keys of a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Raises: ConfigurationError where the file cannot be read or has an invalid entry."""
        self._path = path
        self._version: tuple[int, int] | None = None
        self.keys: tuple[ApiKey, ...] = ()
        self.reload()

    def reload(self) -> None:
        """Read the file if it has changed. A file that has become invalid changes nothing.

        Raises: ConfigurationError, each time that an invalid file has changed.
        """
        try:
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if version == self._version:
                return
            self._version = version
            if stat.st_size > _MAX_FILE_BYTES:
                raise ValueError(f"it has {stat.st_size} bytes; at most {_MAX_FILE_BYTES} are allowed")
            data: Any = tomllib.loads(self._path.read_text(encoding="utf-8"))
            self.keys = tuple(_Content.model_validate(data).key)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigurationError(f"api_keys_file {str(self._path)!r}: {where}: {first['msg']}") from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"api_keys_file {str(self._path)!r} cannot be read: {error}") from None

    def find(self, digest: str) -> ApiKey | None:
        """Return the key with this SHA-256. Every key is compared, in constant time."""
        same = [hmac.compare_digest(key.hash, f"sha256:{digest}") for key in self.keys]
        return next((key for key, found in zip(self.keys, same, strict=True) if found), None)


@dataclass
class Count:
    """What a key has used in this minute, which ends at `ends_s` on the clock of `time.monotonic`."""

    used: int
    ends_s: float


class KeyLimits:
    """Counts what the keys of a file use, by their owners' digests."""

    def __init__(self, file: KeyFile, *, redis_url: str) -> None:
        """Args: redis_url: of the Redis in which routers count together; "" counts here.

        Raises: ConfigurationError: `redis_url` is not a Redis URL.
        """
        self._file = file
        self._running: Counter[str] = Counter()
        self._ended: dict[str, FreeingRate] = {}
        """Requests of keys whose number at a time is limited, which are as many as the file ever had."""
        self._counts: dict[tuple[str, str], Count] = {}
        self._redis: AsyncRedisLink | None = None
        if redis_url:
            options = RedisOptions(url=redis_url, timeout_s=_REDIS_TIMEOUT_S, max_attempts=2)
            self._redis = AsyncRedisLink(options)

    async def close(self) -> None:
        """Close the connections to Redis."""
        if self._redis is not None:
            await self._redis.close()

    def name(self, owner: str) -> str:
        """Return the name of a caller's key; "" for one that is not in the file."""
        key = self._file.find(owner)
        return key.name if key is not None else ""

    @asynccontextmanager
    async def admitted(self, owner: str) -> AsyncIterator[None]:
        """Count a request of the owner as running while the context is open.

        Raises: CapacityExceeded where a limit of its key is used up.
        """
        key = self._file.find(owner)
        if key is None:
            yield
            return
        if key.max_concurrent is not None and self._running[owner] >= key.max_concurrent:
            raise CapacityExceeded(
                f"This key has {self._running[owner]} requests running; at most {key.max_concurrent} may",
                reason="key_concurrency",
                retry_after_s=self._ended.setdefault(owner, FreeingRate()).wait_s(1),
            )
        self._running[owner] += 1  # before an await, in which others of the key would pass the check
        try:
            await self._count(owner, "tokens", key.tokens_per_minute, 0)
            await self._count(owner, "requests", key.requests_per_minute, 1)
            yield
        finally:
            self._running[owner] -= 1
            if key.max_concurrent is not None:
                self._ended.setdefault(owner, FreeingRate()).add(1)
            if not self._running[owner]:
                del self._running[owner]

    async def count_bytes(self, owner: str, num_bytes: int) -> None:
        """Count a request's bytes. Raises: CapacityExceeded if the key's bytes of this minute are used up."""
        if (key := self._file.find(owner)) is not None:
            await self._count(owner, "bytes", key.bytes_per_minute, num_bytes)

    async def count_tokens(self, owner: str, num_tokens: int) -> None:
        """Count a request's tokens at its end; the next request is refused if they were too many."""
        if (key := self._file.find(owner)) is not None and key.tokens_per_minute is not None:
            await self._add(owner, "tokens", num_tokens)

    async def _count(self, owner: str, what: str, limit: int | None, cost: int) -> None:
        if limit is None:
            return
        count = await self._add(owner, what, cost)
        if count.used > limit or (cost == 0 and count.used == limit):
            raise CapacityExceeded(
                f"This key has used its {limit} {what} of this minute",
                reason=f"key_{what}",
                retry_after_s=max(1.0, count.ends_s - time.monotonic()),
            )

    async def _add(self, owner: str, what: str, amount: int) -> Count:
        """Count; returns this minute's count so far. If Redis is unreachable, it is this router's own."""
        if self._redis is not None:
            key, window_ms = f"kvferry:limits:{{{owner}}}:{what}", int(_WINDOW_S * 1000)
            try:
                used, left_ms = await self._redis.call(
                    lambda client: client.eval(_ADD, 1, key, amount, window_ms)
                )
                return Count(int(used), time.monotonic() + left_ms / 1000)
            except StoreUnavailable as error:
                _log.warning("keys' use is counted by this router alone", error=error.message)
        now_s = time.monotonic()
        if len(self._counts) >= _MAX_COUNTS:
            self._counts = {key: count for key, count in self._counts.items() if count.ends_s > now_s}
        count = self._counts.get((owner, what))
        if count is None or count.ends_s <= now_s:
            count = self._counts[owner, what] = Count(0, now_s + _WINDOW_S)
        count.used += amount
        return count
