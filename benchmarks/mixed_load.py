"""Time to first token of short prompts beside long ones, and what that costs the long ones.

    python benchmarks/mixed_load.py [--long-tokens 7400] [--requests 40] [--interval-s 2] [--output FILE]

Serves the demo model with `kvferry serve` and asks as a client does, streaming. Every prompt is new, so that
none continues from another's KV. Four parts:

    alone        one request at a time, short and long
    beside       short requests one after another while a long prompt runs
    open_loop    requests that come at random moments, on average every --interval-s, one of five long
    crowd        all at once: 2 long, 8 short; prompt tokens per second until the last answer; several times

Seconds, by the client's clock. To compare commits: python benchmarks/compare.py ... mixed_load.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from kvferry.tools.bench.serving import served
from kvferry.tools.recall.tasks import MIN_TOKENS, TASKS

TIMEOUT_S = 600.0
METHOD = {"method": "rocketkv", "token_budget": 256}
SHORT_TOKENS = 100
GROUP = 5
"""Of so many requests of the open loop one is long, at a random place."""
NUM_ALONE = {"short": 15, "long": 2}
NUM_BESIDE, SHORTS_BESIDE = 3, 5
LEAD_S = 0.3
"""A short request comes this long after the long one, or after the short one before it."""
CROWD, NUM_CROWDS = {"long": 2, "short": 8}, 5


class Load:
    """Requests of one client. Each prompt has a seed of its own."""

    def __init__(self, client: httpx.Client, long_tokens: int) -> None:
        self._client = client
        self.num_tokens = {"short": SHORT_TOKENS, "long": long_tokens}
        self._seed = 0

    def prompt(self, kind: str) -> str:
        self._seed += 1
        num_tokens = self.num_tokens[kind]
        example = TASKS["multi_key_8"].example(num_tokens=max(num_tokens, MIN_TOKENS), seed=self._seed)
        # A word is a token; the end has the question.
        return " ".join(example.messages[-1]["content"].split()[-num_tokens:])

    def first_token_s(self, prompt: str) -> float:
        """Seconds from sending a request to its first token; returns after its last one."""
        body = {
            "model": "demo", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4,
            "temperature": 0, "stream": True, "kv_compression": METHOD,
        }  # fmt: skip
        begin_s, first_s = time.perf_counter(), 0.0
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if first_s or not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    first_s = time.perf_counter() - begin_s
        assert first_s, "the answer has no token"
        return first_s


def alone(load: Load) -> dict[str, list[float]]:
    return {
        f"{kind}_s": [load.first_token_s(load.prompt(kind)) for _ in range(number)]
        for kind, number in NUM_ALONE.items()
    }


def beside(load: Load) -> dict[str, list[float]]:
    """Only short requests that were sent before the long one's first token count."""
    shorts: list[float] = []
    longs: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(NUM_BESIDE):
            prompts = [load.prompt("short") for _ in range(SHORTS_BESIDE)]
            running = pool.submit(load.first_token_s, load.prompt("long"))
            for prompt in prompts:
                time.sleep(LEAD_S)
                if running.done():
                    break
                shorts.append(load.first_token_s(prompt))
            longs.append(running.result())
    return {"short_s": shorts, "long_s": longs}


def open_loop(load: Load, num_requests: int, interval_s: float) -> dict[str, dict[str, float]]:
    chance = random.Random(0)
    kinds: list[str] = []
    while len(kinds) < num_requests:
        kinds += chance.sample(["long", *["short"] * (GROUP - 1)], GROUP)
    prompts = [load.prompt(kind) for kind in kinds[:num_requests]]
    at_s = time.monotonic()
    with ThreadPoolExecutor(num_requests) as pool:
        running = []
        for prompt in prompts:
            at_s += chance.expovariate(1 / interval_s)
            time.sleep(max(0.0, at_s - time.monotonic()))
            running.append(pool.submit(load.first_token_s, prompt))
        waits = [(kind, future.result()) for kind, future in zip(kinds, running, strict=False)]
    found = {}
    for kind in ("short", "long"):
        times = [wait_s for sent_kind, wait_s in waits if sent_kind == kind]
        cuts = statistics.quantiles(times, n=20, method="inclusive")
        found[kind] = {"p50_s": cuts[9], "p95_s": cuts[18], "requests": len(times)}
    return found


def crowds(load: Load) -> dict[str, list[float]]:
    return {"prompt_tokens_per_s": [_crowd(load) for _ in range(NUM_CROWDS)]}


def _crowd(load: Load) -> float:
    prompts = [load.prompt(kind) for kind, number in CROWD.items() for _ in range(number)]
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(load.first_token_s, prompts))
    num_tokens = sum(load.num_tokens[kind] * number for kind, number in CROWD.items())
    return num_tokens / (time.perf_counter() - begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--long-tokens", type=int, default=7400)
    parser.add_argument("--requests", type=int, default=40, help="of the open loop")
    parser.add_argument("--interval-s", type=float, default=2.0, help="mean time between two of them")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    with (
        served() as addresses,
        httpx.Client(base_url=addresses["url"], timeout=TIMEOUT_S, trust_env=False) as client,
    ):
        load = Load(client, options.long_tokens)
        for kind in ("short", "long"):  # warm up
            load.first_token_s(load.prompt(kind))
        figures = {
            "alone": alone(load),
            "beside": beside(load),
            "open_loop": open_loop(load, options.requests, options.interval_s),
            "crowd": crowds(load),
        }
    for part in ("alone", "beside"):
        for name, times in figures[part].items():
            sys.stdout.write(f"{part}: {name.removesuffix('_s')} {statistics.median(times):.2f} s\n")
    for kind, summary in figures["open_loop"].items():
        sys.stdout.write(f"open loop: {kind} p50 {summary['p50_s']:.2f} s, p95 {summary['p95_s']:.2f} s\n")
    rate = statistics.median(figures["crowd"]["prompt_tokens_per_s"])
    sys.stdout.write(f"crowd: {rate:.0f} prompt tokens/s\n")
    if options.output:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        result = {"command": sys.argv, "machine": machine, "method": METHOD, "numbers": figures}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
