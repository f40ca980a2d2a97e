"""`kvferry serve` sends blocks between its processes through shared memory, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import kvtest.wire as kit
from kvtest.waiting import until

pytestmark = kit.needs_shared_memory


def num_rings(pid: str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:kvferry-blocks")


def test_prefill_and_decode_have_a_ring_for_each_direction(stack: Any) -> None:
    body = {
        "model": "demo",
        "session_id": "transport",
        "messages": [{"role": "user", "content": "remember that the pin of the red castle is 1234 ."}],
        "max_tokens": 4,
    }
    url = f"{stack.base_url}/v1/chat/completions"
    httpx.post(url, json=body, timeout=120).raise_for_status()
    assert stack.prefill_metric("kvferry_kv_transfer_bytes_total", kind="rows") > 0
    for role in ("prefill", "decode"):
        until(lambda pid=stack.addresses[f"{role}_pid"]: num_rings(pid) == 2)
