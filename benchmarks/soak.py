"""A cluster under mixed load for minutes or hours: does anything grow?

    python benchmarks/soak.py --minutes 30 [--seed 1] [--clients 4] [--output FILE.json]

The cluster is that of `chaos.py`: two routers on one Redis, two prefill and two decode workers with the demo
model, a proxy before each. Clients hold conversations of two turns whose tokens are compared with the
one-process oracle's, and delete them; others close their stream in mid-answer, store and delete documents,
and ask without a session. Meanwhile links and processes are struck by seeded faults, but no process is
killed, since a new one would hide what the old one had gathered. Every two seconds each process's memory,
file descriptors and threads are read, the arena's bytes, and those of prefill's history in memory, whose
limit is low here, so that it fills soon.

After the first third, in which caches fill, the slope of each is fitted through the means of ten blocks of
time. `grows` is true where it is more than two of its standard errors above zero and adds up to more than a
tolerance over the run. The exit code is 1 where something grows, a client got what it must not, or the arenas
are not free at the end. FILE.png shows the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import httpx  # noqa: E402
import torch  # noqa: E402
from kvtest.chaos.cluster import Cluster, running  # noqa: E402
from kvtest.chaos.conversation import MODEL, Conversation, Outcome  # noqa: E402
from kvtest.chaos.faults import draw, strike  # noqa: E402
from kvtest.chaos.script import METHODS, Script, make_script  # noqa: E402

from kvferry.models import DEMO_MODEL  # noqa: E402
from kvferry.shared.model.loading import load_model  # noqa: E402
from kvferry.shared.model.tokenizer import ChatTokenizer  # noqa: E402

SAMPLE_S, FAULT_S, HEAL_S = 2.0, 6.0, 25.0
NUM_BLOCKS = 10
TOLERANCE = {"rss_mib": 8.0, "fds": 4.0, "threads": 2.0, "arena_mib": 1.0, "history_mib": 1.0}
"""Growth over the part of the run that is fitted, up to which it is not looked at."""
HISTORY_BYTES = "4MiB"
_GAUGES = {
    "decode": ("arena_mib", "kvferry_arena_bytes", ("reserved", "in_transfer", "running")),
    "prefill": ("history_mib", "kvferry_history_bytes", ("memory",)),
}
"""By role: a figure, and the gauge whose labels add up to it."""


@dataclass(kw_only=True)
class Series:
    """What was read of one process: seconds from the start, and each figure then."""

    at_s: list[float] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, at_s: float, figures: dict[str, float]) -> None:
        self.at_s.append(at_s)
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)


class Soak:
    """One run: what its clients got, what struck, and what was read."""

    def __init__(self, cluster: Cluster, scripts: list[Script], seed: int) -> None:
        self._cluster, self._scripts, self._seed = cluster, scripts, seed
        self._begin_s = time.monotonic()
        self.outcome = Outcome()
        self.struck: Counter[str] = Counter()
        self.did: Counter[str] = Counter()
        self.series = {name: Series() for name in cluster.nodes}

    async def run(self, seconds: float, num_clients: int) -> None:
        self._end_s = self._begin_s + seconds
        tasks = [
            asyncio.create_task(coroutine) for coroutine in (self._sample(), self._strike(), self._show())
        ]
        await asyncio.gather(*(self._client(number) for number in range(num_clients)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._cluster.heal()
        await self._cluster.listening()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._end_s

    # ---- load ----

    async def _client(self, number: int) -> None:
        rng = random.Random(f"client {self._seed} {number}")
        count = 0
        while not self._is_over:
            count += 1
            name = f"soak-{self._seed}-{number}-{count}"
            kind = rng.choices(("talk", "leave", "document", "plain"), weights=(5, 3, 1, 1))[0]
            with contextlib.suppress(httpx.HTTPError):
                async with httpx.AsyncClient(timeout=65) as client:
                    await getattr(self, f"_{kind}")(rng, client, name)
            self.did[kind] += 1

    async def _talk(self, rng: random.Random, client: httpx.AsyncClient, name: str) -> None:
        """A conversation of two turns, which is deleted."""
        urls = self._cluster.urls[:: rng.choice((1, -1))]
        conversation = Conversation(rng.choice(self._scripts), name, urls, changes_router=rng.random() < 0.5)
        self.outcome.add(await conversation.run())
        await client.delete(f"{urls[0]}/v1/sessions/{conversation.session_id}")

    async def _leave(self, rng: random.Random, client: httpx.AsyncClient, name: str) -> None:
        """A client that goes away in mid-answer."""
        body = self._body(rng, max_tokens=200, ignore_eos=True, session_id=name) | {"stream": True}
        url = f"{rng.choice(self._cluster.urls)}/v1/chat/completions"
        async with client.stream("POST", url, json=body) as answer:
            left = rng.randrange(12)
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break
        await client.delete(f"{rng.choice(self._cluster.urls)}/v1/sessions/{name}")

    async def _document(self, rng: random.Random, client: httpx.AsyncClient, name: str) -> None:
        url = rng.choice(self._cluster.urls)
        text = rng.choice(self._scripts).questions[0]
        await client.post(f"{url}/v1/documents", json={"id": name, "text": text})
        await client.delete(f"{url}/v1/documents/{name}")

    async def _plain(self, rng: random.Random, client: httpx.AsyncClient, name: str) -> None:
        url = f"{rng.choice(self._cluster.urls)}/v1/chat/completions"
        await client.post(url, json=self._body(rng, max_tokens=8))

    def _body(self, rng: random.Random, **fields: Any) -> dict[str, Any]:
        script = rng.choice(self._scripts)
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": script.questions[0]}],
            "kv_compression": {"method": script.method},
            **fields,
        }

    # ---- faults ----

    async def _strike(self) -> None:
        rng, next_heal_s = random.Random(f"faults {self._seed}"), HEAL_S
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * FAULT_S)
            (fault,) = draw(rng, self._cluster, 1)
            if fault.kind in ("kill", "redis kill"):
                continue
            await strike(fault, self._cluster)
            self.struck[f"{fault.phase}: {fault.kind}"] += 1
            if time.monotonic() - self._begin_s > next_heal_s:
                self._cluster.heal()
                next_heal_s += HEAL_S

    # ---- figures ----

    async def _sample(self) -> None:
        async with httpx.AsyncClient(timeout=1.0) as client:
            while True:
                for name, node in self._cluster.nodes.items():
                    assert node.popen is not None
                    figures = read_process(node.popen.pid)
                    if node.role in _GAUGES:
                        figure, gauge, labels = _GAUGES[node.role]
                        samples = None if node.is_stopped else await self._cluster.metrics(client, node)
                        used = sum((samples or {}).get((gauge, label), 0.0) for label in labels) / 2**20
                        last = self.series[name].figures.get(figure, [0.0])[-1]
                        figures[figure] = used if samples else last
                    self.series[name].add(time.monotonic() - self._begin_s, figures)
                await asyncio.sleep(SAMPLE_S)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(20.0)
            sys.stderr.write(
                f"{(time.monotonic() - self._begin_s) / 60:.1f} min: {dict(self.did)}, "
                f"{self.outcome.right} right, {self.struck.total()} faults, "
                f"{len(self.outcome.violations)} violations\n"
            )


def read_process(pid: int) -> dict[str, float]:
    """Resident memory, file descriptors and threads."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_mib": int(lines["VmRSS"].split()[0]) / 1024,
        "fds": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
        "threads": float(lines["Threads"]),
    }


