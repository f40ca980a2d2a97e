"""Keys, request ids, health, readiness, metrics, logs, and clients that are slow to send."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import structlog
from kvtest.router import SPEC
from kvtest.waiting import eventually
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from kvferry.services.router.app import Timing
from kvferry.shared.compression.presets import preset
from kvferry.shared.errors import WorkerUnavailable
from kvferry.shared.model.spec import LayerSpec
from kvferry.shared.telemetry.metrics import RouterMetrics
from kvferry.shared.telemetry.metrics_server import serve_metrics
from kvferry.shared.trust.certs import Certs
from kvferry.tools.certs import make_certs

BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "the red castle ."}],
    "temperature": 0,
    "max_tokens": 4,
}
CHAT = "/v1/chat/completions"


# ---- keys ------------------------------------------------------------------------------------------------


async def test_configured_keys_are_required(start_stack: Any) -> None:
    stack = await start_stack(api_keys="key-a, key-b")
    assert (await stack.client.chat.completions.create(**BODY)).usage.completion_tokens == 4
    with pytest.raises(openai.AuthenticationError) as refused:
        await stack.keyed("key-c").chat.completions.create(**BODY)
    assert refused.value.code == "invalid_api_key"
    assert "key-c" not in refused.value.message
    for path in ("/v1/models", "/v1/models/demo", "/v1/sessions", "/v1/sessions/s", "/version"):
        response = await stack.http.get(path)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    for scheme in ("Basic key-a", "key-a", "Bearer", "Bearer key"):
        assert (await stack.http.get("/v1/models", headers={"Authorization": scheme})).status_code == 401
    assert (await stack.http.get("/v1/models", headers={"Authorization": "bearer key-b"})).status_code == 200
    assert (await stack.http.get("/health")).status_code == 200
    assert stack.metric("request_failure_total", category="auth") == 10


@pytest.mark.parametrize(("access", "status"), [("auto", 200), ("open", 200), ("key", 401)])
async def test_metrics_follow_their_option(start_stack: Any, access: str, status: int) -> None:
    stack = await start_stack(api_keys="key-a", metrics_access=access)
    assert (await stack.http.get("/metrics")).status_code == status


# ---- models ----------------------------------------------------------------------------------------------


async def test_a_model_says_which_methods_go_with_it(start_stack: Any) -> None:
    stack = await start_stack(allowed_methods="full,rocketkv,rdkv")
    (listed,) = (await stack.http.get("/v1/models")).json()["data"]
    assert listed["methods"] == ["full", "rocketkv", "rdkv"]
    assert (await stack.http.get("/v1/models/demo")).json() == listed


async def test_a_model_is_called_by_its_name_and_its_aliases(start_stack: Any) -> None:
    stack = await start_stack(model_aliases="gpt-5.5, org/claude,demo")
    names = [model.id async for model in stack.client.models.list()]
    assert names == ["demo", "gpt-5.5", "org/claude"]
    messages: Any = [{"role": "user", "content": "the red castle ."}]
    for name in names:
        assert (await stack.client.models.retrieve(name)).id == name
        answers: Any = [
            await stack.client.chat.completions.create(model=name, messages=messages, max_tokens=2),
            await stack.client.responses.create(model=name, input="the red castle .", max_output_tokens=2),
        ]
        assert [answer.model for answer in answers] == ["demo", "demo"]
    with pytest.raises(openai.NotFoundError, match='no model "other"'):
        await stack.client.chat.completions.create(model="other", messages=messages)


@pytest.mark.parametrize(
    ("layer", "refused"),
    [
        (
            LayerSpec(latent_dim=16),
            {*("rdkv", "think", "compactor-rdkv", "rdkv-union", "rdkv-draft"), "kvzip-rdkv", "keydiff-rdkv"},
        ),
        (LayerSpec(has_plain_softmax=False), {"rdkv", "kivi", "h2o", "d2o"}),
    ],
    ids=["latent rows", "capped"],
)
async def test_a_model_names_only_methods_that_go_with_its_layers(
    start_stack: Any, layer: LayerSpec, refused: set[str]
) -> None:
    spec = replace(SPEC, layers=(layer,) * SPEC.num_layers)
    stack = await start_stack(spec=spec)
    (listed,) = (await stack.http.get("/v1/models")).json()["data"]
    assert "full" in listed["methods"]
    assert not refused & set(listed["methods"])
    for method in (listed["methods"][-1], *sorted(refused)[:3]):
        plan = {"method": method, "token_budget": 2} if preset(method).takes_budget else {"method": method}
        answer = await stack.http.post(CHAT, json={**BODY, "kv_compression": plan})
        assert answer.status_code == (400 if method in refused else 200), (method, answer.text)
        if method in refused:
            assert "full" in answer.json()["error"]["message"]


# ---- ids and logs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/nothing"])
async def test_request_id_is_echoed_logged_and_passed_on(stack: Any, path: str) -> None:
    with structlog.testing.capture_logs() as logs:
        response = await stack.http.post(path, json=BODY, headers={"X-Request-ID": "abc-1"})
        await eventually(lambda: any(entry["event"] == "request" for entry in logs))
    assert response.headers["x-request-id"] == "abc-1"
    line = next(entry for entry in logs if entry["event"] == "request")
    assert line["request_id"] == "abc-1"
    assert line["status"] == response.status_code
    if path == CHAT:
        assert line["outcome"] == "ok"
        assert line["completion_tokens"] == 4
        assert line["prompt_tokens"] > 0
        assert line["ttft_ms"] > 0
        assert stack.decode[0].requests[0].request_id.startswith("abc-1.")
        assert stack.prefill[0].requests[0].request_id == stack.decode[0].requests[0].request_id


@pytest.mark.parametrize("given", ["a b", "x" * 129, "", "ä"])
async def test_unfit_request_id_is_replaced(stack: Any, given: str) -> None:
    response = await stack.http.get("/v1/models", headers={"X-Request-ID": given.encode("latin-1")})
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


async def test_stream_carries_the_request_id(stack: Any) -> None:
    response = await stack.http.post(CHAT, json={**BODY, "stream": True}, headers={"X-Request-ID": "s-1"})
    assert response.headers["x-request-id"] == "s-1"


async def test_unforeseen_failure_is_500_and_tells_nothing(stack: Any) -> None:
    def crash(_: int) -> None:
        raise RuntimeError("secret detail")

    stack.prefill[0].faults = [crash]
    with structlog.testing.capture_logs() as logs:
        response = await stack.http.post(CHAT, json=BODY)
        await eventually(lambda: any(entry["event"] == "request" for entry in logs))
    assert response.status_code == 500
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in response.text
    assert [entry["log_level"] for entry in logs].count("error") == 1
    assert stack.metric("request_failure_total", category="internal") == 1


# ---- readiness -------------------------------------------------------------------------------------------


async def test_health_and_version(stack: Any) -> None:
    assert (await stack.http.get("/health")).json() == {"status": "ok"}
    version = (await stack.http.get("/version")).json()
    assert set(version) == {"version", "protocol_version", "kernels"}
    assert version["kernels"]["decode"] == {"an_op": ["torch"]}
    assert set(version["kernels"]) == {"prefill", "decode"}


async def test_ready_once_a_probe_went_through_and_probes_count_nowhere(stack: Any) -> None:
    async with asyncio.timeout(60.0):
        while (await stack.http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
    assert stack.decode[0].requests == []
    families = text_string_to_metric_families((await stack.http.get("/metrics")).text)
    moved = {
        sample.name
        for family in families
        for sample in family.samples
        if sample.value and not sample.name.endswith("_created")
    }
    assert {"kvferry_ready"} <= moved <= {"kvferry_ready", "kvferry_request_failure_total"}


async def test_not_ready_while_either_pool_has_no_ready_worker(stack: Any) -> None:
    for worker in (*stack.prefill, *stack.decode):
        worker.ready = False
        async with asyncio.timeout(60.0):
            while (await stack.http.get("/ready")).status_code != 503:
                await asyncio.sleep(0.01)
        assert stack.metric("ready") == 0
        worker.ready = True
        async with asyncio.timeout(60.0):
            while (await stack.http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_not_ready_where_workers_answer_but_no_work_goes_through(start_stack: Any) -> None:
    stack = await start_stack(timing=Timing(probe_interval_s=0.05), readiness_window_s=1.0, max_recoveries=0)
    async with asyncio.timeout(60.0):
        while (await stack.http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
    stack.script.may_prefill.clear()  # wedged: statuses still come
    async with asyncio.timeout(60.0):
        while (await stack.http.get("/ready")).status_code != 503:
            await asyncio.sleep(0.01)
    assert (await stack.http.get("/health")).status_code == 200


# ---- metrics ---------------------------------------------------------------------------------------------


async def test_every_router_family_moves(stack: Any) -> None:
    stack.script.may_decode.clear()
    session = {"session_id": "s"}
    running = asyncio.create_task(stack.http.post(CHAT, json={**BODY, **session}))
    await eventually(lambda: stack.metric("requests_running", model="demo") == 1)
    waiting = asyncio.create_task(stack.http.post(CHAT, json={**BODY, **session}))
    await eventually(lambda: stack.metric("requests_waiting", model="demo") == 1)
    stack.script.may_decode.set()
    assert (await running).status_code == (await waiting).status_code == 200

    def die(num_tokens: int) -> None:
        if num_tokens == 2:
            raise WorkerUnavailable("gone")

    stack.decode[0].faults = [die]
    await stack.http.post(CHAT, json=BODY)
    await stack.http.post(CHAT, json={**BODY, "n": 0})
    by = {"model": "demo", "method": "rdkv"}
    assert stack.metric("requests_running", model="demo") == 0
    assert stack.metric("requests_waiting", model="demo") == 0
    assert stack.metric("time_to_first_token_seconds_count", **by) == 3
    assert stack.metric("inter_token_latency_seconds_count", **by) == 9
    assert stack.metric("e2e_request_latency_seconds_count", **by) == 3
    assert stack.metric("request_success_total", model="demo", finish_reason="length") == 3
    assert stack.metric("request_failure_total", category="invalid_request") == 1
    prompts = [request.prompt_token_ids for request in stack.prefill[0].requests]
    num_prompt_tokens = sum(len(prompt) for prompt in prompts[:3])
    assert stack.metric("prompt_tokens_total", model="demo") == num_prompt_tokens
    reused = (await waiting).json()["kv"]["reused_tokens"]
    assert reused > 0
    assert stack.metric("prompt_tokens_reused_total", model="demo", source="session") == reused
    assert stack.metric("generation_tokens_total", **by) == 12
    assert stack.metric("recoveries_total", role="decode") == 1
    moved = {
        family.name for family in stack.registry.collect() if any(sample.value for sample in family.samples)
    }
    unmoved = {"kvferry_requests_running", "kvferry_requests_waiting"}
    unmoved.add("kvferry_access_denied")  # moved by requests without an accepted key: test_access.py
    unmoved.add("kvferry_session_store_events")  # moved by a Redis that fails: test_shared_sessions.py
    assert {family.name for family in RouterMetrics().registry.collect()} - moved == unmoved


async def test_metrics_have_the_names_that_dashboards_for_vllm_read(stack: Any) -> None:
    for method in ("full", "rdkv"):
        body = {**BODY, "kv_compression": {"method": method}}
        assert (await stack.http.post(CHAT, json=body)).status_code == 200
    exposed = (await stack.http.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("le") or sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(exposed)
        for sample in family.samples
        if sample.labels.get("model_name") == "demo"
    }
    tokens = [stack.metric("generation_tokens_total", model="demo", method=each) for each in ("full", "rdkv")]
    assert samples["vllm:generation_tokens_total", None] == sum(tokens) > 0
    assert samples["vllm:prompt_tokens_total", None] == stack.metric("prompt_tokens_total", model="demo")
    assert samples["vllm:num_requests_running", None] == samples["vllm:num_requests_waiting", None] == 0
    assert samples["vllm:request_success_total", "length"] == 2
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert samples[f"vllm:{name}_seconds_count", None] == 2
        assert samples[f"vllm:{name}_seconds_bucket", "+Inf"] == 2
    for name in ("inter_token_latency", "time_per_output_token"):
        assert samples[f"vllm:{name}_seconds_count", None] == sum(tokens) - 2
    assert 0 <= samples["vllm:kv_cache_usage_perc", None] < 1


@pytest.mark.parametrize("with_certs", [False, True])
async def test_all_metrics_include_the_workers(start_stack: Any, with_certs: bool, tmp_path: Path) -> None:
    registries = [CollectorRegistry() for _ in range(3)]
    for number, registry in enumerate(registries[:2], start=1):
        Counter("kvferry_shared", "On two workers", registry=registry).inc(number)
    Counter("kvferry_single", "On one", registry=registries[2]).inc(5)
    certs = None
    if with_certs:
        make_certs(tmp_path, days=2, everything=False)
        certs = Certs(str(tmp_path), "prefill")
    servers = [serve_metrics(registry, "127.0.0.1:0", certs=certs) for registry in registries]
    addresses = [server.address for server in servers]
    try:
        options = {"certs": str(tmp_path)} if with_certs else {}
        stack = await start_stack(worker_metrics=",".join([*addresses, "127.0.0.1:1"]), **options)
        own = (await stack.http.get("/metrics")).text
        everything = (await stack.http.get("/metrics?all=1")).text
    finally:
        for server in servers:
            server.close()
    assert "kvferry_single" not in own
    samples = {
        (sample.name, sample.labels.get("instance")): sample.value
        for family in text_string_to_metric_families(everything)
        for sample in family.samples
    }
    assert samples["kvferry_single_total", None] == 5
    assert samples["kvferry_shared_total", addresses[0]] == 1
    assert samples["kvferry_shared_total", addresses[1]] == 2
    assert everything.count("# TYPE kvferry_shared_total") == 1
    assert own.splitlines()[0] in everything


# ---- slow and odd clients --------------------------------------------------------------------------------


async def raw(stack: Any, *pieces: bytes) -> tuple[bytes, bytes]:
    """Send pieces over a socket; the answer's status line and body, once the router has closed."""
    url = httpx.URL(stack.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(), 60.0)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], body


