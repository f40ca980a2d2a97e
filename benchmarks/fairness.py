"""How long one API key waits for its first tokens while another floods the same workers.

    python benchmarks/fairness.py [--rounds 4] [--requests 30] [--words 400] [--output FILE]

`kvferry serve` with two keys. The capacity is what one key gets with two requests at a time, and a fair load
is half of it. The polite key asks at half its fair load, at random times; the noisy one at ten times its fair
load, whatever it is told, with the same kind of prompt. Rounds with and without the noisy key take turns, and
have the polite key's requests at the same times. Prints the median and the 95th percentile of the polite
key's time to the first token, and their ratio; and the median time for which its prompts ran (`prefill_ms`),
which other processes' work makes longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import httpx  # noqa: E402
from kvtest.documents import make_document  # noqa: E402
from kvtest.stack import serving  # noqa: E402

from kvferry.tools.operate.command import make_key  # noqa: E402

GOAL = 1.5
MAX_TOKENS = 4
FLOOD_S = 15.0
"""The flood lasts so long before the polite key asks: longer than the schedule looks back."""
POLITE_SHARE, NOISY_SHARE = 0.5, 10.0


class Load:
    """Requests of one key, each with a prompt of its own.

    Args: seed: of the prompts; times: of when they come.
    """

    def __init__(self, client: httpx.AsyncClient, key: str, words: int, seed: int, times: int = 0) -> None:
        self._client, self._words = client, words
        self._headers = {"Authorization": f"Bearer {key}"}
        self._rng, self._count = random.Random(times), seed * 1_000_000
        self.first_s: list[float] = []
        self.prefill_ms: list[float] = []
        self.statuses: Counter[int] = Counter()

    async def ask(self) -> None:
        self._count += 1
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": make_document(self._count, num_words=self._words).text}],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "kv_compression": {"method": "full"},
        }
        begin_s = time.perf_counter()
        request = self._client.stream("POST", "/v1/chat/completions", json=body, headers=self._headers)
        with contextlib.suppress(httpx.HTTPError):
            async with request as answer:
                self.statuses[answer.status_code] += 1
                has_begun = answer.status_code != 200
                async for line in answer.aiter_lines():
                    if not has_begun and '"content":"' in line and '"content":""' not in line:
                        self.first_s.append(time.perf_counter() - begin_s)
                        has_begun = True
                    if line.startswith("data: {") and (kv := json.loads(line[6:]).get("kv")):
                        self.prefill_ms.append(kv["prefill_ms"])

    async def arrive(self, per_s: float, count: int | None = None) -> None:
        """Requests at random times; without a count until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            while count is None or count > 0:
                group.create_task(self.ask())
                count = None if count is None else count - 1
                await asyncio.sleep(self._rng.expovariate(per_s))


async def capacity_per_s(load: Load, count: int) -> float:
    """Requests a second with two at a time."""
    begin_s = time.perf_counter()
    for _ in range(count // 2):
        await asyncio.gather(load.ask(), load.ask())
    return count / (time.perf_counter() - begin_s)


async def measure(base_url: str, keys: list[str], options: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits, trust_env=False) as client:
        await capacity_per_s(Load(client, keys[0], options.words, 90), 6)
        fair_per_s = await capacity_per_s(Load(client, keys[0], options.words, 91), 16) / 2
        polite = {
            name: Load(client, keys[0], options.words, 1 + n, times=1)
            for n, name in enumerate(("alone", "beside"))
        }
        noisy = Load(client, keys[1], options.words, 3, times=3)
        for _ in range(options.rounds):
            await polite["alone"].arrive(POLITE_SHARE * fair_per_s, options.requests)
            flood = asyncio.create_task(noisy.arrive(NOISY_SHARE * fair_per_s))
            await asyncio.sleep(FLOOD_S)
            await polite["beside"].arrive(POLITE_SHARE * fair_per_s, options.requests)
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
            await asyncio.sleep(3.0)
    figures = {name: _quantiles(load.first_s) for name, load in polite.items()}
    return {
        "fair_per_s": round(fair_per_s, 2),
        "first_token_s": figures,
        "prefill_ms": {name: statistics.median(load.prefill_ms) for name, load in polite.items()},
        "p95_ratio": round(figures["beside"]["p95"] / figures["alone"]["p95"], 2),
        "median_ratio": round(figures["beside"]["p50"] / figures["alone"]["p50"], 2),
        "polite_statuses": {name: dict(load.statuses) for name, load in polite.items()},
        "noisy_statuses": dict(noisy.statuses),
        "noisy_first_token_s": _quantiles(noisy.first_s) if len(noisy.first_s) > 1 else {},
    }


def _quantiles(times_s: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times_s, n=20)
    return {"p50": round(statistics.median(times_s), 3), "p95": round(cuts[-1], 3), "num": len(times_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=30, help="of the polite key, in each round")
    parser.add_argument("--words", type=int, default=400)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = [make_key(name) for name in ("polite", "noisy")]
        path = Path(folder) / "keys.toml"
        path.write_text("\n".join(entry for _, entry in made))
        with serving("--api-keys-file", str(path), "--implicit-sessions", "0") as stack:
            result = asyncio.run(measure(stack.base_url, [key for key, _ in made], options))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    command = (
        f"python benchmarks/fairness.py --rounds {options.rounds} --requests {options.requests} "
        f"--words {options.words}"
    )
    text = json.dumps({"command": command, "commit": commit, "goal": GOAL, **result}, indent=1) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
