"""`docker compose up` without a GPU: images, health, a conversation, monitoring, crashes, a graceful stop.

The tests run in their order on one stack; the last one stops it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
SERVICES = ("router", "prefill", "decode", "redis", "prometheus")
AUTHORIZATION = {"Authorization": "Bearer container-test"}
RECOVERY_S = 30.0
WAIT_S = 240.0
FACT = "the quiet doctor visited the green market . remember that the pin of the red castle is 4 2 7 1 ."
QUESTION = "what is the pin of the red castle ?"

pytestmark = [pytest.mark.timeout(2400), pytest.mark.random_order(disabled=True)]


@pytest.fixture(scope="module")
def client(stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.base_url}/v1", api_key="container-test", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> list[Any]:
    """The two turns of a conversation during which nothing happens."""
    return [ask(client, "undisturbed", f"{FACT} {QUESTION}"), ask(client, "undisturbed", QUESTION)]


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> float:
    """Wait until it holds; returns after how many seconds it did."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, what
        time.sleep(0.5)
    return time.monotonic() - began_s


def ask(client: openai.OpenAI, session: str, text: str) -> Any:
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=16,
        extra_body={"session_id": session, "kv_compression": {"method": "rocketkv", "token_budget": 32}},
    )


def query(stack: Any, expression: str) -> list[dict[str, Any]]:
    answer = httpx.get(
        f"{stack.prometheus_url}/api/v1/query", params={"query": expression}, timeout=30
    ).json()
    return list(answer["data"]["result"])


# ---- as built and started --------------------------------------------------------------------------------


def test_every_container_is_healthy_and_the_first_start_has_ended(stack: Any) -> None:
    containers = stack.containers()
    assert set(containers) == {*SERVICES, "first-start"}
    assert containers["first-start"]["State"]["ExitCode"] == 0
    for service in SERVICES:
        eventually(
            lambda service=service: stack.containers()[service]["State"]["Health"]["Status"] == "healthy",  # type: ignore[misc]
            service,
        )


def test_image_runs_as_a_user_without_tools_to_build_with_on_a_file_system_it_cannot_write(
    stack: Any,
) -> None:
    script = (
        "id -u; touch /opt/kvferry/x 2>/dev/null && echo writable; touch /models/x && echo cached;"
        "for tool in cc gcc make git pip; do command -v $tool; done; true"
    )
    for role in ("router", "prefill", "decode"):
        assert stack.execute(role, "sh", "-c", script).split() == ["10001", "cached"]
    (image,) = json.loads(stack.engine.docker("image", "inspect", "kvferry:cpu"))
    assert image["Config"]["User"] == "10001:10001"
    assert image["Config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_image_lists_what_it_holds(stack: Any) -> None:
    bill = json.loads(stack.execute("router", "cat", "/usr/local/lib/kvferry/sbom.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    listed = {component["name"]: component["purl"] for component in bill["components"]}
    for name in ("kvferry", "torch", "fastapi", "pyzmq"):
        assert listed[name].startswith(f"pkg:pypi/{name}@"), name
    assert listed["libc6"].startswith("pkg:deb/debian/libc6@")


def test_redis_wants_tls_and_a_password(stack: Any) -> None:
    def attempt(change: str) -> str:
        program = f"""
import redis
url = open("/run/kvferry/worker/redis-url").read().strip(){change}
try:
    client = redis.Redis.from_url(url)
    client.set("kvferry:attempt", 1)
    print(client.delete("kvferry:attempt"))
    client.flushall()
except redis.RedisError as error:
    print(type(error).__name__)
"""
        return str(stack.execute("prefill", "python", "-c", program)).strip()

    assert attempt("").split() == ["1", "NoPermissionError"]
    assert attempt(".replace('rediss://kvferry:', 'rediss://kvferry:x')") == "AuthenticationError"
    assert attempt(".replace('rediss://', 'redis://').partition('?')[0]") == "ConnectionError"


# ---- a conversation, watched -----------------------------------------------------------------------------


def test_the_official_client_holds_a_conversation(client: openai.OpenAI, undisturbed: list[Any]) -> None:
    first, second = undisturbed
    assert first.choices[0].message.content
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.total_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_its_own_prometheus_scrapes_every_service_and_has_every_rule(stack: Any) -> None:
    def up() -> dict[str, str]:
        return {sample["metric"]["job"]: sample["value"][1] for sample in query(stack, "up")}

    jobs = ("router", "prefill", "decode", "prometheus")
    eventually(lambda: up() == dict.fromkeys(jobs, "1"), "all targets are scraped")
    eventually(lambda: query(stack, "kvferry_generation_tokens_total > 0") != [], "tokens are counted")
    groups = httpx.get(f"{stack.prometheus_url}/api/v1/rules", timeout=30).json()["data"]["groups"]
    loaded = {rule["name"] for group in groups for rule in group["rules"]}
    written = {
        rule.get("alert", rule.get("record"))
        for path in (REPOSITORY / "deploy/prometheus/rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    }
    assert loaded == written


# ---- crashes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", SERVICES)
def test_it_serves_again_after_a_crash(
    stack: Any, client: openai.OpenAI, undisturbed: list[Any], service: str
) -> None:
    session = f"crash-{service}"
    ask(client, session, f"{FACT} {QUESTION}")
    killed_pid = stack.containers()[service]["State"]["Pid"]
    stack.kill(service)
    eventually(lambda: stack.containers()[service]["State"]["Pid"] not in (0, killed_pid), "restarted")
    answers: list[Any] = []

    def serves() -> bool:
        if service == "prometheus":
            try:
                return httpx.get(f"{stack.prometheus_url}/-/ready", timeout=30).status_code == 200
            except httpx.TransportError:
                return False
        try:
            answers.append(ask(client, session, QUESTION))
        except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError):
            return False
        return True

    # On a machine so busy that starting everything took minutes, one service takes its share of that.
    took_s = eventually(serves, f"serves after a crash of {service}", max(RECOVERY_S, stack.start_s))
    print(f"{service}: served again {took_s:.1f} s after its restart")  # noqa: T201
    if answers:
        assert answers[-1].usage.prompt_tokens == undisturbed[1].usage.prompt_tokens
        assert answers[-1].choices[0].message.content == undisturbed[1].choices[0].message.content


# ---- the end ---------------------------------------------------------------------------------------------


def test_a_stream_under_way_ends_whole_when_its_router_is_told_to_stop(stack: Any) -> None:
    body = {
        "model": "demo", "prompt": "the old", "max_tokens": 600, "temperature": 0, "stream": True,
        "logit_bias": {"6": -100},
    }  # fmt: skip
    lines: list[str] = []
    begun = threading.Event()

    def stream() -> None:
        with httpx.stream(
            "POST", f"{stack.base_url}/v1/completions", json=body, headers=AUTHORIZATION, timeout=120
        ) as response:
            for line in filter(None, response.iter_lines()):
                lines.append(line)
                begun.set()

    pid = int(stack.containers()["router"]["State"]["Pid"])
    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(120)
    os.kill(pid, signal.SIGTERM)
    seen = len(lines)
    thread.join(WAIT_S)
    assert len(lines) > seen
    assert lines[-1] == "data: [DONE]"


def test_services_end_by_themselves_when_they_are_stopped(stack: Any) -> None:
    def is_ready() -> bool:
        try:
            return httpx.get(f"{stack.base_url}/ready", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    eventually(is_ready, "the router is back")
    stack.compose("stop", timeout_s=900)
    containers = stack.containers()
    codes = {service: containers[service]["State"]["ExitCode"] for service in SERVICES}
    assert codes == dict.fromkeys(SERVICES, 0)
