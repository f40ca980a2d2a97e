"""Bytes on the wire, read from `/metrics`, and the arena's memory after aborts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from kvtest.waiting import until

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

LONGEST = 2000
"""Tokens of an answer that nobody reads to its end."""


def test_rocketkv_at_4k_ships_at_most_a_quarter_of_full_and_exactly_what_its_blocks_hold(
    stack: Any, make_document: Callable[..., Any], demo_model_dir: Any
) -> None:
    spec = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0).spec
    document = make_document(3, num_words=4096, num_facts=8)
    kinds = ("rows", "index", "manifest", "codes", "scales")

    def transferred() -> dict[str, float]:
        name = "kvferry_kv_transfer_bytes_total"
        return {kind: stack.prefill_metric(name, kind=kind, method="rocketkv") for kind in kinds}

    before = transferred()
    full_before = stack.prefill_metric("kvferry_kv_full_bytes_total", method="rocketkv")
    response = httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        json={
            "model": "demo",
            "messages": [{"role": "user", "content": f"{document.text} {document.questions[0][0]}"}],
            "temperature": 0,
            "max_tokens": 256,
            "kv_compression": {"method": "rocketkv", "token_budget": 128},
        },
        timeout=300,
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    num_tokens = answer["usage"]["prompt_tokens"]
    assert num_tokens >= 4096
    shipped = {kind: count - before[kind] for kind, count in transferred().items()}
    full = stack.prefill_metric("kvferry_kv_full_bytes_total", method="rocketkv") - full_before

    resolved = resolve_plan(
        plan_for("rocketkv", budget=Budget(tokens=128)),
        num_prompt_tokens=num_tokens,
        max_new_tokens=256,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
    )
    rows = sum(layer.rows for layer in resolved.layers) * spec.num_kv_heads
    assert shipped["rows"] == rows * 2 * spec.row_bytes(0)
    assert shipped["index"] == rows * 4
    assert shipped["codes"] == shipped["scales"] == 0
    # counted in the checkpoint's float16; rows are shipped in float32
    assert full == num_tokens * spec.kv_token_bytes / 2 == answer["kv"]["full_bytes"]
    assert sum(shipped.values()) == answer["kv"]["shipped_bytes"]
    assert sum(shipped.values()) <= num_tokens * spec.kv_token_bytes / 4


def test_rdkv_ships_exactly_what_its_layers_pack_to_by_kind(
    stack: Any, make_document: Callable[..., Any], tokenizer: ChatTokenizer, demo_model_dir: Any
) -> None:
    document = make_document(4, num_words=700, num_facts=4)
    ids = tokenizer.render([{"role": "user", "content": f"{document.text} {document.questions[0][0]}"}])
    kinds = ("codes", "scales", "rows", "index")

    def transferred() -> dict[str, float]:
        name = "kvferry_kv_transfer_bytes_total"
        return {kind: stack.prefill_metric(name, kind=kind, method="rdkv") for kind in kinds}

    before = transferred()
    body = {
        "model": "demo",
        "prompt": ids,
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": 0,
        "kv_compression": {"method": "rdkv", "token_budget": 60},
    }
    response = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer = response.json()
    shipped = {kind: count - before[kind] for kind, count in transferred().items()}

    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    generator, plan = OneProcessGenerator(model), plan_for("rdkv", budget=Budget(tokens=60))
    compressed = generator.compress(generator.capture(ids), plan=plan, max_new_tokens=24).compressed
    assert len(compressed) == model.spec.num_layers
    assert shipped == {kind: sum(tensors[kind].numel() for tensors in compressed) for kind in kinds}
    assert sum(shipped.values()) < answer["kv"]["shipped_bytes"] < answer["kv"]["full_bytes"] / 4
    expected = generator.generate(ids, plan=plan, sampling=SamplingParams(max_tokens=24, temperature=0.0))
    assembler = TextAssembler(tokenizer)
    texts = [assembler.push(token.token_id).token_text for token in expected]
    assert answer["choices"][0]["logprobs"]["tokens"] == texts


def turn_bytes(stack: Any) -> float:
    """Arena bytes of turns under way: what other tests' sessions retain may be freed at any time."""
    states = ("reserved", "in_transfer", "running")
    return sum(stack.decode_metric("kvferry_arena_bytes", state=state) for state in states)


@pytest.mark.parametrize("close_after", [0, 1, 5], ids=["before the first token", "after one", "after five"])
def test_closing_a_stream_returns_the_arena_long_before_its_answer_would_have_ended(
    stack: Any, make_document: Callable[..., Any], close_after: int
) -> None:
    until(lambda: turn_bytes(stack) == 0)  # an earlier request may be ending
    generated_before = stack.decode_metric("kvferry_decode_tokens_total")
    document = make_document(9, num_words=1500)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": document.text}],
        "stream": True,
        "max_tokens": LONGEST,
        "logit_bias": {"6": -100},
        "session_id": f"e2e-close-{close_after}",
    }
    with (
        httpx.Client(base_url=stack.base_url, timeout=240) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        tokens = 0
        if close_after:
            for line in response.iter_lines():
                tokens += '"content":' in line
                if tokens > close_after:
                    break
    until(lambda: turn_bytes(stack) == 0)
    assert stack.decode_metric("kvferry_decode_tokens_total") - generated_before < LONGEST / 2
    # the session is free again, and what was delivered is a turn of it: the stream began with a token
    stack.wait_kept(f"e2e-close-{close_after}")


def test_the_arena_gauge_always_sums_to_its_size(stack: Any) -> None:
    # of all states, in one scrape: an earlier request may be ending
    totals = {stack.decode_metric("kvferry_arena_bytes") for _ in range(5)}
    assert len(totals) == 1
    assert totals != {0.0}
