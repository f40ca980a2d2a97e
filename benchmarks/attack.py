"""How long one API key waits for its first tokens while another attacks, against the other's honest load.

    python benchmarks/attack.py [--seconds 120] [--bursts-per-minute 20] [--output FILE]

`kvferry serve` with the services as processes, a Redis and a small random model whose vocabulary follows
grammars. The polite key asks all the time. The other sends bursts: first honest chats, then at the same
moments, with as many requests each, attacks: schemas that take minutes, schemas that take the stack, bodies
of 8 MiB without a key, texts of 8 MiB, a crowd beyond its key's limit, stored answers with megabytes of
names, and long prompts that keep the workers busy. Many leave before they have an answer.

Prints the polite key's 95th percentile of the time to the first token in both, and their ratio; the router's
largest memory; and every answer by status. The exit code is 1 where the ratio is above its goal, the memory
above its bound, an honest request failed, an attack got a 5xx other than a named 503, or a process ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import httpx  # noqa: E402
from kvtest.documents import make_document  # noqa: E402
from kvtest.redis_server import RedisServer  # noqa: E402
from kvtest.stack import Stack, serving  # noqa: E402
from kvtest.text_models import make_text_model, text_tokenizer  # noqa: E402

from kvferry.tools.operate.command import make_key  # noqa: E402

GOAL = 1.5
MAX_GROWTH_MIB = 1024.0
"""Of the router's resident memory while it is attacked: what SECURITY.md says."""
POLITE_INTERVAL_S, POLITE_WORDS = 0.5, 60
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "max_position_embeddings": 8192,
}
BIG = 8_300_000
CHAT = "/v1/chat/completions"
BURSTS = {
    "slow_schema": 7,
    "deep_schema": 4,
    "keyless_body": 12,
    "long_text": 12,
    "crowd": 24,
    "stored": 6,
    "busy": 8,
}
"""Requests at the same time in a burst of each kind."""


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


