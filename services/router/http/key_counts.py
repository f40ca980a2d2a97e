"""What API keys have used in this minute: counted in Redis for all routers, or by this router alone.

A minute begins with the first use that is counted in it. Each count is one key in Redis:

    kvferry:limits:{<owner>}:<what>    number, which expires with its minute
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvferry.shared.errors import StoreUnavailable
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions

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


@dataclass
class Count:
    """Attributes: ends_s: when the minute ends, on the clock of `time.monotonic`."""

    used: int
    ends_s: float


class KeyCounts:
    """Counts by owner and by what is counted.

    Args: redis_url: "" where this router counts by itself.

    Raises: ConfigurationError: `redis_url` is not a Redis URL.
    """

    def __init__(self, redis_url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[tuple[str, str], Count] = {}
        self._link: AsyncRedisLink | None = None
        if redis_url:
            self._link = AsyncRedisLink(
                RedisOptions(url=redis_url, timeout_s=_REDIS_TIMEOUT_S, max_attempts=2)
            )

    async def close(self) -> None:
        """Close the connections to Redis."""
        if self._link is not None:
            await self._link.close()

    async def add(self, owner: str, what: str, amount: int) -> Count:
        """Count; returns what this minute's count is now. Where Redis is away, it is this router's own."""
        if self._link is not None:
            key, window_ms = f"kvferry:limits:{{{owner}}}:{what}", int(_WINDOW_S * 1000)
            try:
                used, left_ms = await self._link.call(
                    lambda client: client.eval(_ADD, 1, key, amount, window_ms)
                )
                return Count(int(used), self._clock() + left_ms / 1000)
            except StoreUnavailable as error:
                _log.warning("keys' use is counted by this router alone", error=error.message)
        return self._add_here((owner, what), amount)

    def _add_here(self, key: tuple[str, str], amount: int) -> Count:
        now_s = self._clock()
        if len(self._counts) >= _MAX_COUNTS:
            self._counts = {key: count for key, count in self._counts.items() if count.ends_s > now_s}
        count = self._counts.get(key)
        if count is None or count.ends_s <= now_s:
            count = self._counts[key] = Count(0, now_s + _WINDOW_S)
        count.used += amount
        return count
