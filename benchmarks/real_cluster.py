"""Real routers, Redis and control calls under a load with queues: checks `scale_simulation.py`.

    python benchmarks/real_cluster.py [--clusters 1x4 3x8 3x16] [--measured-s 60] [--output FILE]

A cluster of 3x16 has three router processes, one Redis, and 16 simulated workers of each role
(`simulated_workers.py`) that take one prompt after another. Turns come at random moments, as many for each
prefill worker in every cluster, each at any of the routers, of an idle session or of a new one. Times are
those that the client sees. CPU times are of the routers' processes and of Redis', without what they take when
nothing comes, which is status calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from kvtest.redis_server import RedisServer  # noqa: E402
from router_scale import Router, answer, cpu_s, start_router, workers  # noqa: E402

from kvferry.tools.evaluation.provenance import commit  # noqa: E402

STORED_S, WHOLE_S, PACE_S = 0.5, 1.0, 0.02
"""Prefill of a prompt whose session is stored there and of any other; a step."""
RATE_A_WORKER, NEW_SHARE, SESSIONS_A_WORKER = 1.1, 0.1, 20
FIRST_TOKENS, FURTHER_TOKENS, ANSWER_TOKENS = 48, 8, 16
WARM_UP_S, IDLE_S = 10.0, 5.0
SEED = 7


@dataclass
class Turns:
    """What turns met that ended after the warm-up."""

    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    at_their_worker: int = 0


class Client:
    """Sends turns of so many sessions to routers, each at random."""

    def __init__(self, routers: list[Router], num_sessions: int) -> None:
        self._routers, self._random = routers, random.Random(SEED)
        self._names = (f"s{number}" for number in itertools.count())
        self._idle = [next(self._names) for _ in range(num_sessions)]
        self.turns = Turns()

    async def begin(self, at_once: int) -> None:
        """The first turn of every session."""
        names = iter(list(self._idle))

        async def some() -> None:
            for name in names:
                await self._turn(name, FIRST_TOKENS)

        await asyncio.gather(*(some() for _ in range(at_once)))
        self.turns = Turns()

    async def run(self, rate: float, duration_s: float) -> None:
        """Turns for so long, and until the last one has ended."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        ends_s = next_s + duration_s
        async with asyncio.TaskGroup() as group:
            while (next_s := next_s + self._random.expovariate(rate)) < ends_s:
                await asyncio.sleep(next_s - loop.time())
                group.create_task(self._any_turn())

    async def _any_turn(self) -> None:
        name = self._idle.pop(self._random.randrange(len(self._idle)))
        is_new = self._random.random() < NEW_SHARE
        name = next(self._names) if is_new else name
        await self._turn(name, FIRST_TOKENS if is_new else FURTHER_TOKENS)
        self._idle.append(name)

    async def _turn(self, name: str, num_tokens: int) -> None:
        fields = {
            "prompt": self._random.choices(range(101, 501), k=num_tokens),
            "session_id": name,
            "session_mode": "append",
            "stream_options": {"include_usage": True},
        }
        began_s = time.perf_counter()
        came_s, last = await answer(self._random.choice(self._routers).address, ANSWER_TOKENS, **fields)
        self.turns.first_token_s.append(came_s[0] - began_s)
        self.turns.per_token_s.append((came_s[-1] - came_s[0]) / (ANSWER_TOKENS - 1))
        self.turns.at_their_worker += last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def measure(num_routers: int, num_workers: int, measured_s: float, folder: Path) -> dict[str, Any]:
    times = ("--stored-s", str(STORED_S), "--whole-s", str(WHOLE_S))
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer.running())
        found = stack.enter_context(workers(folder, num_workers, PACE_S, *times))
        options = [*found, "--history-redis", redis.url]
        names = [f"router-{num_routers}x{num_workers}-{number}" for number in range(num_routers)]
        routers = [start_router(stack, folder, name, options) for name in names]
        client = Client(routers, SESSIONS_A_WORKER * num_workers)
        await client.begin(at_once=2 * num_workers)
        rate = RATE_A_WORKER * num_workers

        async def cores(run: Awaitable[None]) -> tuple[float, float, float]:
            """Of all routers and of Redis, and how long it took."""
            before = sum(cpu_s(router.pid) for router in routers), cpu_s(redis.pid), time.perf_counter()
            await run
            took_s = time.perf_counter() - before[2]
            used = sum(cpu_s(router.pid) for router in routers) - before[0], cpu_s(redis.pid) - before[1]
            return used[0] / took_s, used[1] / took_s, took_s

        idle = await cores(asyncio.sleep(IDLE_S))
        await client.run(rate, WARM_UP_S)
        client.turns = turns = Turns()
        busy = await cores(client.run(rate, measured_s))
    number = len(turns.first_token_s)
    router_ms, redis_ms = [1e3 * (busy[index] - idle[index]) * busy[2] / number for index in (0, 1)]
    return {
        "routers": num_routers,
        "workers": num_workers,
        "rate": rate,
        "turns": number,
        "router_cpu_ms": router_ms,
        "redis_cpu_ms": redis_ms,
        "idle_router_cores": idle[0] / num_routers,
        "at_their_prefill_worker": turns.at_their_worker / number,
        "first_token_s": [round(seconds, 4) for seconds in turns.first_token_s],
        "per_token_s": [round(seconds, 5) for seconds in turns.per_token_s],
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clusters", nargs="+", default=["1x4", "3x8", "3x16"], help="routers x workers")
    parser.add_argument("--measured-s", type=float, default=60.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="kvferry-cluster-") as folder:
        for cluster in arguments.clusters:
            num_routers, num_workers = map(int, cluster.split("x"))
            runs.append(await measure(num_routers, num_workers, arguments.measured_s, Path(folder)))
            figures = runs[-1]
            middle_s = sorted(figures["first_token_s"])[figures["turns"] // 2]
            sys.stdout.write(
                f"{cluster}: {figures['turns']} turns, first token {1e3 * middle_s:.0f} ms (median), router "
                f"{figures['router_cpu_ms']:.2f} and Redis {figures['redis_cpu_ms']:.2f} ms of CPU a turn, "
                f"an idle router {figures['idle_router_cores']:.3f} cores\n"
            )
    if arguments.output:
        about = {"command": sys.argv, "commit": commit(), "cores": os.cpu_count()}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**about, "runs": runs}) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
