"""One trace a turn, over three processes, as an OTLP collector gets it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from kvtest.collector import Collector

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced(start_stack, collector):
    with start_stack("--otlp-endpoint", f"http://127.0.0.1:{collector.port}") as running:
        yield running


def test_a_turn_is_one_trace_with_a_span_for_each_stage(traced, collector, make_document):
    answer = httpx.post(
        f"{traced.base_url}/v1/chat/completions",
        json={
            "model": "demo",
            "messages": [{"role": "user", "content": make_document(3, num_words=300).text}],
            "max_tokens": 4,
            "ignore_eos": True,
            "session_id": "traced",
            "kv_compression": {"method": "rocketkv", "token_budget": 64},
        },
        headers={"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "x-request-id": "traced-1"},
        timeout=60,
    )
    assert answer.status_code == 200
    router = {"POST /v1/chat/completions": 1}
    prefill = {"Prefill/Prefill": 1, "queue": 1, "prefill": 1, "acknowledge": 1}
    prefill |= {"compress": NUM_LAYERS, "ship": NUM_LAYERS}
    decode = {"Decode/Generate": 1, "admit": 1, "receive": 1, "first step": 1, "decode": 1}
    decode |= {"return history": 1}
    expected = {"kvferry-router": router, "kvferry-prefill": prefill, "kvferry-decode": decode}
    spans = collector.wait_for(TRACE_ID, sum(sum(stages.values()) for stages in expected.values()))

    seen = Counter((service, span.name) for service, span in spans)
    assert seen == {(service, name): n for service, names in expected.items() for name, n in names.items()}
    ids = {span.span_id: span.name for _, span in spans}
    parents = {(span.name, ids.get(span.parent_span_id, span.parent_span_id.hex())) for _, span in spans}
    root = "POST /v1/chat/completions"
    assert parents == {
        (root, CALLER),
        ("Decode/Generate", root),
        ("Prefill/Prefill", root),
        ("queue", "Prefill/Prefill"),
        ("prefill", "Prefill/Prefill"),
        ("acknowledge", "Prefill/Prefill"),
        ("compress", "prefill"),
        ("ship", "prefill"),
        ("receive", "prefill"),
        ("admit", "Decode/Generate"),
        ("first step", "Decode/Generate"),
        ("decode", "Decode/Generate"),
        ("return history", "Decode/Generate"),
    }
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for _, span in spans)
    (asked,) = (span for _, span in spans if span.name == root)
    told = {item.key: item.value for item in asked.attributes}
    usage = answer.json()["usage"]
    assert told["gen_ai.response.model"].string_value == "demo"
    assert told["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"] == 4
    (reason,) = told["gen_ai.response.finish_reasons"].array_value.values
    assert reason.string_value == "length"


def test_a_refused_request_is_a_failed_span(traced, collector):
    trace_id = TRACE_ID[::-1]
    body = {"model": "demo", "messages": [], "max_tokens": 4}
    headers = {"traceparent": f"00-{trace_id}-{CALLER}-01"}
    answer = httpx.post(f"{traced.base_url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    ((service, span),) = collector.wait_for(trace_id, 1)
    assert service == "kvferry-router"
    assert span.status.code == 2


def test_what_belongs_to_no_request_is_not_traced(traced, collector):
    """Probes and status calls ran since the start; every trace begins with a request."""
    roots = {span.trace_id for service, span in collector.spans if span.name.startswith("POST ")}
    assert {span.trace_id for _, span in collector.spans} <= roots | {bytes.fromhex(TRACE_ID)}


def test_an_endpoint_that_is_none_is_refused_at_start(start_stack):
    with pytest.raises(RuntimeError, match="otlp"), start_stack("--otlp-endpoint", "collector:4317"):
        pass
