"""A plain two-turn conversation moves every family of its path, on the role that owns it."""

from __future__ import annotations

from typing import Any

import httpx

ROUTER = (
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_success_total",
    "prompt_tokens_total",
    "prompt_tokens_reused_total",
    "generation_tokens_total",
)
PREFILL = (
    "prefill_seconds_count",
    "compress_seconds_count",
    "pack_seconds_count",
    "transfer_seconds_count",
    "queue_seconds_count",
    "history_load_seconds_count",
    "history_store_seconds_count",
    "kv_full_bytes_total",
    "kv_transfer_bytes_total",
    "kv_compression_ratio_count",
    "prefill_tokens_total",
    "history_bytes",
)
DECODE = (
    "decode_step_seconds_count",
    "decode_steps_total",
    "admission_seconds_count",
    "decode_tokens_total",
    "history_returned_bytes_total",
)


def read(stack: Any) -> dict[str, float]:
    roles = ((ROUTER, stack.router_metric), (PREFILL, stack.prefill_metric), (DECODE, stack.decode_metric))
    return {name: metric(f"kvferry_{name}") for names, metric in roles for name in names}


def test_two_turns_move_every_family_of_their_path(stack: Any) -> None:
    before = read(stack)
    for question in ("the pin of the red castle is 4 2 7 1 . what is it ?", "tell me the pin again ."):
        response = httpx.post(
            f"{stack.base_url}/v1/chat/completions",
            json={
                "model": "demo",
                "session_id": "e2e-metrics",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 8,
                "logit_bias": {"6": -100},
                "kv_compression": {"token_budget": 8},
            },
            timeout=60,
        )
        assert response.status_code == 200, response.text
        assert response.json()["kv"]["method"] == "rdkv"
    after = read(stack)
    assert [name for name in after if after[name] <= before[name]] == []
    everything = httpx.get(f"{stack.base_url}/metrics?all=1", timeout=10).text
    assert all(f"kvferry_{name}" in everything for name in after)


def test_each_worker_says_which_kernels_it_calls(stack: Any) -> None:
    for role, url in (("prefill", stack.prefill_metrics_url), ("decode", stack.decode_metrics_url)):
        assert f"# TYPE kvferry_{role}_kernel_calls_total counter" in httpx.get(url, timeout=10).text
