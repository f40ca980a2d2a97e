"""The system's clock jumps, as after a correction by NTP or a resumed machine: turns, sessions and limits are
measured by clocks that do not."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
from kvtest.clock import Clock
from kvtest.router import say
from kvtest.waiting import eventually

from kvferry.services.router.app import Timing

DAY_S = 86_400.0
KEY = {"authorization": "Bearer key-a"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Unix time, for all of the process."""
    made = Clock(time.time)
    monkeypatch.setattr(time, "time", made)
    return made


async def renewed(redis_server: Any) -> None:
    """Wait until the lease of the running turn was renewed."""
    with redis_server.client() as client:
        (name,) = client.keys("kvferry:router:*:session:s")
        before = client.hget(name, "until")
        await eventually(lambda: client.hget(name, "until") != before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("jump_s", [3 * DAY_S, -3 * DAY_S])
@pytest.mark.parametrize("where", ["memory", "redis"])
async def test_a_turn_and_its_session_go_on_whichever_way_the_clock_jumps(
    start_stack: Any, redis_server: Any, clock: Clock, jump_s: float, where: str
) -> None:
    contents = ["the red castle .", "what is the pin ?", "and the word ?", "the old sailor"]
    alone = await start_stack()
    for content in contents:
        await say(alone, content)
    timing = Timing(recovery_backoff_s=0.01, sweep_interval_s=0.05, session_lease_s=0.3)
    redis = {"history_redis": redis_server.url} if where == "redis" else {}
    stack = await start_stack(clock=clock, timing=timing, **redis)
    await say(stack, contents[0])
    stack.script.may_prefill.clear()
    running = asyncio.create_task(say(stack, contents[1]))
    await eventually(lambda: len(stack.prefill[0].requests) == 2)
    clock.turn(jump_s)
    await stack.swept(4)
    if where == "redis":
        await renewed(redis_server)
    assert not running.done()
    stack.script.may_prefill.set()
    assert (await running).usage.completion_tokens == 4
    await say(stack, contents[2])
    clock.turn(-jump_s)
    await stack.swept(4)
    await say(stack, contents[3])
    await stack.has_turns("s", 4)
    asked = [request.prompt_token_ids for request in stack.prefill[0].requests]
    assert asked == [request.prompt_token_ids for request in alone.prefill[0].requests]
    assert (await stack.http.get("/ready")).status_code == 200
    assert stack.metric("recoveries_total", role="prefill") == 0
    assert stack.metric("session_store_events_total", event="not_stored") == 0


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
async def test_a_keys_minute_has_sixty_seconds(
    start_stack: Any, clock: Clock, tmp_path: Path, jump_s: float
) -> None:
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"key-a").hexdigest()
    path.write_text(f'[[key]]\nname = "a"\nhash = "sha256:{digest}"\nrequests_per_minute = 1\n')
    stack = await start_stack(api_keys_file=str(path), clock=clock)
    body = {"model": "demo", "messages": [{"role": "user", "content": "the red castle ."}], "max_tokens": 2}
    answers = []
    for by_s in (0.0, jump_s, -jump_s):
        clock.turn(by_s)
        answers.append(await stack.http.post("/v1/chat/completions", json=body, headers=KEY))
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in answers[1:])
