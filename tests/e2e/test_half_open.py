"""Connections of which one end is gone and the other does not know it: nothing is answered, and nothing is
closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvtest.chaos.links import Link
from kvtest.lanes import some
from kvtest.processes import START_TIMEOUT_S, Process, started
from kvtest.recovery import LONGEST_SILENCE_S, NOTICED, Heard


class Half:
    """A router with two workers of each role, and a link to each worker's control port."""

    def __init__(self, router: Process, links: dict[str, Link], workers: dict[str, Process]) -> None:
        self.url = f"http://{router.addresses['address']}"
        self.log = router.log
        self.links, self.workers = links, workers

    async def ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        async with httpx.AsyncClient(timeout=60) as client:
            while (await client.get(f"{self.url}/ready")).status_code != 200:
                assert time.monotonic() < deadline_s, "the router is not ready"
                await asyncio.sleep(0.1)

    async def stream(self, body: dict[str, Any], on_token: Callable[[int], None]) -> tuple[str, float]:
        """The text, and the longest time without a token."""
        heard = Heard(on_token)
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", f"{self.url}/v1/completions", json={**body, "stream": True}) as response,
        ):
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                heard.hear(line)
        return heard.text, heard.longest_s


@pytest.fixture
async def half(tmp_path: Path) -> Any:
    async with AsyncExitStack() as stack:
        waits = {}
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            waits[name] = stack.enter_context(started(tmp_path, name, "--threads", "1"))
        workers = {name: await asyncio.to_thread(wait) for name, wait in waits.items()}
        links: dict[str, Link] = {}
        for name, worker in workers.items():
            links[name] = Link(name=name, target_port=int(worker.addresses["address"].rpartition(":")[2]))
            await links[name].start()
            stack.push_async_callback(links[name].close)

        def addresses(role: str) -> str:
            return ",".join(f"127.0.0.1:{link.port}" for name, link in links.items() if name.startswith(role))

        options = ["--prefill-workers", addresses("prefill"), "--decode-workers", addresses("decode")]
        wait = stack.enter_context(started(tmp_path, "router", "--listen", "127.0.0.1:0", *options))
        made = Half(await asyncio.to_thread(wait), links, workers)
        await made.ready()
        yield made


@pytest.mark.parametrize("role", some(["decode", "prefill"], "prefill"))
async def test_a_stream_goes_on_elsewhere_where_its_workers_connection_is_dead(
    half: Half, make_document: Callable[..., Any], role: str
) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": make_document(31, num_words=120).text,
        "max_tokens": 300 if role == "decode" else 8,
        "temperature": 0,
        "logit_bias": {"6": -100},
        "kv_compression": {"method": "full"},
        "session_mode": "replace",
    }
    undisturbed, _ = await half.stream({**body, "session_id": "calm"}, lambda _: None)
    metric = {"decode": "kvferry_decode_tokens_total", "prefill": "kvferry_prefill_tokens_total"}[role]
    names = [name for name in half.workers if name.startswith(role)]
    before = {name: await asyncio.to_thread(half.workers[name].metric, metric) for name in names}
    # A session's next turn goes to the workers of its last one.
    await half.stream({**body, "max_tokens": 2, "session_id": "s"}, lambda _: None)
    (victim,) = [
        name for name in names if await asyncio.to_thread(half.workers[name].metric, metric) > before[name]
    ]
    if role == "prefill":
        half.links[victim].hold()

    def cut(count: int) -> None:
        if count == 20:
            half.links[victim].hold()

    try:
        text, silence_s = await half.stream({**body, "session_id": "s"}, cut)
    finally:
        half.links[victim].heal()
    assert text == undisturbed
    assert NOTICED[role] in half.log.read_text()
    assert silence_s <= LONGEST_SILENCE_S