async def test_slow_head_is_408(start_stack: Any) -> None:
    stack = await start_stack(read_timeout_s=0.2)
    status, body = await raw(stack, b"GET /health HTTP/1.1\r\nHost: x\r\n")
    assert b" 408 " in status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_slow_body_is_408_and_slows_nobody(start_stack: Any) -> None:
    stack = await start_stack(read_timeout_s=1.0)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    slow = asyncio.create_task(raw(stack, head, b"{"))
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 200
    status, body = await slow
    assert b" 408 " in status
    assert "1 s" in json.loads(body)["error"]["message"]


async def test_slow_second_head_on_a_kept_connection_is_408(start_stack: Any) -> None:
    stack = await start_stack(read_timeout_s=1.0)
    url = httpx.URL(stack.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await reader.readuntil(b"}")
    writer.write(b"GET /hea")
    assert b" 408 " in await asyncio.wait_for(reader.read(), 60.0)
    writer.close()


async def test_connection_that_sends_nothing_is_closed_silently(start_stack: Any) -> None:
    stack = await start_stack(read_timeout_s=0.1)
    assert await raw(stack) == (b"", b"")


async def test_head_in_small_pieces_is_read(stack: Any) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    status, body = await raw(stack, *(request[at : at + 7] for at in range(0, len(request), 7)))
    assert b" 200 " in status
    assert json.loads(body) == {"status": "ok"}


async def test_half_sent_body_of_a_client_that_leaves_is_no_failure_of_ours(stack: Any) -> None:
    url = httpx.URL(stack.base_url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    with structlog.testing.capture_logs() as logs:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await eventually(lambda: any(entry.get("status") == 499 for entry in logs))
