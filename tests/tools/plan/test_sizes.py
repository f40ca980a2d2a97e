"""The plan's bytes are those that a server ships and reserves."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from kvtest.stack import serving

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.tools.plan.model import read_model
from kvferry.tools.plan.sizes import sizes_of

PROMPT = list(range(20, 20 + 150)) * 2
NUM_NEW = 3
HEADERS = 2048
"""More than manifest, headers and end record of so few layers take, and less than a row of every layer."""
CONTENT_DECIDES = (
    *("rdkv", "rdkv-hsa", "compactor-rdkv", "rdkv-union", "rdkv-draft"),
    *("kvzip-rdkv", "keydiff-rdkv"),
)
"""Methods whose bytes are known only once a prompt is packed; the plan has the most that they may be."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--in-process", "--implicit-sessions", "0") as served:
        yield served.base_url


@pytest.mark.parametrize("method", method_names())
def test_a_request_ships_what_the_plan_says(url: str, method: str) -> None:
    budget = Budget(tokens=100) if preset(method).takes_budget else None
    sizes = sizes_of(
        read_model("demo", dtype="float32").spec,
        plan_for(method, budget=budget),
        num_prompt_tokens=len(PROMPT),
        max_new_tokens=NUM_NEW,
    )
    compression = {"method": method} | ({"token_budget": 100} if budget else {})
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": NUM_NEW, "kv_compression": compression}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    kv = reply.json()["kv"]
    assert kv["method"] == sizes.method
    assert kv["full_bytes"] == sizes.full
    if method in CONTENT_DECIDES:
        assert 0.5 * sizes.shipped < kv["shipped_bytes"] <= sizes.shipped + HEADERS
    else:
        assert sizes.shipped < kv["shipped_bytes"] <= sizes.shipped + HEADERS
    assert 0 < sizes.kept <= sizes.arena
    assert sizes.read > 0
