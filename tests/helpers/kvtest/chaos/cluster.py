"""Two routers on one Redis, two prefill and two decode workers: real processes, with a link before each.

    client ─► http-r ─► router r ─► control-r-prefill-i, control-r-decode-i ─► workers
                           └─► redis-r ─► Redis ◄─ redis-prefill-i ◄─┐
              prefill i ─► blocks-decode-i ─► decode i ─► blocks-prefill-i ─► prefill i

Blocks of prefill-1 and decode-1 to each other go through shared memory, which has no link; all others go over
ZeroMQ. A process that was killed is started again at the same ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvtest.chaos import planted
from kvtest.chaos.links import Link
from kvtest.forked import Forked
from kvtest.ports import free_port
from kvtest.redis_server import RedisServer

START_TIMEOUT_S = 180.0
QUIET_TIMEOUT_S = 60.0
_REDIS_OPTIONS = (
    *("--maxmemory-policy", "volatile-lru", "--maxmemory", "256mb"),
    *("--appendonly", "yes", "--appendfsync", "always"),
)
"""A killed Redis has its data afterwards; `tests/e2e/test_redis_faults.py` is about one that has not."""


@dataclass(eq=False)
class Node:
    """One service's process.

    Attributes:
        planted: what `planted.py` does in it.
        options: of `kvferry ROLE`.
    """

    name: str
    folder: Path
    planted: str
    options: tuple[str, ...]
    popen: Forked | None = None
    is_stopped: bool = False

    @property
    def role(self) -> str:
        return self.name.split("-")[0]

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def end_of_log(self) -> str:
        return self.log.read_text()[-4000:]

    def start(self) -> None:
        ready = self.folder / f"{self.name}.json"
        ready.unlink(missing_ok=True)
        self.popen = Forked(
            planted.run,
            [self.planted, self.role, "--ready-file", str(ready), *self.options],
            log=self.log,
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def addresses(self) -> dict[str, str] | None:
        """None until it listens."""
        assert self.popen is not None
        assert self.popen.poll() is None, f"{self.name} ended:\n{self.end_of_log}"
        ready = self.folder / f"{self.name}.json"
        found: dict[str, str] | None = json.loads(ready.read_text()) if ready.exists() else None
        return found

    def kill(self) -> None:
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait(30)

    def stop(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)
        self.is_stopped = True

    def resume(self) -> None:
        if self.is_stopped:
            self._signal(signal.SIGCONT)
            self.is_stopped = False

    def _signal(self, number: signal.Signals) -> None:
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.send_signal(number)


@dataclass(eq=False)
class Cluster:
    """The running processes and the links between them, both by name."""

    folder: Path
    redis: RedisServer
    num_each: int
    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)

    def router_url(self, index: int) -> str:
        return f"http://127.0.0.1:{self.links[f'http-{index}'].port}"

    @property
    def urls(self) -> list[str]:
        return [self.router_url(index) for index in range(self.num_each)]

    @property
    def workers(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.role != "router"]

    def heal(self) -> None:
        """End every fault; killed processes are started again."""
        for link in self.links.values():
            link.heal()
        for node in self.nodes.values():
            node.resume()
            if node.popen is not None and node.popen.poll() is not None:
                node.start()
        self.redis.resume()

    async def listening(self) -> None:
        """Wait until every process listens and every router has every worker."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        async with httpx.AsyncClient(timeout=5) as client:
            while (missing := await self._not_ready(client)) is not None:
                assert time.monotonic() < deadline_s, f"the cluster is not ready: {missing}"
                await asyncio.sleep(0.1)

    async def _not_ready(self, client: httpx.AsyncClient) -> str | None:
        """What does not answer yet, with the end of its log; None if all is ready."""
        for node in self.nodes.values():
            if node.addresses is None:
                return f"{node.name} does not listen:\n{node.end_of_log}"
        for index in range(self.num_each):
            router = self.nodes[f"router-{index}"]
            try:
                reply = await client.get(f"{self.router_url(index)}/ready")
            except httpx.HTTPError as error:
                return f"{router.name} does not answer: {error!r}\n{router.end_of_log}"
            if reply.status_code != 200:
                return f"{router.name} says {reply.text}\n{router.end_of_log}"
        for node in self.nodes.values():
            if await self.metrics(client, node) is None:
                return f"{node.name} has no metrics:\n{node.end_of_log}"
        return None

    async def metrics(self, client: httpx.AsyncClient, node: Node) -> dict[tuple[str, str], float] | None:
        """Samples by name and label "state" or "tier"; None where the process does not answer."""
        addresses = node.addresses
        if addresses is None:
            return None
        address = addresses["metrics"] if "metrics" in addresses else addresses["address"]
        try:
            reply = await client.get(f"http://{address}/metrics")
        except httpx.HTTPError:
            return None
        samples: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                key = (sample.name, sample.labels.get("state") or sample.labels.get("tier", ""))
                samples[key] = samples.get(key, 0.0) + sample.value
        return samples

    async def leaked_bytes(self) -> dict[str, float]:
        """Arena bytes that are neither free nor retained when nothing runs, by decode worker."""
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        async with httpx.AsyncClient(timeout=5) as client:
            while True:
                leaked: dict[str, float] = {}
                for node in self.workers:
                    if node.role == "decode":
                        samples = await self.metrics(client, node) or {}
                        used = sum(
                            samples.get(("kvferry_arena_bytes", state), 0.0)
                            for state in ("reserved", "in_transfer", "running")
                        )
                        if used or not samples:
                            leaked[node.name] = used
                if not leaked or time.monotonic() > deadline_s:
                    return leaked
                await asyncio.sleep(0.2)