def slope(at_s: list[float], values: list[float]) -> dict[str, float]:
    """Growth an hour and its standard error, of a line through the means of blocks of the last two thirds."""
    first = len(at_s) // 3
    times, levels = at_s[first:], values[first:]
    size = len(times) // NUM_BLOCKS
    if size == 0:
        return {"per_hour": 0.0, "error": math.inf, "over_run": 0.0}
    points = [
        (
            statistics.fmean(times[k * size : (k + 1) * size]),
            statistics.fmean(levels[k * size : (k + 1) * size]),
        )
        for k in range(NUM_BLOCKS)
    ]
    x, y = [point[0] for point in points], [point[1] for point in points]
    line = statistics.linear_regression(x, y)
    rest = [b - line.intercept - line.slope * a for a, b in points]
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    error = math.sqrt(sum(r * r for r in rest) / (NUM_BLOCKS - 2) / spread)
    return {
        "per_hour": line.slope * 3600,
        "error": error * 3600,
        "over_run": line.slope * (times[-1] - times[0]),
    }


def judged(series: dict[str, Series]) -> dict[str, dict[str, Any]]:
    """The slope of each figure of each process, and whether it grows."""
    found: dict[str, dict[str, Any]] = {}
    for name, samples in series.items():
        for figure, values in samples.figures.items():
            line = slope(samples.at_s, values)
            grows = line["per_hour"] > 2 * line["error"] and line["over_run"] > TOLERANCE[figure]
            found.setdefault(name, {})[figure] = {
                "first": round(values[0], 2),
                "median": round(statistics.median(values), 2),
                "last": round(values[-1], 2),
                **{key: round(value, 3) for key, value in line.items()},
                "grows": grows,
            }
    return found