LONG_TEXT = json.dumps(chat("long text " * (BIG // 10))).encode()


class Caller:
    """Requests of one key, and what became of them."""

    def __init__(self, client: httpx.AsyncClient, key: str, seed: int) -> None:
        self._client = client
        self.headers = {"Authorization": f"Bearer {key}"}
        self._numbers = itertools.count(seed * 1_000_000)
        self.first_s: list[float] = []
        self.answers: Counter[str] = Counter()

    def text(self, words: int) -> str:
        """One that nobody has sent before."""
        return make_document(next(self._numbers), num_words=words).text

    async def ask(self) -> None:
        """A streamed chat, whose time to the first token is kept."""
        body = chat(self.text(POLITE_WORDS), stream=True, ignore_eos=True)
        begin_s = time.perf_counter()
        async with self._client.stream("POST", CHAT, json=body, headers=self.headers) as answer:
            has_begun = False
            async for line in answer.aiter_lines():
                if not has_begun and '"content":"' in line and '"content":""' not in line:
                    self.first_s.append(time.perf_counter() - begin_s)
                    has_begun = True
            self.answers[
                str(answer.status_code) if has_begun else f"{answer.status_code} without a token"
            ] += 1

    async def send(self, kind: str, body: Any, *, path: str = CHAT, leaves_s: float = 120.0) -> None:
        """Any request; one that takes longer than `leaves_s` is left."""
        try:
            async with asyncio.timeout(leaves_s):
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await self._client.post(path, content=content, headers=self.headers)
            code = "" if answer.status_code == 200 else f" {answer.json()['error']['code']}"
            self.answers[f"{kind}: {answer.status_code}{code}"] += 1
        except TimeoutError:
            self.answers[f"{kind}: left"] += 1
        except httpx.HTTPError as error:
            self.answers[f"{kind}: {type(error).__name__}"] += 1


class Attacker(Caller):
    """A key, and a second one that may have two requests at a time."""

    def __init__(self, client: httpx.AsyncClient, key: str, limited: str, seed: int) -> None:
        super().__init__(client, key, seed)
        self.limited = Caller(client, limited, seed + 1)

    async def slow_schema(self, number: int) -> None:
        patterns = [f".*{chr(97 + i % 26)}.{{{i}}}" for i in range(40)]
        parts = [{"properties": {"x": {"type": "string", "pattern": pattern}}} for pattern in patterns]
        schema = {"title": str(next(self._numbers)), "allOf": parts}
        await self.send("slow_schema", chat("x", guided_json=schema), leaves_s=0.5 if number else 60.0)

    async def deep_schema(self, number: int) -> None:
        links = {f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1000)}
        title = str(next(self._numbers))
        schema = {"title": title, "$defs": {**links, "d1000": {}}, "$ref": "#/$defs/d0"}
        await self.send("deep_schema", chat("x", guided_json=schema))

    async def keyless_body(self, number: int) -> None:
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(5.0):
                answer = await self._client.request("GET", "/health", content=b"x" * BIG)
                self.answers[f"keyless_body: {answer.status_code}"] += 1
                return
        self.answers["keyless_body: closed"] += 1

    async def long_text(self, number: int) -> None:
        await self.send("long_text", LONG_TEXT)

    async def crowd(self, number: int) -> None:
        await self.limited.send("crowd", chat(self.text(POLITE_WORDS)))

    async def stored(self, number: int) -> None:
        body = {
            "model": "small",
            "input": "x",
            "max_output_tokens": 2,
            "metadata": {f"{number}" * 4_000_000: "v"},
        }
        await self.send("stored", body, path="/v1/responses")

    async def busy(self, number: int) -> None:
        await self.send("busy", chat(self.text(3000)), leaves_s=2.0)


def other_key(base_url: str, keys: list[str], options: argparse.Namespace, attacks: bool) -> dict[str, int]:
    """Send bursts at random times, the same ones whatever they are; returns the answers. In a process of its
    own, so that what an attack costs the attacker does not keep the polite key's client waiting."""

    async def send() -> Counter[str]:
        async with open_client(base_url) as client:
            caller = Attacker(client, keys[1], keys[2], 20) if attacks else Caller(client, keys[1], 10)
            rng = random.Random(1)
            kinds = [kind for kind in BURSTS for _ in range(10)]
            rng.shuffle(kinds)
            ends_s = time.monotonic() + options.seconds
            async with asyncio.TaskGroup() as group:
                for kind in itertools.cycle(kinds):
                    await asyncio.sleep(rng.expovariate(options.bursts_per_minute / 60))
                    if time.monotonic() > ends_s:
                        break
                    for number in range(BURSTS[kind]):
                        group.create_task(
                            getattr(caller, kind)(number) if isinstance(caller, Attacker) else caller.ask()
                        )
            return caller.answers + caller.limited.answers if isinstance(caller, Attacker) else caller.answers

    return dict(sorted(asyncio.run(send()).items()))


async def beside(
    stack: Stack, keys: list[str], options: argparse.Namespace, seed: int, *, attacks: bool
) -> tuple[Caller, dict[str, int]]:
    """The polite key's requests beside the other's; returns them and the other's answers."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        async with open_client(stack.base_url) as client:
            await loop.run_in_executor(process, time.sleep, 0)  # until it has started
            other = loop.run_in_executor(process, other_key, stack.base_url, keys, options, attacks)
            polite, ends_s = Caller(client, keys[0], seed), time.monotonic() + options.seconds
            async with asyncio.TaskGroup() as group:
                while time.monotonic() < ends_s:
                    group.create_task(polite.ask())
                    await asyncio.sleep(POLITE_INTERVAL_S)
            return polite, await other


def open_client(base_url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits, trust_env=False)


async def measure(stack: Stack, keys: list[str], options: argparse.Namespace) -> dict[str, Any]:
    pids = {role: int(stack.addresses[f"{role}_pid"]) for role in ("router", "prefill", "decode")}
    async with open_client(stack.base_url) as client:
        for number in range(10):
            await Caller(client, keys[0], 80 + number).ask()
    at_first_mib = resident_mib(pids["router"])
    honest, honest_answers = await beside(stack, keys, options, 1, attacks=False)
    before_mib = resident_mib(pids["router"])
    attacked, attack_answers = await beside(stack, keys, options, 2, attacks=True)
    ready = json.loads(stack.ready_path.read_text())
    quantiles = {"honest": _quantiles(honest.first_s), "attack": _quantiles(attacked.first_s)}
    return {
        "first_token_s": quantiles,
        "p95_ratio": round(quantiles["attack"]["p95"] / quantiles["honest"]["p95"], 2),
        "polite_answers": {"honest": dict(honest.answers), "attack": dict(attacked.answers)},
        "honest_bursts": honest_answers,
        "attacks": attack_answers,
        "router_mib": {
            "at_first": at_first_mib,
            "before_the_attack": before_mib,
            "largest": resident_mib(pids["router"], "VmHWM"),
            "afterwards": resident_mib(pids["router"]),
        },
        "restarted": [role for role, pid in pids.items() if int(ready[f"{role}_pid"]) != pid],
    }


def resident_mib(pid: int, name: str = "VmRSS") -> float:
    """Resident memory, or with `VmHWM` the most there has been; NaN where the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return round(next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024, 1)


def judged(result: dict[str, Any]) -> list[str]:
    """What was broken."""
    memory = result["router_mib"]
    growth = memory["largest"] - memory["before_the_attack"]
    broken = [
        f"{count} polite requests ended in {status}"
        for answers in result["polite_answers"].values()
        for status, count in answers.items()
        if status != "200"
    ]
    for answer in result["attacks"]:
        status = answer.split(": ")[1]
        if status[:1] == "5" and not status.startswith("503 "):
            broken.append(f"an attack was answered with {answer}")
    if result["p95_ratio"] > GOAL:
        broken.append(
            f"the polite key's 95th percentile is {result['p95_ratio']} times that beside honest load"
        )
    if not growth <= MAX_GROWTH_MIB:
        broken.append(f"the router grew by {growth:.0f} MiB, more than {MAX_GROWTH_MIB:.0f}")
    return broken + [f"{role} was restarted" for role in result["restarted"]]


def _quantiles(times_s: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times_s, n=20)
    return {"p50": round(statistics.median(times_s), 3), "p95": round(cuts[-1], 3), "num": len(times_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of each half")
    parser.add_argument("--bursts-per-minute", type=float, default=20.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    made = [make_key(name) for name in ("polite", "attacker", "limited")]
    with tempfile.TemporaryDirectory() as folder, RedisServer.running() as redis:
        path = Path(folder) / "keys.toml"
        limit = "max_concurrent = 2\ntokens_per_minute = 10000000\n"
        path.write_text("\n".join(entry for _, entry in made) + limit)
        model = make_text_model(Path(folder) / "model", tokenizer=text_tokenizer(), **MODEL)
        model_options = ("--model", str(model), "--model-name", "small", "--history-redis", redis.url)
        with serving("--api-keys-file", str(path), "--implicit-sessions", "0", *model_options) as stack:
            result = asyncio.run(measure(stack, [key for key, _ in made], options))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    broken = judged(result)
    command = (
        f"python benchmarks/attack.py --seconds {options.seconds:g} "
        f"--bursts-per-minute {options.bursts_per_minute:g}"
    )
    result = {"command": command, "commit": commit, "goal": GOAL, **result, "broken": broken}
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    sys.exit(int(bool(broken)))


if __name__ == "__main__":
    main()