@asynccontextmanager
async def running(
    folder: Path,
    planted: dict[str, str] | None = None,
    *,
    num_each: int = 2,
    history_bytes: str = "64MiB",
) -> AsyncIterator[Cluster]:
    """Start a cluster.

    Args:
        planted: what a role's processes do wrong, by role.
        num_each: routers, prefill workers and decode workers.
        history_bytes: a prefill worker's host memory for history.
    """
    planted = planted or {}
    with RedisServer.running(*_REDIS_OPTIONS) as redis:
        cluster = Cluster(folder=folder, redis=redis, num_each=num_each)
        async with AsyncExitStack() as stack:

            async def link(name: str, target_port: int) -> int:
                cluster.links[name] = made = Link(name=name, target_port=target_port)
                await made.start()
                stack.push_async_callback(made.close)
                return made.port

            ports: dict[str, int] = {}
            for role in ("prefill", "decode"):
                for index in range(num_each):
                    name = f"{role}-{index}"
                    ports[name], blocks = free_port(), free_port()
                    advertised = await link(f"blocks-{name}", blocks)
                    options = [
                        *("--threads", "1", "--listen", f"127.0.0.1:{ports[name]}"),
                        *("--block-listen", f"tcp://127.0.0.1:{blocks}"),
                        *("--block-advertise", f"tcp://127.0.0.1:{advertised}"),
                    ]
                    if role == "prefill":
                        url = f"redis://127.0.0.1:{await link(f'redis-{name}', redis.port)}/0"
                        options += ["--history-redis", url, "--history-redis-timeout-s", "1"]
                        options += ["--history-bytes", history_bytes]
                    else:
                        options += ["--arena-bytes", "48MiB"]
                    wrong = planted.get(role, "")
                    wrong = f"tcp,{wrong}" if index == 0 else wrong
                    cluster.nodes[name] = Node(name, folder, wrong, tuple(options))
            for index in range(num_each):
                name, port = f"router-{index}", free_port()
                workers = {
                    role: [
                        f"127.0.0.1:{await link(f'control-{index}-{role}-{i}', ports[f'{role}-{i}'])}"
                        for i in range(num_each)
                    ]
                    for role in ("prefill", "decode")
                }
                url = f"redis://127.0.0.1:{await link(f'redis-{name}', redis.port)}/0"
                options = [
                    *("--listen", f"127.0.0.1:{port}", "--history-redis", url),
                    *("--max-sessions-per-key", "100000"),  # of a long run, which has one key
                    *("--prefill-workers", ",".join(workers["prefill"])),
                    *("--decode-workers", ",".join(workers["decode"])),
                ]
                await link(f"http-{index}", port)
                cluster.nodes[name] = Node(name, folder, planted.get("router", ""), tuple(options))
            for node in cluster.nodes.values():
                node.start()
                stack.callback(_end, node)
            await cluster.listening()
            yield cluster


def _end(node: Node) -> None:
    if node.popen is not None:
        node.popen.kill()
        node.popen.wait(30)
