"""Texts that are much longer than the context, all at once, through the whole server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
from kvtest.waiting import eventually

NUM_TEXTS, TEXT_BYTES = 12, (8 << 20) - 400


def memory_mib(pid: int, name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, name
    return int(found.group(1)) / 1024


async def test_texts_of_8_mib_take_little_memory_and_keep_no_other_key_waiting(served: Any) -> None:
    """They cannot fit by their length. It was 40 s and 3.6 GiB."""
    pid = served.process.pid
    message = {"role": "user", "content": "the quick brown fox jumps. "}
    chat = {"model": "text", "max_tokens": 1}
    path = "/v1/chat/completions"
    async with httpx.AsyncClient(base_url=served.base_url, trust_env=False, timeout=120) as client:

        async def post(content: str, key: str) -> httpx.Response:
            body = {**chat, "messages": [{**message, "content": content}]}
            return await client.post(path, json=body, headers={"authorization": f"Bearer {key}"})

        assert (await post("hi", "b")).status_code == 200
        before_mib = memory_mib(pid, "VmRSS")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # begins the peak anew
        text = (message["content"] * (TEXT_BYTES // len(message["content"]) + 1))[:TEXT_BYTES]
        hostile = [asyncio.create_task(post(text, "a")) for _ in range(NUM_TEXTS)]
        while not any(task.done() for task in hostile):
            assert (await post("hi", "b")).status_code == 200
        for answer in await asyncio.gather(*hostile):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        # As a body, and as the text of its request; one at a time as what the template makes of it, too.
        assert memory_mib(pid, "VmHWM") - before_mib < NUM_TEXTS * 8 * 4
        await eventually(lambda: memory_mib(pid, "VmRSS") - before_mib < 64)
