"""Redis is away for longer than every lease while two routers serve sessions: every turn whose answer does
not say otherwise is there afterwards, at both routers, and both refuse the others. Real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest import short_leases
from kvtest.answers import assistant, chat_body, said, user
from kvtest.processes import Process, started
from kvtest.redis_server import RedisServer
from kvtest.waiting import until

OUTAGE_S = 2 * short_leases.LEASE_S
BACK_TIMEOUT_S = 180.0
SESSIONS = tuple(f"s{number}" for number in range(4))
REFUSALS = {"overloaded", "session_not_stored", "session_busy"}
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@dataclass
class Routers:
    """Two routers on one Redis, with one worker of each role."""

    urls: list[str]
    decode: Process
    redis: RedisServer

    def ask(self, router: int, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """The answer, or the error by which the turn was refused."""
        body |= {"max_tokens": max_tokens, "logit_bias": {"6": -100}}
        reply = httpx.post(f"{self.urls[router]}/v1/chat/completions", json=body, timeout=120)
        if reply.status_code != 200:
            assert reply.status_code in (409, 503), reply.text
            assert reply.json()["error"]["code"] in REFUSALS, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def is_marked(self, session: str) -> bool:
        """Whether all routers know that the session lacks a turn."""
        with self.redis.client() as admin:
            (key,) = admin.keys(f"kvferry:router:*:session:{session}")
            return bool(admin.hexists(key, "unstored"))

    def messages(self, router: int, session: str) -> list[str]:
        """The session's texts, once the router has them."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        while True:
            reply = httpx.get(f"{self.urls[router]}/v1/sessions/{session}/export", timeout=60)
            if reply.status_code == 200:
                return [message["content"] for message in reply.json()["messages"]]
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


def test_a_turn_is_stored_or_its_answer_says_so_and_the_session_goes_on_when_it_is_sent_whole(
    routers: Routers, make_document: Callable[..., Any]
) -> None:
    texts: dict[str, list[str]] = {session: [] for session in SESSIONS}
    stored: dict[str, list[str]] = {session: [] for session in SESSIONS}

    def turn(router: int, session: str, content: str, max_tokens: int = 4, *, whole: bool = False) -> str:
        """Returns how it went: "stored", "not_stored" or the name of an error."""
        roles = cycle((user, assistant))
        said_before = texts[session] if whole else []
        messages = [role(text) for role, text in zip(roles, [*said_before, content], strict=False)]
        body = chat_body(messages, session, session_mode="replace" if whole else "append")
        answer = routers.ask(router, body, max_tokens)
        if "error" in answer:
            return str(answer["error"]["code"])
        texts[session] += [content, said(answer)]
        if "session" in answer["kv"]:
            return str(answer["kv"]["session"])
        stored[session] = list(texts[session])
        return "stored"

    for number, session in enumerate(SESSIONS):
        assert turn(number % 2, session, make_document(31, num_words=120).text) == "stored"
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
        outcomes = dict(zip(SESSIONS, [future.result() for future in running], strict=True))
    assert "not_stored" in outcomes.values(), outcomes
    while time.monotonic() - gone_s < OUTAGE_S:
        for number, session in enumerate(SESSIONS):
            refused = {turn(router, session, "and the word ?") for router in (number % 2, 1 - number % 2)}
            assert refused <= REFUSALS, refused
        time.sleep(0.5)
    routers.redis.start()
    for router in range(2):
        for session in SESSIONS:
            assert routers.messages(router, session) == stored[session], (router, session)
    for number, session in enumerate(SESSIONS):
        if whole := outcomes[session] == "not_stored":
            until(lambda session=session: routers.is_marked(session), what="the session is not marked")
            for router in range(2):
                assert turn(router, session, "and the word ?") == "session_not_stored"
        until(
            lambda number=number, session=session, whole=whole: (
                turn(1 - number % 2, session, "the red castle .", whole=whole) == "stored"
            ),
            what="the session does not go on at the other router",
        )
        assert routers.messages(number % 2, session) == texts[session]
