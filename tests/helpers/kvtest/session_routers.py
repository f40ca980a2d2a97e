"""Routers' stores of sessions on one Redis, as several routers have them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvferry.services.router.sessions.record import SessionRecord
from kvferry.services.router.sessions.redis_records import RedisRecords
from kvferry.services.router.sessions.redis_store import RedisSessionStore
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import SessionNotFound
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions
from kvferry.shared.model.chat_template import ChatMessage
from kvtest.clock import Clock

KEY = SessionKey(owner="0a1b", session_id="s")
RECORD = SessionRecord(
    kind="chat",
    model_fingerprint="f",
    token_ids=(1, 2, 300_000),
    messages=(ChatMessage("user", "grüße"), ChatMessage("assistant", "\x00 yes", '{"tool_calls": []}')),
    assistant_ends=(3,),
    turns=1,
    last_plan={"method": "full", "prefill_ms": 0.5},
    prefill_addresses=("a:1",),
)
NOW_S = 1_900_000_000.0
TURN_2 = replace(RECORD, turns=2, token_ids=(1, 2, 300_000, 4))


class Router:
    """One router's store, and what it was told."""

    def __init__(self, url: str, **options: Any) -> None:
        self.events: list[str] = []
        self.clock = options.pop("clock", None) or Clock(lambda: NOW_S)
        settings: dict[str, Any] = {"lease_s": 30.0, "wait_s": 30.0, "ttl_s": 600.0, **options}
        # The breaker is impatient so that tests need not wait for it.
        link = AsyncRedisLink(
            RedisOptions(url=url, timeout_s=settings.get("timeout_s", 30.0), breaker_open_s=0.001)
        )
        self.store = RedisSessionStore(
            RedisRecords(
                link,
                clock=self.clock,
                name=options.get("name", f"router {id(self)}"),
                keys=options.get("keys"),
            ),
            lease_s=settings["lease_s"],
            on_event=self.events.append,
            ttl_s=settings["ttl_s"],
            wait_s=settings["wait_s"],
            max_sessions=100,
            clock=self.clock,
            document_ttl_s=900.0,
            max_bytes_per_key=options.get("max_bytes", 0),
        )

    async def turn(self, record: SessionRecord = RECORD, key: SessionKey = KEY) -> SessionRecord | None:
        """A whole turn; returns the record that it found."""
        async with self.store.lease(key) as lease:
            found = lease.record
            assert await lease.commit(record)
        return found

    def has_patience(self, timeout_s: float) -> None:
        """Set how long the store waits for Redis from now on."""
        link = self.store._records._link
        link._options = replace(link._options, timeout_s=timeout_s)

    async def turns(self, key: SessionKey = KEY) -> int | None:
        try:
            return (await self.store.get(key)).turns
        except SessionNotFound:
            return None


@pytest.fixture
async def router(redis_server: Any) -> AsyncIterator[Callable[..., Router]]:
    started: list[Router] = []

    def start(**options: Any) -> Router:
        started.append(Router(redis_server.url, **options))
        return started[-1]

    yield start
    for one in started:
        await one.store.close()