def plot(series: dict[str, Series], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {
        "rss_mib": "resident MiB",
        "fds": "file descriptors",
        "threads": "threads",
        "arena_mib": "arena MiB in use",
        "history_mib": "MiB of history",
    }
    figure, axes = pyplot.subplots(len(titles), 1, figsize=(9, 13), sharex=True, constrained_layout=True)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for number, (node, samples) in enumerate(series.items()):
            if name in samples.figures:
                times = [at / 60 for at in samples.at_s]
                axis.plot(times, samples.figures[name], label=node, color=f"C{number}", linewidth=1)
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    axes[0].legend(ncols=3, fontsize=8)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)


async def run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    model = load_model(str(DEMO_MODEL), name="demo", device="cpu", dtype="float32", max_model_len=0)
    tokenizer = ChatTokenizer.load(DEMO_MODEL)
    scripts = [
        make_script(number, method, model, tokenizer, max_tokens=24) for number, method in enumerate(METHODS)
    ]
    folder = Path(arguments.logs or tempfile.mkdtemp(prefix="kvferry-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    async with running(folder, history_bytes=HISTORY_BYTES) as cluster:
        soak = Soak(cluster, scripts, arguments.seed)
        await soak.run(arguments.minutes * 60, arguments.clients)
        leaked = await cluster.leaked_bytes()
    slopes = judged(soak.series)
    growing = [
        f"{name} {figure}"
        for name, by_figure in slopes.items()
        for figure in by_figure
        if by_figure[figure]["grows"]
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()
    result = {
        "command": f"python benchmarks/soak.py --minutes {arguments.minutes:g} --seed {arguments.seed} "
        f"--clients {arguments.clients}",
        "commit": commit,
        "requests": dict(soak.did),
        "right": soak.outcome.right,
        "named_errors": dict(sorted(soak.outcome.errors.items())),
        "longest_request_s": round(soak.outcome.longest_s, 1),
        "faults": dict(sorted(soak.struck.items())),
        "violations": soak.outcome.violations,
        "leaked_arena_bytes": leaked,
        "growing": growing,
        "slopes": slopes,
    }
    text = json.dumps(result, indent=1) + "\n"
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
        plot(soak.series, arguments.output.with_suffix(".png"))
    else:
        sys.stdout.write(text)
    return int(bool(growing or leaked or soak.outcome.violations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--logs", default="", help="folder for the processes' logs")
    parser.add_argument("--output", type=Path)
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
