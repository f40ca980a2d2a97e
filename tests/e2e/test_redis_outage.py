"""Redis is away for longer than every lease while two routers serve sessions: every turn that was
acknowledged is there afterwards, at both routers. Real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest import short_leases
from kvtest.answers import chat_body, said
from kvtest.processes import Process, started
from kvtest.redis_server import RedisServer
from kvtest.waiting import until

OUTAGE_S = 2 * short_leases.PENDING_LEASE_S
BACK_TIMEOUT_S = 180.0
SESSIONS = tuple(f"s{number}" for number in range(4))
REFUSALS = {"overloaded", "session_pending", "session_busy"}
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@dataclass
class Routers:
    """Two routers on one Redis, with one worker of each role."""

    urls: list[str]
    decode: Process
    redis: RedisServer

    def ask(self, router: int, session: str, content: str, max_tokens: int) -> str | None:
        """The answer; None where the turn was refused by name."""
        fields = {"session_mode": "append", "max_tokens": max_tokens, "logit_bias": {"6": -100}}
        body = chat_body(content, session, **fields)
        reply = httpx.post(f"{self.urls[router]}/v1/chat/completions", json=body, timeout=120)
        if reply.status_code != 200:
            error = reply.json()["error"]
            assert reply.status_code in (409, 503), reply.text
            assert error["code"] in REFUSALS, reply.text
            return None
        return said(reply.json())

    def messages(self, router: int, session: str) -> list[str]:
        """The session's texts, once the router has them."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        while True:
            reply = httpx.get(f"{self.urls[router]}/v1/sessions/{session}/export", timeout=60)
            if reply.status_code == 200:
                return [its["content"] for its in reply.json()["messages"]]
            assert reply.status_code == 503, reply.text
            assert time.monotonic() < deadline_s, reply.text
            time.sleep(0.5)


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[Routers]:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer.running(*DURABLE))
        workers = [
            stack.enter_context(started(tmp_path, name, "--threads", "1")) for name in ("prefill", "decode")
        ]
        prefill, decode = [wait() for wait in workers]
        options = (
            *("--listen", "127.0.0.1:0", "--history-redis", redis.url, "--history-redis-timeout-s", "10"),
            *("--prefill-workers", prefill.addresses["address"]),
            *("--decode-workers", decode.addresses["address"]),
        )
        waits = [
            stack.enter_context(started(tmp_path, f"router-{number}", *options, main=short_leases.run))
            for number in range(2)
        ]
        made = Routers([f"http://{wait().addresses['address']}" for wait in waits], decode, redis)
        for url in made.urls:
            until(lambda url=url: httpx.get(f"{url}/ready", timeout=60).status_code == 200)
        yield made


def test_no_acknowledged_turn_is_lost_in_an_outage_longer_than_every_lease(
    routers: Routers, make_document: Callable[..., Any]
) -> None:
    said: dict[str, list[str]] = {session: [] for session in SESSIONS}
    text = make_document(31, num_words=120).text

    def turn(router: int, session: str, content: str, max_tokens: int = 4) -> bool:
        answer = routers.ask(router, session, content, max_tokens)
        if answer is not None:
            said[session] += [content, answer]
        return answer is not None

    for number, session in enumerate(SESSIONS):
        assert turn(number % 2, session, text)
    # Redis goes away in the midst of a turn of each session.
    before = routers.decode.metric("kvferry_decode_tokens_total")
    with ThreadPoolExecutor(len(SESSIONS)) as pool:
        running = [
            pool.submit(turn, number % 2, session, "what is the pin ?", 400)
            for number, session in enumerate(SESSIONS)
        ]
        while routers.decode.metric("kvferry_decode_tokens_total") < before + 50:
            time.sleep(0.01)
        routers.redis.kill()
        gone_s = time.monotonic()
        acknowledged = [its.result() for its in running]
    assert any(acknowledged), "no turn was acknowledged without Redis"
    while time.monotonic() - gone_s < OUTAGE_S:
        for number, session in enumerate(SESSIONS):
            for router in (number % 2, 1 - number % 2):
                turn(router, session, "and the word ?")
        time.sleep(0.5)
    routers.redis.start()
    for router in range(2):
        for session in SESSIONS:
            assert routers.messages(router, session) == said[session], (router, session)
    for number, session in enumerate(SESSIONS):
        until(
            lambda number=number, session=session: turn(1 - number % 2, session, "the red castle ."),
            what="the session does not go on at the other router",
        )
        assert routers.messages(number % 2, session) == said[session]
